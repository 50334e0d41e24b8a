"""Pass manager: an explicit, ordered, printable list of passes, which the config enables and every run reports."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchweave.compiler.cache.keys import describe, source_digests
from torchweave.compiler.dump import graph_text
from torchweave.compiler.errors import CompileError, name_sizes
from torchweave.compiler.ir.graph import CapturedGraph, FakeGraph, Input, run_fake, same_geometry
from torchweave.compiler.ir.mutation import mutated_args
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import Piece
from torchweave.compiler.passes.aten import (
    add_rms_norm,
    gated_activation,
    gated_rms_norm,
    qk_norm_rope,
    raise_rms_norm,
    rope,
)
from torchweave.compiler.passes.aten.expand import Expand
from torchweave.compiler.passes.aten.experts_residual import ExpertsResidual
from torchweave.compiler.passes.aten.fp8_activation import FUSION as FP8_ACTIVATION
from torchweave.compiler.passes.aten.fp8_norm import FUSION as FP8_NORM
from torchweave.compiler.passes.aten.fused_linears import FusedLinears
from torchweave.compiler.passes.aten.reinplace import Reinplace
from torchweave.compiler.passes.aten.route import FUSION as ROUTE
from torchweave.compiler.passes.base import (
    Build,
    NearMiss,
    Pass,
    PassResult,
    Stage,
    as_pass,
    declaration_error,
    load_pass,
)
from torchweave.compiler.passes.collectives import all_reduce_norm, all_reduce_norm_quant
from torchweave.compiler.passes.collectives.user_buffers import (
    UserBuffersConvert,
    UserBuffersPrologue,
)
from torchweave.compiler.passes.torch_ir.delta_gates import DeltaGates
from torchweave.compiler.passes.torch_ir.fp8_attention import Fp8Attention
from torchweave.compiler.passes.torch_ir.gated_attention import GatedAttention
from torchweave.compiler.passes.torch_ir.linear_gelu import LinearGelu
from torchweave.compiler.passes.torch_ir.merge_fp8_linears import MergeFp8Linears
from torchweave.compiler.passes.torch_ir.merge_int_linears import MergeIntLinears
from torchweave.compiler.passes.torch_ir.merge_linears import MergeLinears
from torchweave.compiler.passes.torch_ir.rotary_attention import RotaryAttention
from torchweave.compiler.passes.torch_ir.scale_linears import ScaleLinears
from torchweave.compiler.passes.torch_ir.scan_gates import ScanGates
from torchweave.compiler.passes.torch_ir.shared_expert import SharedExpert
from torchweave.compiler.passes.torch_ir.small_linears import SmallLinears
from torchweave.compiler.tuning.table import Entry, Table
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report
from torchweave.utils.suggest import did_you_mean

_log = logging.getLogger("torchweave")
_MAX_ROUNDS = 16
"""A pass that still matches after this many rounds matches its own results."""
_REMOVED = frozenset({"sequence_parallel", "userbuffers_finalize"})
"""Passes of 0.1, which were faster at no size; naming them is a warning until 0.3."""


def default_passes(table: Table | None = None) -> tuple[Pass, ...]:
    """The built-in passes, in order.

    Args:
        table: measurements; None: the table shipped for the device.
    """
    return (
        SharedExpert(),
        MergeLinears(),
        RotaryAttention(),
        GatedAttention(),
        DeltaGates(),
        ScanGates(),
        SmallLinears(table=table),
        ScaleLinears(),
        LinearGelu(),
        MergeFp8Linears(),
        MergeIntLinears(),
        Fp8Attention(),
        raise_rms_norm.FUSION,
        gated_rms_norm.FUSION,
        gated_activation.FUSION,
        all_reduce_norm.FUSION,
        all_reduce_norm_quant.FP8,
        all_reduce_norm_quant.FP4,
        FusedLinears(table=table),
        ExpertsResidual(),
        add_rms_norm.FUSION,
        rope.FUSION,
        qk_norm_rope.FUSION,
        ROUTE,
        FP8_NORM,
        FP8_ACTIVATION,
        UserBuffersConvert(),
        UserBuffersPrologue(),
        Expand(),
        Reinplace(),
    )


@dataclass(frozen=True)
class Setting:
    """Whether a pass is enabled, and the reason."""

    each: Pass
    enabled: bool
    why: str


def _measured_setting(each: Pass, entries: Sequence[Entry]) -> Setting:
    """The setting of a pass that was measured in whole steps: off without a gain beyond noise, on where it gained.

    An ATen pass is limited to the token counts from its first to its last gain, open where the smallest or the largest measured
    count is one. A pass of the whole graph cannot depend on the token count: one gain turns it on.
    """
    measured, gained = sorted({entry.tokens for entry in entries}), sorted(e.tokens for e in entries if e.choice)
    counts = ", ".join(map(str, measured))
    if not gained:
        return Setting(each, False, f"whole steps of {counts} tokens do not gain beyond noise")
    if each.stage != "aten":
        return Setting(each, True, "")
    low, high = each.token_range
    if gained[0] > measured[0]:
        low = max(low or 1, gained[0])
    if gained[-1] < measured[-1]:
        high = gained[-1] if high is None else min(high, gained[-1])
    if (low, high) == each.token_range:
        return Setting(each, True, "")
    limited = copy.copy(each)
    object.__setattr__(limited, "token_range", (low, high))  # fusions are frozen
    if why := declaration_error(limited):
        return Setting(
            each, False, f"whole steps gain beyond noise at {', '.join(map(str, gained))} tokens only: {why}"
        )
    return Setting(limited, True, f"where whole steps of {counts} tokens gain")


class PassManager:
    """The passes of one compilation, in order.

    Args:
        passes: in execution order; None: the built-in passes, then the passes that the config names.
        config: enables and disables passes.
        table: measurements for the built-in passes; None: the shipped table.
        ranks: tensor-parallel size.
        first: run before `passes`.

    Raises:
        ValueError: two passes share a name, a pass declares an invalid fact, or the config names an unknown pass.
    """

    def __init__(
        self,
        passes: Sequence[Pass] | None = None,
        config: TorchCompileConfig | None = None,
        table: Table | None = None,
        ranks: int = 1,
        first: Sequence[Pass] = (),
    ) -> None:
        self.config, self.table, self.ranks = config or TorchCompileConfig(), table, ranks
        if passes is None:
            passes = (*default_passes(table), *(load_pass(name) for name in self.config.passes))
        passes = [as_pass(each) for each in (*first, *passes)]
        names = [each.name for each in passes]
        if len(set(names)) < len(names):
            raise ValueError(f"pass names must be unique: {', '.join(names)}")
        if wrong := next((f"pass {each.name}: {why}" for each in passes if (why := declaration_error(each))), None):
            raise ValueError(wrong)
        available = {*names, *(each.name for each in default_passes())}
        requested = {*self.config.disabled_passes, *self.config.enabled_passes}
        if removed := sorted(requested & _REMOVED - available):
            _log.warning("There is no pass %s any more: it was faster at no size. Leave it out.", ", ".join(removed))
        if unknown := sorted(requested - available - _REMOVED):
            hint = did_you_mean(unknown[0], sorted(available), f"available: {', '.join(names)}")
            raise ValueError(f"unknown pass {unknown[0]}; {hint}")
        self.settings = tuple(self._setting(each) for each in passes)

    def _setting(self, each: Pass) -> Setting:
        config = self.config
        if each.name in config.disabled_passes:
            return Setting(each, False, "disabled_passes")
        build: Build = "inductor" if config.enable_inductor else "fx"
        if build not in each.builds:
            return Setting(each, False, f"runs only in {', '.join(each.builds)} builds")
        needs = getattr(each, "needs", ())
        if "ranks" in needs and self.ranks < 2:
            return Setting(each, False, "needs more than one rank")
        if "userbuffers" in needs and not config.enable_userbuffers:
            return Setting(each, False, "enable_userbuffers is off")
        if each.name in config.enabled_passes:
            return Setting(each, True, "enabled_passes")
        if each.numerics == "tolerance" and config.pass_numerics == "exact":
            return Setting(each, False, "numerics is tolerance, and pass_numerics is exact")
        shape = getattr(each, "shape", None)
        if each.gated and not (self.table is not None and self.table.has_winner(each.name, shape)):
            return Setting(each, False, "no measurement shows that it pays here")
        entries = () if each.gated or self.table is None else self.table.whole_steps(each.name)
        return _measured_setting(each, entries) if entries else Setting(each, True, "")

    def passes(self, stage: Stage) -> tuple[Pass, ...]:
        """Enabled passes of a stage."""
        return tuple(setting.each for setting in self.settings if setting.enabled and setting.each.stage == stage)

    def __str__(self) -> str:
        rows = []
        for index, setting in enumerate(self.settings):
            each = setting.each
            low, high = each.token_range
            tokens = f"T {'' if low is None else low}..{'' if high is None else high}"
            state = "on" if setting.enabled else f"off: {setting.why}"
            rows.append(f"{index} {each.name:<24} {each.stage:<9} {each.numerics:<10} {tokens:<12} {state}")
        return "\n".join(rows)

    def run(self, graph: CapturedGraph, report: Report) -> list[PassResult]:
        """Run the Torch IR stage over the whole graph, with an event for each pass, and for each disabled pass of either stage."""
        results = []
        for setting in self.settings:
            each = setting.each
            if not setting.enabled:
                report.event("pass", name=each.name, stage=each.stage, enabled=False, why=setting.why)
            elif each.stage == "torch_ir":
                result, facts = self._run_one(each, graph, "passes", report)
                report.event("pass", **name_sizes_in_facts(facts, graph))
                results.append(result)
        return results

    def rewrite(self, piece: Piece, passes: Sequence[Pass], report: Report) -> list[dict[str, Any]]:
        """Run ATen passes over one lowered piece; return each pass's event facts, which are stored with the built piece."""
        return [self._run_one(each, piece, f"pieces/{piece.digest}", report)[1] for each in passes]

    def _run_one(self, each: Pass, graph: FakeGraph, folder: str, report: Report) -> tuple[PassResult, dict[str, Any]]:
        index = next(index for index, setting in enumerate(self.settings) if setting.each is each)
        report.artifact(f"{folder}/{index:02}-{each.name}/before.py", lambda: graph_text(graph.module))
        result, facts = run_with_report(each, graph, self.config.debug)
        report.artifact(f"{folder}/{index:02}-{each.name}/after.py", lambda: graph_text(graph.module))
        return result, facts


