"""The routed experts op: its CPU strategies, its choice on a GPU, and its kernels without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.interpreted import run_interpreted
from tests.ops.moe.experts_cases import FORMS, call_of, cases, expected
from torchweave.ops.moe import experts as ops
from torchweave.ops.moe.experts import ExpertsCall, apply_expert, dense_experts
from torchweave.ops.moe.fused_experts import (
    WORKSPACE_BYTES,
    Grouped,
    Rows,
    Tiles,
    bytes_per_pair,
    choose,
    run,
    tokens_per_chunk,
)

QWEN3_30B = (128, 2048, 768)
BF16 = torch.bfloat16


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_cpu_and_dense_experts_equal_float64(form: dict[str, Any], tokens: int) -> None:
    case = cases(tokens, **form)
    call = call_of(case)
    got = torch.ops.torchweave.experts(*case.values())
    torch.testing.assert_close(got.double(), expected(call), atol=1e-4, rtol=1e-4)
    call.out.fill_(torch.nan)
    dense_experts(call)
    torch.testing.assert_close(call.out.double(), expected(call), atol=1e-4, rtol=1e-4)


def test_experts_of_other_ranks_are_skipped() -> None:
    case = cases(9)
    case["index"][::2, 1] = case["up"].shape[0] + 3
    got = torch.ops.torchweave.experts(*case.values())
    torch.testing.assert_close(got.double(), expected(call_of(case)), atol=1e-4, rtol=1e-4)


def test_a_shared_expert_is_rounded_as_in_the_model() -> None:
    case = cases(40, shared=True, top=3, dtype=BF16)
    case["weight"] = case["weight"].to(BF16)
    routed = case | {key: case[key][:, :-1] for key in ("index", "weight")} | {"shared": False}
    shared = apply_expert(call_of(case), case["x"], case["up"].shape[0] - 1) * case["weight"][:, -1:]
    sum_of_both = torch.ops.torchweave.experts(*routed.values()) + shared
    assert torch.ops.torchweave.experts(*case.values()).equal(sum_of_both)


def test_the_residual_is_added_to_the_rounded_sum() -> None:
    case = cases(40, shared=True, residual=True, top=3, dtype=BF16)
    alone = torch.ops.torchweave.experts(*(case | {"residual": None}).values())
    assert torch.ops.torchweave.experts(*case.values()).equal(alone + case["residual"])


def test_opcheck() -> None:
    for form in FORMS.values():
        torch.library.opcheck(ops.experts, tuple(cases(5, **form).values()))


def test_strategy_choice() -> None:
    assert isinstance(choose(1, 8, QWEN3_30B, BF16), Rows) and isinstance(choose(2, 8, QWEN3_30B, BF16), Rows)
    assert isinstance(choose(1, 8, QWEN3_30B, BF16, transposed=True), Tiles), "rows are read along their width"
    assert isinstance(choose(3, 8, QWEN3_30B, BF16), Tiles) and isinstance(choose(64, 8, QWEN3_30B, BF16), Tiles)
    middle = choose(512, 8, QWEN3_30B, BF16)
    assert isinstance(middle, Tiles) and middle.block_m == 64, "reading the weights is most of the time still"
    assert isinstance(choose(520, 8, QWEN3_30B, BF16), Grouped) and isinstance(
        choose(4096, 8, QWEN3_30B, BF16), Grouped
    )
    assert isinstance(choose(4096, 8, QWEN3_30B, torch.float16), Grouped)
    assert isinstance(choose(4096, 8, (128, 2048, 765), BF16), Tiles), "tensor descriptors take rows of 16 bytes"


def meta_call(tokens: int, form: dict[str, Any]) -> ExpertsCall:
    """A call of Qwen3-30B-A3B's sizes without memory."""
    small = call_of(cases(1, **form, dtype=BF16))
    experts, width, inner, top = *QWEN3_30B, 8
    experts, top = experts + small.shared, top + small.shared
    columns = inner * (2 if small.form.gated else 1)
    up, down = (experts, columns, width), (experts, width, inner)
    if small.form.transposed:
        up, down = (experts, width, columns), (experts, inner, width)

    def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    biases = (empty(experts, columns), empty(experts, width)) if small.up_bias is not None else (None, None)
    index = empty(tokens, top, dtype=torch.int64)
    x, out = empty(tokens, width), empty(tokens, width)
    residual = None if small.residual is None else empty(tokens, width)
    weights = (empty(tokens, top), empty(*up), empty(*down), *biases)
    return ExpertsCall(x, index, *weights, out, small.form, shared=small.shared, residual=residual)


