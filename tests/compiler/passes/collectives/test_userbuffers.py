"""User buffers: matches on a block of five linears, near-misses, results on two ranks."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from tests.compiler.passes.collectives.rank_blocks import Block, D, inputs, part, weights, whole
from tests.ops.collectives.collective_cases import mirrored
from tests.ranks import run_ranks
from torchweave.compiler import CompiledGraph, compile_graph
from torchweave.compiler.explain.facts import as_json, explain, schema
from torchweave.compiler.explain.page import page
from torchweave.compiler.passes.aten import raise_rms_norm
from torchweave.compiler.passes.base import Pass
from torchweave.compiler.passes.collectives import all_reduce_norm
from torchweave.compiler.passes.collectives.all_reduce_norm_quant import FP4, FP8
from torchweave.compiler.passes.collectives.user_buffers import (
    UserBuffersConvert,
    UserBuffersPrologue,
    slots,
)
from torchweave.compiler.passes.manager import PassManager, default_passes, run_pass
from torchweave.compiler.passes.testing import T, check, graph_of
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.distributed.process_groups import ProcessGroupCommunicator, ProcessGroups
from torchweave.ops.collectives.op import register_communicator
from torchweave.ops.quant.fp8 import GROUP, PER_TOKEN
from torchweave.ops.quant.nvfp4 import dequantize_fp4
from torchweave.report import Report

ops = torch.ops.torchweave
FUSIONS = (raise_rms_norm.FUSION, all_reduce_norm.FUSION, FP8)
CONVERT = UserBuffersConvert(devices=("cpu",))
BUFFERS = (CONVERT, UserBuffersPrologue())
FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)


@pytest.fixture(autouse=True)
def ranks() -> Iterator[str]:
    with mirrored() as group:
        yield group


def compiled_graph(module: Block, passes: tuple[Pass, ...], config: TorchCompileConfig = FX) -> CompiledGraph:
    example = {"x": torch.zeros(T, module.parts[0].shape[1]), "residual": torch.zeros(T, D)}
    example = {name: each.to(module.dtype) for name, each in example.items()}
    dynamic = {name: {0: "T"} for name in example}
    return compile_graph(module, example, dynamic, config=config, passes=passes, report=Report(show=False))


def counts(compiled_graph: CompiledGraph) -> dict[str, int]:
    return {event["name"]: event["matches"] for event in compiled_graph.report.select("pass") if event["enabled"]}


def same(one: CompiledGraph, other: CompiledGraph, rank: int, dtype: torch.dtype, rtol: float = 0.0) -> None:
    for tokens in (1, 2, 7, 33):
        x, residual = inputs(tokens)
        given = part(x, rank, 2, dtype), residual.to(dtype)
        torch.testing.assert_close(one(call_op, *given), other(call_op, *given), rtol=rtol, atol=rtol)


# -- the block ---------------------------------------------------------------------------------------------------------


def test_match_counts_on_a_block_of_five_linears() -> None:
    found = compiled_graph(Block(0, 2, torch.bfloat16, quantized=True), (*FUSIONS, *BUFFERS))
    assert counts(found) == {
        "raise_rms_norm": 3,
        "all_reduce_norm": 3,
        "all_reduce_norm_fp8": 2,
        "userbuffers_convert": 3,
        "userbuffers_prologue": 3,
    }
    changes: Counter[str] = Counter()
    for event in found.report.select("pass"):
        changes.update({name: change for name, change in event.get("diff", {}).items() if "torchweave" in name})
    assert {name.split(".")[1]: change for name, change in changes.items() if change} == {
        "all_reduce": -3,
        "fp8_quant": -2,
        "fp8_linear": -3,
        "buffered_all_reduce_add_rms_norm_fp8": 2,
        "buffered_all_reduce_add_rms_norm": 1,
    }


@pytest.mark.parametrize("inductor", [False, True])
def test_user_buffers_are_bitwise_equal_in_fx_and_inductor_code(inductor: bool) -> None:
    module = Block(0, 2, torch.bfloat16, reads_sum=True)
    config = replace(FX, enable_inductor=inductor)
    passes = (*FUSIONS, CONVERT, UserBuffersPrologue())
    found = compiled_graph(module, passes, config)
    assert counts(found)["userbuffers_prologue"] == 3
    same(found, compiled_graph(module, ()), 0, torch.bfloat16)


# -- two ranks -----------------------------------------------------------------------------------------------------------


def quantized_on_two_ranks(process_groups: ProcessGroups) -> dict[str, float]:
    """Error of a quantized norm after a sum against float64, by scheme; the fused form has equal bits."""
    found = {}
    wide = [
        torch.randn(T, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    ]
    for scheme in ("token", "groups", "static", "fp4"):

        def behind_a_sum(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, scheme: str = scheme) -> Any:
            y = ops.rms_norm(ops.all_reduce(x, "tp") + residual, weight, 1e-5)
            if scheme == "fp4":
                return ops.fp4_quant(y, scale)
            return ops.fp8_quant(y, GROUP if scheme == "groups" else PER_TOKEN, scale if scheme == "static" else None)

        scale = torch.full((1,), 0.002 if scheme == "fp4" else 0.01)
        given = [wide[process_groups.tensor_rank].bfloat16(), wide[2].bfloat16(), torch.ones(256).bfloat16(), scale]
        q, s = behind_a_sum(*given)
        graph = graph_of(behind_a_sum, given)
        matches = [run_pass(each, graph).matches for each in (all_reduce_norm.FUSION, FP8, FP4)]
        assert matches == [1, scheme != "fp4", scheme == "fp4"]
        got_q, got_s = graph.module(*given)
        assert torch.equal(got_q.view(torch.uint8), q.view(torch.uint8)) and torch.equal(got_s.float(), s.float())
        assert got_q.is_contiguous() and got_s.is_contiguous(), "what products read"
        exact = torch.nn.functional.rms_norm(wide[0] + wide[1] + wide[2], (256,), eps=1e-5)
        found[scheme] = float((dequantized(scheme, q, s, scale) - exact).abs().max() / exact.abs().max())
    return found


def dequantized(scheme: str, q: Tensor, s: Tensor, scale: Tensor) -> Tensor:
    if scheme == "fp4":
        return dequantize_fp4(q, s, torch.float64) * scale
    return q.double() * (s.t().repeat_interleave(GROUP, 1) if scheme == "groups" else s)


def on_two_ranks(process_groups: ProcessGroups) -> dict[str, float]:
    """Error of each form against float64, by case; all forms of a case have equal bits on this rank."""
    register_communicator("tp", ProcessGroupCommunicator(process_groups.groups["tp"]))
    found = quantized_on_two_ranks(process_groups)
    for dtype, quantized, reads_sum in (
        (torch.float32, False, False),
        (torch.bfloat16, True, True),
    ):
        module = Block(process_groups.tensor_rank, 2, dtype, quantized, reads_sum)
        plain = compiled_graph(module, ())
        each = compiled_graph(module, (*FUSIONS, *BUFFERS))
        assert counts(each)["userbuffers_convert"] == 3
        same(each, plain, process_groups.tensor_rank, dtype)
        found[f"{dtype} {quantized} {reads_sum}"] = distance(each, process_groups.tensor_rank, dtype)
    return found


def distance(compiled_graph: CompiledGraph, rank: int, dtype: torch.dtype) -> float:
    """Largest error relative to the largest number of the result."""
    worst = 0.0
    for tokens in (1, 5):
        x, residual = inputs(tokens)
        got = compiled_graph(call_op, part(x, rank, 2, dtype), residual.to(dtype))
        for one, other in zip(got, whole(x, residual, weights()), strict=False):
            worst = max(worst, float((one.double() - other).abs().max() / other.abs().max()))
    return worst


def test_two_ranks_equal_one_device_in_float64() -> None:
    ranks = run_ranks(on_two_ranks, 2)
    assert ranks[0] == ranks[1], "every rank has the same result"
    for case, error in ranks[0].items():
        assert error < (
            0.2
            if case == "fp4"
            else 0.08
            if "True " in case or " " not in case
            else 0.03
            if "bfloat16" in case
            else 2e-6
        ), case


@pytest.mark.parametrize("quant", ["", "fp8", "fp4"])
def test_opcheck(quant: str) -> None:
    how = {"": (), "fp8": (GROUP, None, False), "fp4": (torch.ones(1), False)}[quant]
    op = getattr(ops, "_".join(filter(None, ("buffered_all_reduce_add_rms_norm", quant)))).default
    torch.library.opcheck(op, ("linear", [A, W], "", BF16, 0, R, N, 1e-5, 0.0, False, *how, True, "tp"))


def test_unknown_producer_is_rejected() -> None:
    with pytest.raises(ValueError, match="producer 'sum' is unknown; expected copy, add, linear, fp8_linear"):
        ops.buffered_all_reduce("sum", [A], "", BF16, 0, "tp")


# -- near-misses ---------------------------------------------------------------------------------------------------------

BF16 = torch.bfloat16
A, R, W = torch.randn(1, T, D).to(BF16), torch.randn(1, T, D).to(BF16), torch.randn(D, D).to(BF16) / 8
N = torch.ones(D).to(BF16)


def fused(
    x: Tensor, residual: Tensor | None, norm: Tensor, keep: bool = True, group: str = "tp"
) -> tuple[Tensor, Tensor]:
    return ops.all_reduce_add_rms_norm(x, residual, norm, 1e-5, 0.0, False, keep, group)


def lonely(a: Tensor, r: Tensor, w: Tensor, n: Tensor) -> Any:
    return fused(a @ w, r, n)


def beside(a: Tensor, r: Tensor, w: Tensor, n: Tensor) -> Any:
    return ops.all_reduce(a @ w, "tp"), ops.all_reduce(r @ w, "tp")


def two_groups(a: Tensor, r: Tensor, w: Tensor, n: Tensor) -> Any:
    return ops.all_reduce(ops.all_reduce(a, "tp"), "ep")


def chain(a: Tensor, r: Tensor, w: Tensor, n: Tensor) -> Any:
    y, h = fused(a, r, n)
    return *fused(torch.sin(y), h, n), ops.all_reduce(torch.cos(y), "ep")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lonely, "no other collective of its group"),
        (beside, "nothing orders it after"),
        (two_groups, "no other collective of its group"),
    ],
)
def test_convert_names_near_misses(function: Any, why: str) -> None:
    with mirrored("ep"):
        check(CONVERT, function, [A, R, W, N], near_miss=why)
        check(CONVERT, chain, [A, R, W, N], matches=2, near_miss="no other collective")


def test_consecutive_collectives_alternate_slots() -> None:
    for count in range(2, 12):
        indices = slots(count)
        assert indices[0] == 0 and indices[-1] == 1 and len(indices) == count and set(indices) <= {0, 1, 2}
        assert all(one != other for one, other in pairwise([*indices, *indices]))


def buffered(x: Tensor) -> Tensor:
    return ops.buffered_all_reduce("copy", [x], "", x.dtype, 0, "tp")


PRODUCED = [
    (lambda a, r, w, n: buffered(torch.nn.functional.linear(a, w, n)), None),
    (lambda a, r, w, n: buffered(ops.linear(a, w, None, "1=blas")), None),
    (lambda a, r, w, n: buffered(a + r), None),
    (lambda a, r, w, n: buffered(torch.add(a, r, alpha=2)), "alpha"),
    (lambda a, r, w, n: buffered(a + r[:, :1]), "has an addend of another shape"),
    (lambda a, r, w, n: buffered(a + 1), "has an addend of another shape"),
    (lambda a, r, w, n: buffered(torch.sin(a)), "sin.default, which cannot write to a given buffer"),
    (lambda a, r, w, n: buffered(a), "made in another piece"),
    (lambda a, r, w, n: [buffered(b := a + r), b * 2], "is also read by"),
]


@pytest.mark.parametrize(("function", "why"), PRODUCED)
def test_prologue_takes_products_and_sums_and_names_near_misses(function: Any, why: str | None) -> None:
    check(UserBuffersPrologue(), function, [A, R, W, N], near_miss=why)


# -- settings ------------------------------------------------------------------------------------------------------------


def settings(config: TorchCompileConfig, ranks: int) -> dict[str, tuple[bool, str]]:
    manager = PassManager(None, config, ranks=ranks)
    return {setting.each.name: (setting.enabled, setting.why) for setting in manager.settings}


def test_enable_userbuffers_and_the_number_of_ranks_switch_the_passes() -> None:
    names = ("userbuffers_convert", "userbuffers_prologue")
    assert all(settings(TorchCompileConfig(), 2)[name] == (True, "") for name in (*names, "all_reduce_norm"))
    off = settings(TorchCompileConfig(enable_userbuffers=False), 2)
    assert all(off[name] == (False, "enable_userbuffers is off") for name in names)
    assert off["all_reduce_norm"][0], "the fusion needs no such memory"
    alone = settings(TorchCompileConfig(), 1)
    rank_passes = [each.name for each in default_passes() if "ranks" in getattr(each, "needs", ())]
    assert len(rank_passes) == 5
    assert all(alone[name] == (False, "needs more than one rank") for name in rank_passes)


def test_passes_of_earlier_versions_are_named_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = logging.getLogger("torchweave")
    monkeypatch.setattr(log, "warning", lambda text, *args: said.append(text % args))
    settings(TorchCompileConfig(enabled_passes=("sequence_parallel",)), 2)
    assert said == ["There is no pass sequence_parallel any more: it was faster at no size. Leave it out."]


def test_explain_reports_collectives_before_and_after_fusion() -> None:
    found = compiled_graph(Block(0, 2, torch.bfloat16), (*FUSIONS, CONVERT, UserBuffersPrologue()))
    facts = explain(None, found.report)["communication"]
    (piece,) = facts["pieces"]
    sums = {"op": "torchweave::all_reduce", "group": "tp", "per": "T", "bytes": 2 * D, "calls": 3, "at_most": None}
    assert piece["exchanges"] == [sums]
    assert piece["became"] == [{"tokens": None, "ops": {"torchweave::buffered_all_reduce_add_rms_norm": 3}}]
    assert [row["pass"] for row in facts["fusions"]] == [
        "all_reduce_norm",
        "userbuffers_convert",
        "userbuffers_prologue",
    ]
    jsonschema.validate(json.loads(as_json(explain(None, found.report))), schema())
    assert "buffered_all_reduce_add_rms_norm" in page(explain(None, found.report))
