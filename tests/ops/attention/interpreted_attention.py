"""The Triton backend on CPU tensors, run by Triton's interpreter, against float64.

TRITON_INTERPRET=1 PYTHONPATH=. python tests/ops/attention/interpreted_attention.py [case...]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.ops.attention.attention_cases import CASES, ROTARY_CASES, Case, build, in_fp8
from torchweave.ops.attention.backends.triton import DecodeConfig, PrefillConfig, TritonBackend
from torchweave.ops.attention.kv_cache_dtype import FP8_DTYPES
from torchweave.ops.attention.op import LayerSpec
from torchweave.ops.kernels.activation import launch_gated
from torchweave.ops.quant.fp8 import FP8, GROUP, fp8_quant

DECODE = DecodeConfig(block_n=16, programs_per_sm=4, min_tiles=1)
PREFILL = PrefillConfig(16, 16)


@contextmanager
def gpu_rounding() -> Iterator[None]:
    """Triton's interpreter truncates casts to FP8; within, it rounds to nearest even, as GPUs do."""
    numbers = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    before = interpreter._convert_float

    def convert(data, source, target, rounding):
        if str(target) not in numbers:
            return before(data, source, target, rounding)
        assert source == tl.float32
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(numbers[str(target)])
        return rounded.view(torch.uint8).numpy()

    with mock.patch.object(interpreter, "_convert_float", convert):
        yield


def run(name: str, case: Case, decode: DecodeConfig = DECODE, prefill: PrefillConfig = PREFILL) -> None:
    backend = TritonBackend(torch.device("cpu"), decode=decode, prefill=prefill, num_sms=8)
    built = build(case)
    for _ in range(2 if case.decode_only else 1):  # a launch must leave the counters as it found them
        built.out.fill_(float("nan"))
        with gpu_rounding():
            built.run(backend.begin(built.meta))
        built.check(1e-5)
    assert all(not work.counters.any() for work in backend._workspaces.values()), "counters were not reset"
    print("ok", name, flush=True)


def run_quantized(name: str, case: Case) -> None:
    """The decode kernel's own FP8 results against those of quantizing what it gives without. The interpreter does not round to
    e4m3 as GPUs do: the last cast is left to torch."""
    built = build(case)
    step = TritonBackend(torch.device("cpu"), decode=DECODE, prefill=PREFILL, num_sms=8).begin(built.meta)
    built.run(step)
    tokens, heads, dim = built.out.shape
    for group, given in ((0, torch.tensor([0.01])), (GROUP, None)):
        q, scale = fp8_quant(built.out.view(tokens, heads * dim), group, given)
        written = None if given is not None else torch.full_like(scale, torch.nan)
        got = torch.full_like(built.out, torch.nan)
        step.forward(dataclasses.replace(built.call, out=got, given_scale=given, out_scale=written), built.cache)
        assert torch.equal(got.to(FP8).float().view(tokens, -1), q.float()), group
        assert written is None or torch.equal(written, scale), group
    print("ok", name, flush=True)


def run_gated(name: str, case: Case) -> None:
    """The kernels' own product with the gate against the kernel that multiplies what they give without, in each bit."""
    for dtype in (torch.float32, torch.bfloat16):
        built = build(dataclasses.replace(case, dtype=dtype, gated=True))
        step = TritonBackend(torch.device("cpu"), decode=DECODE, prefill=PREFILL, num_sms=8).begin(built.meta)
        plain = torch.full_like(built.out, torch.nan)
        step.forward(dataclasses.replace(built.call, out=plain, gate=None), built.cache)
        built.run(step)
        assert built.call.gate is not None and not torch.equal(built.out, plain)
        assert torch.equal(built.out, launch_gated(built.call.gate, plain, "sigmoid")), dtype
    print("ok", name, flush=True)


def variants() -> dict[str, tuple]:
    """Launches that differ from the plain ones: forms of the kernels, and sizes of tiles against blocks."""
    mixed, decode = CASES["mixed"], CASES["decode"]
    sinks = CASES["mixed_sinks"]
    return {
        "multiply_and_sum": (decode, dataclasses.replace(DECODE, dot=False)),
        "more_splits_than_loads": (Case(((1, 250), (1, 90)), LayerSpec(1, 32, 400, 5)),),
        "one_split": (decode, dataclasses.replace(DECODE, programs_per_sm=1)),
        "tile_over_blocks": (mixed, DecodeConfig(block_n=32, min_tiles=1), PrefillConfig(32, 32)),
        "tile_within_block": (dataclasses.replace(mixed, block_size=64), DECODE, PREFILL),
        "sinks_over_blocks": (
            dataclasses.replace(sinks, block_size=4),
            DecodeConfig(block_n=32, min_tiles=1),
            PrefillConfig(16, 32),
        ),
        "group_of_three": (dataclasses.replace(mixed, spec=LayerSpec(1, 16, 16, 3)),),
        "fp8_multiply_and_sum": (in_fp8(decode), dataclasses.replace(DECODE, dot=False)),
        **{f"decode_{form}": (in_fp8(CASES["decode_all"], dtype),) for form, dtype in FP8_DTYPES.items()},
        **{f"mixed_{form}": (in_fp8(CASES["mixed_value_dim"], dtype),) for form, dtype in FP8_DTYPES.items()},
        "turned_decode_fp8": (in_fp8(ROTARY_CASES["turned_decode_norm"]),),
        "turned_mixed_fp8": (in_fp8(ROTARY_CASES["turned_mixed"]),),
        "many_rows": (Case(tuple((1 + i % 3, i % 5) for i in range(140)), LayerSpec(1, 16, 16, 1), padded_tokens=9),),
    }


if __name__ == "__main__":
    extra = variants()
    quantized = Case(((1, 0), (1, 33), None, (1, 70)), LayerSpec(2, 32, 128, 6), rotary=32)
    gated = dataclasses.replace(quantized, gated=True)
    for wanted in sys.argv[1:] or [*CASES, *ROTARY_CASES, *extra, "quantized", "gated"]:
        if wanted == "quantized":
            run_quantized(wanted, quantized)
            run_quantized("quantized, gated", gated)
        elif wanted == "gated":
            run_gated("decode, gated", quantized)
            run_gated("mixed, gated", CASES["mixed"])
        elif wanted in CASES or wanted in ROTARY_CASES:
            run(wanted, (CASES | ROTARY_CASES)[wanted])
        else:
            run(wanted, *extra[wanted])