def test_chunks_have_one_size_and_stay_within_the_workspace() -> None:
    for tokens in (1, 512, 8192, 20_000, 40_000):
        call = meta_call(tokens, FORMS["plain"])
        strategy = choose(tokens, 8, QWEN3_30B, BF16)
        size = tokens_per_chunk(call, strategy, WORKSPACE_BYTES)
        assert size * 8 * bytes_per_pair(call, strategy) <= WORKSPACE_BYTES
        chunks = -(-tokens // size)
        assert (tokens > 11_900) == (chunks > 1) and chunks * size - tokens < chunks


def test_chunks_bound_the_memory_and_change_nothing() -> None:
    run_interpreted("tests.ops.moe.interpreted_experts", "stay_within_the_workspace")


def test_every_strategy_in_the_interpreter() -> None:
    run_interpreted("tests.ops.moe.interpreted_experts", "agree")


def test_skewed_and_foreign_routing_in_the_interpreter() -> None:
    run_interpreted("tests.ops.moe.interpreted_experts", "follow_skewed_and_foreign_routing")


def test_many_pairs_are_sorted_by_blocks() -> None:
    run_interpreted("tests.ops.moe.interpreted_experts", "sort_many_pairs")


@pytest.mark.parametrize(
    ("form", "tokens"),
    [
        ("plain", (1, 64, 4096)),
        ("gpt_oss", (64, 4096)),
        ("ungated", (1, 64)),
        ("shared", (1, 64)),
        ("shared_residual", (1, 64)),
    ],
)
def test_kernels_build_for_hopper(form: str, tokens: tuple[int, ...]) -> None:
    """Launches of each strategy; weights are read 16 bytes at a time."""
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.moe import experts_gemv, experts_grouped_gemm, experts_tiles, sort_pairs

    for count in tokens:
        with (
            recorded(experts_gemv, "rows_up_kernel", "rows_down_kernel") as rows,
            recorded(sort_pairs, "sort_pairs_kernel", "count_pairs_kernel", "place_pairs_kernel") as sort,
            recorded(experts_tiles, "tiles_up_kernel", "tiles_down_kernel", "combine_kernel") as tiles,
            recorded(experts_grouped_gemm, "grouped_up_kernel", "grouped_down_kernel") as grouped,
        ):
            call = meta_call(count, FORMS[form])
            run(call, choose(count, 8, QWEN3_30B, BF16, call.form.transposed))
        launches = rows + sort + tiles + grouped
        assert len(launches) == {1: 2, 64: 4, 4096: 5}[count]
        for launch in launches:
            name = launch.kernel.fn.__name__
            ptx = compile_for_hopper(launch).asm["ptx"]
            assert ("griddepcontrol.wait" in ptx) == (count < 4096), name
            assert "fma.rn.bf16" not in ptx, f"{name} leaves out a rounding of the model"
            if name.startswith("rows"):
                assert "v4.b32" in ptx, name
            if name.startswith(("tiles", "grouped_up")):
                # cp.async.ca copies 4 or 8 bytes, cp.async.cg 16.
                assert "cp.async.cg" in ptx and "cp.async.ca" not in ptx, name
            if name.startswith("grouped"):
                assert "cp.async.bulk.tensor" in ptx and "wgmma.mma_async" in ptx and ".local" not in ptx, name