def run_with_report(each: Pass, graph: FakeGraph, debug: bool) -> tuple[PassResult, dict[str, Any]]:
    """Run a pass; return its result and the facts of its event."""
    begin, before = time.monotonic(), _ops(graph)
    result = run_pass(each, graph, debug)
    after = _ops(graph)
    facts = {
        "name": each.name,
        "enabled": True,
        "stage": each.stage,
        "numerics": each.numerics,
        "matches": result.matches,
        "rewritten": result.rewritten,
        "near_misses": [f"{miss.node}: {miss.why}" for miss in result.near_misses],
        "seconds": time.monotonic() - begin,
        "ops_before": before.total(),
        "ops_after": after.total(),
        "diff": {name: after[name] - before[name] for name in sorted(before | after) if after[name] != before[name]},
    }
    return result, facts


def name_sizes_in_facts(facts: dict[str, Any], graph: CapturedGraph) -> dict[str, Any]:
    """The facts of a pass's event with sizes by their names in the reasons of near misses."""
    names = graph.size_names
    return {**facts, "near_misses": [name_sizes(each, names) for each in facts["near_misses"]]}


def run_pass(each: Pass, graph: FakeGraph, debug: bool = False) -> PassResult:
    """Run a pass once, or to a fixpoint if it declares that, and check the graph after each round.

    Raises:
        ValueError: the pass raised, or did not return a `PassResult`.
        RuntimeError: the pass left an invalid graph, or matches its own results.
    """
    matches = rewritten = 0
    near_misses: tuple[NearMiss, ...] = ()
    before, without_value = _signature(graph), frozenset(node for node in graph.graph.nodes if value(node) is None)
    for _ in range(_MAX_ROUNDS):
        result = _run_once(each, graph)
        near_misses = result.near_misses
        matches, rewritten = matches + result.matches, rewritten + result.rewritten
        try:
            _lint(graph, without_value, result.matches + result.rewritten > 0, debug)
            _check_signature(before, _signature(graph))
        except Exception as error:
            raise RuntimeError(f"pass {each.name} left an invalid graph: {error}") from error
        if not (each.fixpoint and result.matches):
            return PassResult(matches, rewritten, near_misses)
    raise RuntimeError(f"pass {each.name} still matches after {_MAX_ROUNDS} rounds: it matches its own results")


