"""The pass manager: an explicit, ordered, printable list of passes, each run with a receipt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torchweave.compile.dump import graph_text
from torchweave.compile.graph import CapturedGraph
from torchweave.compile.passes.base import Pass, PassResult
from torchweave.compile.passes.torch_ir.merge_linears import MergeLinears
from torchweave.compile.passes.torch_ir.small_linears import SmallLinears
from torchweave.log import Report


def default_passes() -> tuple[Pass, ...]:
    """The passes of the stack, in order."""
    return (MergeLinears(), SmallLinears())


class PassManager:
    """Runs passes in order over a captured graph.

    Args:
        passes: in the order in which they run.
        disabled: names of passes that are left out. A name that no pass has is an error.
    """

    def __init__(self, passes: Sequence[Pass] | None = None, disabled: Sequence[str] = ()) -> None:
        self.passes = tuple(default_passes() if passes is None else passes)
        names = [each.name for each in self.passes]
        if len(set(names)) < len(names):
            raise ValueError(f"two passes have one name: {', '.join(names)}")
        known = set(names) | {each.name for each in default_passes()}
        if unknown := sorted(set(disabled) - known):
            raise ValueError(f"no pass is called {', '.join(unknown)}; there are {', '.join(names)}")
        self.disabled = frozenset(disabled)

    def __str__(self) -> str:
        rows = []
        for index, each in enumerate(self.passes):
            low, high = each.token_range
            tokens = f"T {'' if low is None else low}..{'' if high is None else high}"
            state = "off" if each.name in self.disabled else "on"
            rows.append(f"{index} {each.name:<24} {each.stage:<9} {each.numerics:<10} {tokens:<12} {state}")
        return "\n".join(rows)

    def run(self, graph: CapturedGraph, report: Report) -> list[PassResult]:
        """Run every enabled pass; the graph is checked after each, so that a broken graph names the pass that broke it."""
        results = []
        for index, each in enumerate(self.passes):
            if each.name in self.disabled:
                report.event("pass", name=each.name, enabled=False)
                continue
            report.artifact(f"passes/{index:02}-{each.name}/before.py", lambda: graph_text(graph.module))
            results.append(self._run_one(each, graph, report))
            report.artifact(f"passes/{index:02}-{each.name}/after.py", lambda: graph_text(graph.module))
        return results

    def _run_one(self, each: Pass, graph: CapturedGraph, report: Report) -> PassResult:
        begin, before = time.monotonic(), graph.num_calls()
        result = each.run(graph)
        try:
            graph.graph.lint()
            graph.module.recompile()
        except Exception as error:
            raise RuntimeError(f"pass {each.name} left a graph that does not hold together: {error}") from error
        report.event(
            "pass",
            name=each.name,
            enabled=True,
            stage=each.stage,
            numerics=each.numerics,
            matches=result.matches,
            rewritten=result.rewritten,
            near_misses=[f"{miss.node}: {miss.why}" for miss in result.near_misses],
            seconds=time.monotonic() - begin,
            ops_before=before,
            ops_after=graph.num_calls(),
        )
        return result
