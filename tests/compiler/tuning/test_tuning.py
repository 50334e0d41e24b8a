"""Tuning with a simulated clock: which choices are kept, used, and ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compiler.passes.torch_ir.test_small_linears import decoder
from tests.compiler.toy import BOUNDARY, DYNAMIC, example, step
from torchweave.compiler import CompileCache, CompiledGraph, autotune, compile_graph
from torchweave.compiler.autotune import Module, tune_module
from torchweave.compiler.passes.aten import gated_activation, raise_rms_norm
from torchweave.compiler.passes.aten.fused_linears import FusedLinears
from torchweave.compiler.passes.base import GraphPass, Pass, PassResult
from torchweave.compiler.passes.manager import PassManager
from torchweave.compiler.passes.torch_ir.merge_linears import MergeLinears
from torchweave.compiler.passes.torch_ir.small_linears import SmallLinears
from torchweave.compiler.runtime.forward import call_op
from torchweave.compiler.tuning import table as tables
from torchweave.compiler.tuning.linears import LinearShape, candidates, letters
from torchweave.compiler.tuning.measure import Call, Timing, TuningTask, copies_for, measure_task, timing_of, tune
from torchweave.compiler.tuning.table import (
    DamagedTable,
    Entry,
    Table,
    device_kind,
    load_tables,
    load_tuned,
    shipped_table,
    store_tuned,
)
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.engine.startup import tune as tuning_of_an_engine
from torchweave.engine.startup.tune import tune as tune_engine
from torchweave.models.weights.quantize import Fp8Linear
from torchweave.ops.linear_config import LinearConfig, default_choices, parse_choices, select_config
from torchweave.report import Report

BF16 = torch.bfloat16
GPU = "nvidia-h100-80gb-hbm3"


class FakeClock:
    """Says how long each candidate takes; one that it does not know cannot run."""

    def __init__(self, times: Mapping[str, tuple[float, float]]) -> None:
        self.times = times
        self.asked: list[tuple[str, ...]] = []

    def time(self, candidates: Mapping[str, Call], copies: int) -> dict[str, Timing]:
        self.asked.append(tuple(candidates))
        return {name: Timing(*self.times[name]) for name in candidates if name in self.times}


def tuning_task(*names: str, tokens: int = 1) -> TuningTask:
    return TuningTask("linear", "64x64", tokens, lambda i: None, dict.fromkeys(names, lambda i: None), 4)


def entry(tokens: int, choice: str = "row,4,1024,4,4,1,0", shape: str = "2048x2048") -> Entry:
    return Entry("small_linears", shape, tokens, choice, 4.0, 5.0, 0.1)


def cache_at(folder: Path) -> CompileCache:
    return CompileCache(folder, Report(show=False))


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ({"": (10.0, 0.1), "a": (9.0, 0.1), "b": (8.0, 0.1)}, "b"),
        ({"": (10.0, 0.1), "a": (10.5, 0.1), "b": (11.0, 0.1)}, ""),
        ({"": (10.0, 0.3), "a": (9.0, 0.3), "b": (11.0, 0.1)}, ""),  # within the noise: 1.0 against 2 * 0.6
        ({"": (10.0, 0.0), "a": (9.95, 0.0)}, ""),  # half a hundredth is not worth another kernel
        ({"": (10.0, 0.1), "b": (8.0, 0.1)}, "b"),  # a candidate that cannot run is left out
    ],
    ids=["the best wins", "nothing is faster", "within the noise", "too little", "one cannot run"],
)
def test_a_choice_is_kept_only_where_it_wins_by_more_than_the_noise(times: dict, choice: str) -> None:
    found = measure_task(tuning_task("a", "b"), FakeClock(times))
    assert found is not None and found.choice == choice
    assert found.baseline == 10.0 and found.microseconds == times[choice][0]
    assert found.saved == (10.0 - times[choice][0] if choice else 0.0)


def test_measurement_without_a_baseline_gives_no_choice() -> None:
    assert measure_task(tuning_task("a"), FakeClock({"a": (1.0, 0.0)})) is None


def test_table_lists_the_saving_of_each_choice_per_bucket() -> None:
    report = Report(show=False)
    clock = FakeClock({"": (10.0, 0.1), "a": (7.5, 0.1)})
    table = tune((tuning_task("a", tokens=tokens) for tokens in (1, 8)), clock, GPU, report, total=2)
    assert [(e.tokens, e.choice, e.saved) for e in table] == [(1, "a", 2.5), (8, "a", 2.5)]
    events = report.select("tuned")
    told = [(e["subject"], e["shape"], e["tokens"], e["saved"]) for e in events]
    assert told == [("linear", "64x64", 1, 2.5), ("linear", "64x64", 8, 2.5)]
    assert report.select("progress")[-1]["done"] == 2
    assert clock.asked == [("", "a")] * 2, "the baseline and every candidate are timed in one run"


def test_noise_is_half_the_interquartile_range() -> None:
    assert timing_of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0, 3.5, 2.5]) == Timing(3.25, 0.75)
    assert copies_for(1 << 20) == 256 and copies_for(1 << 30) == 4


# -- what is used ------------------------------------------------------------------------------------------------------


def test_table_covers_token_counts_up_to_the_measured_ones() -> None:
    table = Table(GPU, (entry(8, "split,16,64,4,4,1,0"), entry(1), entry(2, "")))
    assert [e.tokens for e in table.matching_entries("small_linears", "2048x2048")] == [1, 2, 8]
    assert table.matching_entries("rope", "2048x2048") == table.matching_entries("small_linears", "1x1") == ()


def test_a_linear_takes_the_table_before_the_rule() -> None:
    shape = LinearShape(2048, 2048)
    assert shape.choices(Table(GPU), BF16) == default_choices(2048, 2048, BF16)
    table = Table(GPU, (entry(1), entry(2, ""), entry(8, "split,16,64,4,4,1,0")))
    text = shape.choices(table, BF16)
    assert [select_config(text, n) for n in (1, 2, 5, 9)] == [
        LinearConfig("row", 4, 1024, 4, 4, 1),
        None,
        LinearConfig("split", 16, 64, 4, 4, 1),
        None,
    ]
    assert shape.choices(table, torch.float32) == "" and LinearShape(2047, 2047).choices(table, BF16) == ""
    fused = LinearShape(2048, 2048, "r")
    assert fused.key == "2048x2048/r" and fused.choices(table, BF16) == default_choices(2048, 2048, BF16)


def test_default_rule_applies_below_the_measured_token_counts() -> None:
    table = Table(GPU, (Entry("small_linears", "2048x2048", 16, "", 9.0, 9.0, 0.1),))
    ruled = parse_choices(default_choices(2048, 2048, BF16))
    assert [tokens for tokens, _ in ruled] == [1, 2, 16, 32]
    assert parse_choices(LinearShape(2048, 2048).choices(table, BF16)) == ruled[:2]


def test_fused_linears_have_a_letter_for_each_fusion() -> None:
    assert letters(torch.ones(1), "silu", torch.ones(1)) == "ngr"


def test_local_tuning_overrides_shipped_tables() -> None:
    here, there = Table(GPU, (entry(1, ""),)), Table(GPU, (entry(1), entry(2)))
    both = here.merged_over(there)
    assert [(e.tokens, e.choice) for e in both] == [(1, ""), (2, entry(2).choice)]


def test_a_table_of_another_kind_of_device_is_not_used(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    store_tuned(cache, Table("nvidia-a100", (entry(1),)))
    assert not load_tuned(cache, GPU).entries and load_tuned(cache, "nvidia-a100").entries == (entry(1),)
    assert (
        device_kind(torch.device("cpu")) == "cpu"
        and not shipped_table("cpu").entries
        and not shipped_table("../x").entries
    )


# -- what is kept on disk ----------------------------------------------------------------------------------------------


def test_a_table_is_kept_in_the_cache_and_grows(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    store_tuned(cache, Table("cpu", (entry(1), entry(2))))
    store_tuned(cache, Table("cpu", (entry(2, ""),)))
    report = Report(show=False)
    table = load_tables(torch.device("cpu"), CompileCache(tmp_path / "cache", report), report)
    assert sorted((e.tokens, e.choice) for e in table) == [(1, entry(1).choice), (2, "")], "what was asked last counts"


def test_a_damaged_table_is_a_miss_with_one_warning(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache")
    store_tuned(cache, Table("cpu", (entry(1),)))
    (path,) = cache.entries()
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert load_tuned(cache, "cpu") == Table("cpu")
    assert len(cache.report.select("warning")) == 1
    store_tuned(cache, Table("cpu", (entry(4),)))
    assert load_tuned(cache, "cpu").entries == (entry(4),), "it is written anew"


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"format": 2, "device": "cpu", "measured": "", "entries": []}',
        Table("cpu", (entry(1), entry(1))).write(),
        Table("cpu", (Entry("linear", "1x1", 0, "", 1.0, 1.0, 0.0),)).write(),
        Table("cpu", (Entry("linear", "1x1", 1, "", float("nan"), 1.0, 0.0),)).write(),
        Table("cpu", (Entry("linear", "1x1", 1, 3, 1.0, 1.0, 0.0),)).write(),  # type: ignore[arg-type]
        Table("cpu", (entry(1),)).write().replace("noise", "noises"),
    ],
)  # fmt: skip
def test_malformed_table_is_rejected(text: str) -> None:
    with pytest.raises(DamagedTable):
        Table.read(text)


def test_table_round_trips() -> None:
    for table in (Table("cpu"), Table(GPU, (entry(1), entry(2, "")), "bench/kernels/linear.py")):
        assert Table.read(table.write()) == table


def test_shipped_tables_hold_together() -> None:
    folder = Path(tables.__file__).parent / "tables"
    paths = list(folder.glob("*.json"))
    assert paths
    for path in paths:
        table = Table.read(path.read_text())
        assert table.device == path.stem and table.entries and table.measured
        for shape in {e.shape for e in table if e.subject in ("small_linears", "fused_linears")}:
            size, _, around = shape.partition("/")
            outputs, width = map(int, size.split("x"))
            assert parse_choices(LinearShape(outputs, width, around).choices(table, BF16)) is not None


def test_candidates_are_distinct_and_fit_their_tokens() -> None:
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        for around in ("", "n", "ng", "r"):
            found = candidates(tokens, around)
            assert len(set(found)) == len(found) > 3
            assert all(config.kernel != "row" or tokens <= 4 for config in found)
            assert all(LinearConfig.parse(str(config)) == config for config in found)


# -- a whole module ----------------------------------------------------------------------------------------------------


def cpu_passes(table: Table | None = None) -> tuple[Pass, ...]:
    """The passes that make products of few tokens, for a CPU, where the ops are their references."""
    fused = FusedLinears(devices=("cpu",), table=table)
    return (
        MergeLinears(),
        SmallLinears(devices=("cpu",), table=table),
        raise_rms_norm.FUSION,
        gated_activation.FUSION,
        fused,
    )


def compile_with(config: TorchCompileConfig) -> CompiledGraph:
    return compile_graph(
        decoder(),
        example(),
        DYNAMIC,
        boundary_ops=BOUNDARY,
        config=config,
        passes=cpu_passes(),
    )


FX = TorchCompileConfig(enable_inductor=False)
MODULE = Module(
    compile_with, lambda compiled_graph, tokens: compiled_graph(call_op, *step(tokens, 1)), torch.device("cpu")
)


def test_every_linear_shape_is_measured_once() -> None:
    clock = FakeClock({"": (10.0, 0.1), "row,4,1024,4,4,1,0": (8.0, 0.1), "split,16,64,4,4,1,1": (9.0, 0.1)})
    report = Report(show=False)
    table = tune_module(MODULE, FX, clock, Table("cpu"), report, tokens=(1, 8, 48))
    fused, plain = {"1536x768/n", "4608x768/ng", "768x2304/r"}, {"768x768", "96x768"}
    shapes = {1: fused | plain, 8: fused | plain, 48: {"1536x768", "4608x768", "768x2304"} | plain}
    assert {(entry.tokens, entry.shape) for entry in table} == {(at, shape) for at in shapes for shape in shapes[at]}, (
        "q/k/v, gate/up, down, o and the head, fused at the sizes where that runs"
    )
    assert {(entry.subject, entry.tokens, entry.choice) for entry in table if entry.tokens < 48} == {
        ("fused_linears", 1, "row,4,1024,4,4,1,0"),
        ("fused_linears", 8, ""),
        ("small_linears", 1, "row,4,1024,4,4,1,0"),
        ("small_linears", 8, ""),
    } | {("fused_linears", 8, "split,16,64,4,4,1,1")}, "with a norm before it, the product at 8 tokens norms apart"
    assert len(report.select("tuned")) == len(table.entries) == 15
    assert not tune_module(MODULE, FX, clock, table, report, tokens=(1, 8, 48)).entries, (
        "what is known is not asked again"
    )


def test_piece_is_measured_in_two_builds_over_all_layers() -> None:
    def doubled(config: TorchCompileConfig) -> CompiledGraph:
        passes = cpu_passes()[:4] if "fused_linears" in config.disabled_passes else cpu_passes()
        return compile_graph(decoder(), example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX, passes=passes)

    today, other = doubled(TorchCompileConfig(disabled_passes=("fused_linears",))), doubled(FX)
    asked = list(autotune.tuning_tasks("fused_linears", today, other, (1, 7)))
    assert {each.subject for each in asked} == {"fused_linears"} and {each.tokens for each in asked} == {1, 7}
    assert {each.shape for each in asked} == {piece.digest for piece in today.pieces}
    last = next(each for each in asked if each.shape == today.pieces[-1].digest and each.tokens == 7)
    (got,), (want,) = last.candidates["on"](0), last.baseline(0)  # it has no room for attention among its outputs
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    shared = next(each for each in asked if each.shape == today.pieces[1].digest)
    assert any(not torch.equal(*pair) for pair in zip(shared.baseline(0), shared.baseline(1), strict=True)), (
        "another layer"
    )


def test_compile_size_is_dropped_if_not_faster(tmp_path: Path) -> None:
    config = TorchCompileConfig(compile_sizes=(4, 8))
    cache = cache_at(tmp_path / "cache")
    module = nn.Linear(8, 8).requires_grad_(False)
    inputs, dynamic = {"input": torch.zeros(5, 8)}, {"input": {0: "T"}}
    first = compile_graph(module, inputs, dynamic, config=config, cache=cache)
    (built,), digest = first.built.values(), first.pieces[0].digest
    assert [(each.low, each.high) for each in built.variants] == [(4, 4), (8, 8)], "nobody measured: as asked"
    matching_entries = (
        Entry("compile_sizes", digest, 4, "", 5.0, 5.0, 0.1),
        Entry("compile_sizes", digest, 8, "on", 4.0, 5.0, 0.1),
    )
    store_tuned(cache, Table("cpu", matching_entries))
    report = Report(show=False)
    second = compile_graph(module, inputs, dynamic, config=config, cache=cache, report=report)
    (built,) = second.built.values()
    assert [(each.low, each.high) for each in built.variants] == [(8, 8)]
    assert "(5.0 us)" in report.select("fallback")[0]["why"]
    assert all(torch.equal(second(call_op, x), module(x)) for x in (torch.randn(4, 8), torch.randn(8, 8)))


def test_a_gated_pass_runs_where_a_table_says_that_it_pays() -> None:
    class Gated(GraphPass):
        name, gated = "gated", True

        def run(self, graph: Any) -> PassResult:
            return PassResult()

    matching_entries = {choice: Table("cpu", (Entry("gated", "x", 1, choice, 4.0, 5.0, 0.1),)) for choice in ("on", "")}
    managers = [PassManager([Gated()], table=table) for table in (None, matching_entries[""], matching_entries["on"])]
    assert [manager.settings[0].enabled for manager in managers] == [False, False, True]


def test_tuning_needs_a_gpu_and_says_so() -> None:
    with pytest.raises(ValueError, match="nothing can be tuned here: candidates are timed on a GPU"):
        tune_engine(EngineConfig("demo", device="cpu"), Report(show=False))


def test_the_model_is_tuned_as_the_engine_loads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its quantization: products with FP8 weights have other candidates than those with bfloat16 weights."""
    resolve_plan, modules = tuning_of_an_engine.resolve_plan, list[nn.Module]()

    def measure(module: nn.Module, *_: Any, **__: Any) -> Table:
        modules.append(module)
        return Table(GPU)

    monkeypatch.setattr(
        tuning_of_an_engine, "resolve_plan", lambda config: dataclasses.replace(resolve_plan(config), tune=True)
    )
    monkeypatch.setattr(tuning_of_an_engine, "tune_model", measure)
    config = EngineConfig(
        "demo", device="cpu", quantization="fp8",
        torch_compile_config=TorchCompileConfig(compile_cache_dir=str(tmp_path / "cache")),
    )  # fmt: skip
    tune_engine(config, Report(show=False))
    assert any(isinstance(each, Fp8Linear) for each in modules[0].modules())
