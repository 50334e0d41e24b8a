"""The Triton kernel of `varlen_attention` on CPU tensors, run by Triton's interpreter, against float64.

In float16: the interpreter multiplies the bits of bfloat16 numbers as integers.

TRITON_INTERPRET=1 PYTHONPATH=. python -m tests.ops.attention.interpreted_varlen
"""

from __future__ import annotations

from itertools import pairwise

import torch

from torchweave.ops.attention.varlen import VarlenConfig, launch_varlen_attention

CASES = (
    (72, [0, 16, 37, 37, 70], torch.int32),  # tiles of keys that are whole, one that is not, an empty sequence
    (24, [0, 5], torch.int64),
    (104, [0, 40], torch.int64),
)
"""Head size, where each sequence ends, dtype of `cu_seqlens`."""


def run(head_dim: int, bounds: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    together = torch.randn(bounds[-1] + 1, 3, 2, head_dim, dtype=torch.float16)
    query, key, value = together[1:].unbind(1)  # views with strides of their own
    key, value = key.contiguous(), value + 3.0
    together[0] = float("nan")  # before the first sequence
    out = launch_varlen_attention(query, key, value, torch.tensor(bounds, dtype=dtype), 0.2, VarlenConfig(16, 16))
    assert out.is_contiguous()
    for begin, end in pairwise(bounds):
        q, k, v = (tensor[begin:end].double() for tensor in (query, key, value))
        expected = torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) * 0.2).softmax(-1), v)
        torch.testing.assert_close(out[begin:end].double(), expected, rtol=2e-3, atol=2e-3)
    print("ok", head_dim, bounds, flush=True)


if __name__ == "__main__":
    for case in CASES:
        run(*case)
