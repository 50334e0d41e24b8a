"""The Triton kernels of the recurrent ops without a GPU: interpreted against float64, and built for sm_90."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.ops.interpreted import run_interpreted
from tests.ops.recurrent.recurrent_cases import SIZES, STATE, Case, build, case

pytest.importorskip("triton")

from tests.ops.cross_compile import Launch, compile_for_hopper, recorded, spilled_bytes
from torchweave.ops.recurrent import triton as recurrent_triton
from torchweave.ops.recurrent.call import StateAccess
from torchweave.ops.recurrent.op import _CALLS

KERNELS = (
    "conv_decode", "conv_mixed", "copy_tokens", "delta_prefill", "delta_scan", "delta_solve", "lru_scan", "selective_scan",
    "ssd_chunk_scan", "ssd_chunk_states", "ssd_decode", "ssd_drafts", "ssd_pass_states",
)  # fmt: skip
HOPPER_SMEM = 232448
DECODE = {"rows": ((1, 5), (1, 70))}
MIXED = {"rows": ((1, 5), (140, 70))}
FEW = {"rows": ((1, 5), (7, 70))}
DRAFTS = {"rows": ((4, 5), (1, 70)), "kept": (2, 1), "padded_tokens": 3}


def launches(chosen: Case) -> list[Launch]:
    """What the op launches for one step; with drafts, to read the state and to advance it."""
    built = build(chosen)
    call, state = _CALLS[built.op](**built.args), built.states[STATE]
    with ExitStack() as stack:
        found = stack.enter_context(recorded(recurrent_triton, *KERNELS))
        if built.position is None:
            recurrent_triton.run_on_triton(call, state, built.meta)
        else:
            recurrent_triton.run_on_triton(call, state, built.meta, StateAccess.READ)
            held = dataclasses.replace(call.held(recurrent_triton.copy_on_triton), out=torch.empty_like(call.out))
            recurrent_triton.run_on_triton(held, state, built.meta, StateAccess.COMMIT, built.position)
    return found


def names(found: list[Launch]) -> list[str]:
    return [launch.kernel.fn.__name__ for launch in found]


@pytest.mark.parametrize("name", ["conv", "delta", "ssd", "scan", "lru"])
def test_interpreted_kernels_are_right(name: str) -> None:
    """All of `interpreted_recurrent.cases()` of one op."""
    run_interpreted("tests.ops.recurrent.interpreted_recurrent", name)


LAUNCHED = {
    "conv": (["conv_decode"], ["conv_mixed"], "conv_mixed"),
    "delta": (["delta_scan"], ["delta_solve", "delta_prefill", "delta_scan"], "delta_scan"),
    "delta_by_channel": (["delta_scan"], ["delta_scan"], "delta_scan"),
    "ssd": (["ssd_decode"], ["ssd_chunk_states", "ssd_pass_states", "ssd_chunk_scan", "ssd_decode"], "ssd_drafts"),
    "scan": (["selective_scan"], ["selective_scan"], "selective_scan"),
    "lru": (["lru_scan"], ["lru_scan"], "lru_scan"),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_decode_step_is_one_launch(name: str) -> None:
    decode, mixed, drafts = LAUNCHED[name]
    if name == "ssd":
        assert names(launches(case(name, "mixed", **FEW))) == mixed[2:]
    assert names(launches(case(name, "decode", **DECODE))) == decode
    assert names(launches(case(name, "mixed", **MIXED))) == mixed
    assert names(launches(case(name, "drafts", **DRAFTS))) == [drafts, "copy_tokens", drafts]


@pytest.mark.parametrize("name", LAUNCHED)
@pytest.mark.parametrize("step", ["mixed", "drafts"])
def test_grids_depend_on_rows_and_tokens_only(name: str, step: str) -> None:
    """Other lengths of the same number of rows and tokens launch the same programs, as a recorded CUDA graph needs."""
    lengths = {
        "mixed": ({"rows": ((1, 5), (1, 0), (40, 0))}, {"rows": ((20, 3), (20, 0), (2, 900))}),
        "drafts": (
            {"rows": ((4, 5), (4, 9), (4, 70)), "kept": (1, 2, 4), "padded_tokens": 0},
            {"rows": ((1, 5), (3, 9), None), "kept": (1, 1, 0), "padded_tokens": 8},
        ),
    }
    first, second = (
        [
            (each.kernel, each.grid, sorted(each.kwargs.items(), key=str))
            for each in launches(case(name, step, **changes))
        ]
        for changes in lengths[step]
    )
    assert first == second


PUBLISHED = {
    "lfm2": ("conv", (2048, 3)),
    "qwen3_next_conv": ("conv", (8192, 4)),
    "qwen3_next": ("delta", (16, 32, 128, 128)),
    "qwen3_5": ("delta_gates", (16, 32, 128, 128)),
    "kimi_linear": ("delta_by_channel", (32, 32, 128, 128)),
    "falcon_h1": ("ssd_gates", (24, 128, 1, 256)),
    "nemotron_h": ("ssd", (128, 64, 8, 128)),
    "minimax": ("ssd_lightning", (64, 128, 64, 128)),
    "mamba": ("scan", (8192, 16)),
    "recurrent_gemma": ("lru", (2560,)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", PUBLISHED)
def test_kernels_build_for_hopper(model: str, dtype: torch.dtype) -> None:
    name, sizes = PUBLISHED[model]
    for step, rows in (("decode", DECODE), ("mixed", MIXED), ("mixed", FEW), ("drafts", DRAFTS)):
        chosen = dataclasses.replace(case(name, step, dtype=dtype, **rows), sizes=sizes)
        for launch in launches(chosen):
            kernel = compile_for_hopper(launch)
            assert kernel.metadata.shared <= HOPPER_SMEM, f"{launch.kernel.fn.__name__} takes too much shared memory"
            if (
                launch.kernel.fn.__name__ in ("delta_solve", "delta_prefill", "ssd_chunk_states", "ssd_chunk_scan")
                and dtype != torch.float32
            ):
                assert "mma" in kernel.asm["ptx"], "the chunked form does not use the tensor cores"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 32])
@pytest.mark.parametrize("model", ["qwen3_next_conv", "lfm2"])
def test_a_thread_of_a_decode_convolution_has_one_channel(
    model: str, num_rows: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """At every number of rows. Threads exchange nothing, so the thread that reads a channel's state also writes it."""
    name, sizes = PUBLISHED[model]
    chosen = dataclasses.replace(case(name, "decode", dtype=dtype, rows=((1, 5),) * num_rows), sizes=sizes)
    (launch,) = launches(chosen)
    assert launch.kwargs["BLOCK"] == 32 * launch.kwargs["num_warps"]
    assert launch.grid == (sizes[0] // launch.kwargs["BLOCK"], num_rows)
    kernel = compile_for_hopper(launch)
    assert kernel.metadata.shared == 0
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("model", ["qwen3_5", "falcon_h1", "nemotron_h"])
def test_states_of_decode_steps_stay_in_registers(model: str, tmp_path: Path) -> None:
    name, sizes = PUBLISHED[model]
    many = case(name, "decode", dtype=torch.bfloat16, rows=((1, 5),) * 32)
    (launch,) = launches(dataclasses.replace(many, sizes=sizes))
    assert spilled_bytes(compile_for_hopper(launch), tmp_path) == 0


def test_every_size_is_a_case() -> None:
    assert {name.split("_")[0] for name in SIZES} == {name.split("_")[0] for name in LAUNCHED}


@pytest.mark.parametrize("name", ["ssd", "delta"])
def test_programs_of_a_prompt_do_not_grow_with_the_rows_of_a_recording(name: str) -> None:
    """A recorded step has a row for each token, up to `max_batch_size`; a program that finds no chunk of its own takes its time."""
    model = {"ssd": "falcon_h1", "delta": "qwen3_next"}[name]

    def programs(padded_rows: int) -> dict[str, int]:
        chosen = dataclasses.replace(
            case(name, "mixed", rows=((512, 0),), dtype=torch.bfloat16), sizes=PUBLISHED[model][1]
        )
        built = build(chosen)
        meta = dataclasses.replace(built.meta, num_rows=1 + padded_rows)
        with ExitStack() as stack:
            found = stack.enter_context(recorded(recurrent_triton, *KERNELS))
            recurrent_triton.run_on_triton(_CALLS[built.op](**built.args), built.states[STATE], meta)
        return {launch.kernel.fn.__name__: math.prod(launch.grid) for launch in found}

    large = [kernel for kernel in programs(0) if kernel not in ("ssd_decode", "delta_scan")]
    assert len(large) >= 2
    for kernel in large:
        assert programs(511)[kernel] <= 8 * recurrent_triton.FEW_PROGRAMS, kernel