def _run_once(each: Pass, graph: FakeGraph) -> PassResult:
    """Run a pass once and name it in errors; a `CompileError`, which rejects the model, passes through."""
    try:
        result = each.run(graph)
    except CompileError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"pass {each.name} raised {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        ) from error
    if not isinstance(result, PassResult):
        raise ValueError(f"pass {each.name} returned {result!r}; `run` must return a PassResult(matches, rewritten)")
    return result


class _Signature(NamedTuple):
    """Interface of a graph, which passes must preserve."""

    inputs: list[str]
    outputs: list[str]
    mutated_args: frozenset[str]


def _signature(graph: FakeGraph) -> _Signature:
    """Names of inputs (of a captured graph without module tensors, which passes may add and drop), kinds of outputs, and mutated
    inputs as far as nodes name them directly."""
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    if isinstance(graph, CapturedGraph):
        if unknown := [node.name for node in inputs if node.name not in graph.bindings]:
            raise ValueError(f"the input {unknown[0]} has no binding; add tensors with `add_constant`")
        inputs = sorted((each for each in inputs if isinstance(graph.bindings[each.name], Input)), key=str)
    outputs = [leaf for node in nodes if node.op == "output" for leaf in node.args[0]]
    changed = frozenset(target.name for node in nodes for target in mutated_args(node) if target.op == "placeholder")
    return _Signature([node.name for node in inputs], [_kind(leaf) for leaf in outputs], changed)


