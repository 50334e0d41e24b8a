"""Run by test_rope with TRITON_INTERPRET=1: the kernel against float64, and bit by bit against the reference."""

from __future__ import annotations

import torch

from tests.ops.fusion_cases import DIALECTS, angles, draw, heads_of, norm64, rope64
from torchweave.ops.kernels.rope import QKNorm, launch_rope
from torchweave.ops.rope import qk_norm_rope, rope

EPS = 1e-6


def main() -> None:
    for dim, width, heads in ((16, 16, (4, 2, 2)), (12, 8, (3, 1, 1)), (10, 10, (5, 5, 0))):
        product = draw(6, dim * sum(heads))
        q, k, *_ = heads_of(product, *heads)
        cos, sin = angles(6, width)
        got = launch_rope(q[None], k[None], cos[None], sin[None])
        for each, x in zip(got, (q, k), strict=True):
            assert each.shape == (1, *x.shape) and each.is_contiguous()
            torch.testing.assert_close(each[0].double(), rope64(x, cos, sin), rtol=2**-20, atol=1e-6)
        weights = draw(dim), draw(dim) + 1
        for _, options in DIALECTS:
            offset, wide = options.get("offset", 0.0), options.get("wide", False)
            got = launch_rope(q, k, cos, sin, QKNorm(*weights, EPS, offset, wide))
            for each, x, weight in zip(got, (q, k), weights, strict=True):
                exact = rope64(norm64(x, weight, EPS, offset), cos, sin)
                torch.testing.assert_close(each.double(), exact, rtol=2**-19, atol=2e-6)

        half = product.half()
        q, k, *_ = heads_of(half, *heads)
        cos, sin = angles(6, width, torch.float16)
        assert all(map(torch.equal, launch_rope(q, k, cos, sin), rope(q, k, cos, sin)))
        weights = draw(dim).half(), draw(dim).half() + 1
        for _, options in DIALECTS:
            offset, wide = options.get("offset", 0.0), options.get("wide", False)
            got = launch_rope(q, k, cos, sin, QKNorm(*weights, EPS, offset, wide))
            assert all(map(torch.equal, got, qk_norm_rope(q, k, *weights, cos, sin, EPS, offset, wide)))


if __name__ == "__main__":
    main()
