"""The Triton kernels of the recurrent ops on CPU tensors, run by Triton's interpreter, against float64.

TRITON_INTERPRET=1 PYTHONPATH=. python -m tests.ops.recurrent.interpreted_recurrent [prefix of a case...]
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from tests.ops.recurrent.recurrent_cases import NAN, SIZES, STATE, STEPS, Case, build, case
from torchweave.ops.recurrent import triton as recurrent_triton
from torchweave.ops.recurrent.call import StateAccess
from torchweave.ops.recurrent.op import _CALLS
from torchweave.ops.recurrent.triton import FEW_PROGRAMS, SHARED_FROM, copy_on_triton, run_on_triton

TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2}


def run(name: str, chosen: Case) -> None:
    built = build(chosen)
    call, state = _CALLS[built.op](**built.args), built.states[STATE]
    if built.position is None:
        run_on_triton(call, state, built.meta)
    else:
        before = state.clone()
        run_on_triton(call, state, built.meta, StateAccess.READ)
        assert torch.equal(state.nan_to_num(), before.nan_to_num()), "a draft changed a state"
        held = replace(call.held(copy_on_triton), out=torch.full_like(call.out, NAN))
        built.overwrite_inputs()
        run_on_triton(held, state, built.meta, StateAccess.COMMIT, built.position)
        assert held.out.isnan().all(), "the commit wrote results"
    built.check(TOLERANCE[chosen.dtype])
    print("ok", name, flush=True)


def cases() -> dict[str, Case]:
    """Every step of each op, the mixed step of its other `SIZES`, and steps with strides, with more rows than one search of a
    chunk's row reads, and in float16 (the interpreter has no products of bfloat16)."""
    found = {f"{name}:mixed": case(name, "mixed") for name in SIZES}
    for name in ("conv_wide", "delta_by_channel", "delta_gates"):
        found[f"{name}:decode"] = case(name, "decode")
    for name in ("conv", "delta", "ssd", "scan", "lru"):
        found |= {f"{name}:{step}": case(name, step) for step in STEPS}
        found[f"{name}:strided"] = case(name, "mixed", strided=True)
        found[f"{name}:strided_drafts"] = case(name, "drafts", strided=True)
        found[f"{name}:strided_decode"] = case(name, "decode", strided=True)
        found[f"{name}:float16"] = case(name, "mixed", dtype=torch.float16)
    found["conv:many_rows"] = case("conv", "mixed", rows=tuple((1 + i % 3, i % 5) for i in range(140)), padded_tokens=9)
    found["delta_alike:continued"] = case("delta_alike", "continued")
    for name, tokens in (("delta", 9), ("ssd", 3)):
        found[f"{name}:shared_programs"] = case(
            name, "mixed", rows=tuple((1 if i % 4 == 3 else tokens + i % 2, i % 5) for i in range(14)), padded_tokens=5
        )
    return found


if __name__ == "__main__":
    chosen = {name: each for name, each in cases().items() if name.startswith(tuple(sys.argv[1:] or [""]))}
    assert chosen, f"no case begins with {sys.argv[1:]}"
    for name, each in chosen.items():
        if name.endswith("shared_programs"):  # each program takes several of the chunks
            recurrent_triton.FEW_PROGRAMS = recurrent_triton.SHARED_FROM = 1
        else:
            recurrent_triton.FEW_PROGRAMS, recurrent_triton.SHARED_FROM = FEW_PROGRAMS, SHARED_FROM
        run(name, each)