def _kind(leaf: Any) -> str:
    fake = value(leaf) if isinstance(leaf, fx.Node) else leaf
    return f"{fake.dtype}{list(fake.shape)} on {fake.device}" if isinstance(fake, Tensor) else str(fake)


def _check_signature(before: _Signature, after: _Signature) -> None:
    if after.inputs != before.inputs:
        raise ValueError(f"its inputs are {', '.join(after.inputs)}, expected {', '.join(before.inputs)}")
    if after.outputs != before.outputs:
        raise ValueError(f"it returns {', '.join(after.outputs) or 'nothing'}, expected {', '.join(before.outputs)}")
    if new := sorted(after.mutated_args - before.mutated_args):
        raise ValueError(f"it writes to the input {new[0]}, unlike the graph before the pass")


def _lint(graph: FakeGraph, without_value: frozenset[fx.Node], changed: bool, debug: bool) -> None:
    """Raise the first error of a graph. Nodes in `without_value`, such as the backends of `sdpa_kernel`, lacked a value before."""
    graph.graph.lint()
    if changed or debug:
        graph.module.recompile()
    for node in graph.graph.nodes:
        needs_value = node.op.startswith("call") and node.users and not node.is_impure() and node not in without_value
        if needs_value and value(node) is None:
            raise ValueError(f"{node.name} has no fake value in meta; set it with the node")
    if debug:
        with graph.enable_fake_mode():
            for node in graph.graph.nodes:
                if node.op == "call_function" and isinstance(value(node), (Tensor, torch.SymInt, tuple, list)):
                    computed = run_fake(node, {})
                    if not same_geometry(computed, value(node), ones=False):
                        raise ValueError(f"the fake value of {node.name} is {value(node)}, but it computes {computed}")


def _ops(graph: FakeGraph) -> Counter[str]:
    """Number of calls of each operation."""
    return Counter(
        str(getattr(node.target, "__name__", node.target)) if not isinstance(node.target, torch._ops.OpOverload)
        else str(node.target)
        for node in graph.graph.nodes
        if node.op.startswith("call")
    )  # fmt: skip


def aten_cache_keys(passes: Sequence[Pass]) -> dict[str, Any]:
    """Compile-cache keys; empty when no pass runs."""
    if not passes:
        return {}
    modules = {name for each in passes for name in _sources(each) if not name.startswith("torchweave.")}
    return {
        "aten_stage": {
            "passes": [describe_pass(each) for each in passes],
            "sources": source_digests(sorted(modules)),
        }
    }


def describe_pass(each: Pass) -> str:
    """Type and settings of a pass as text."""
    if dataclasses.is_dataclass(each):
        facts = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
    else:
        own = type(each).__module__.startswith("torchweave.")  # their private attributes do not change results
        facts = {key: fact for key, fact in vars(each).items() if not (own and key.startswith("_"))}
        facts = {"name": each.name, **facts}
    return f"{type(each).__module__}.{type(each).__qualname__}{describe(facts)}"


def _sources(each: Pass) -> tuple[str, ...]:
    """Modules that define a pass."""
    return (type(each).__module__, *getattr(each, "sources", ()))
