"""Passes over Inductor's graph of a piece, after its own passes: torch's pattern matchers, and what a user set in its config.

A `torch._inductor.pattern_matcher.PatternMatcherPass` is taken as a pass by its name (`pass_name`). Its patterns are traced by
torch (`pm.fwd_only`), so it runs where torch runs it: on Inductor's graph, in which composite operations are decomposed. A pass set
in `torch._inductor.config` (`post_grad_custom_post_pass`, `joint_custom_pre_pass`) runs before Torchweave's corrections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from torchweave.compiler.passes.base import Pass
from torchweave.report import Report

OPTIONS = ("post_grad_custom_post_pass", "joint_custom_pre_pass")
"""Options of Inductor by which it runs passes, which Torchweave sets, too."""
GraphFunction = Callable[[fx.Graph], Any]


def user_passes() -> dict[str, list[GraphFunction]]:
    """Passes over graphs that a user set in Inductor's config, by option."""
    from torch._inductor import config

    found: dict[str, list[GraphFunction]] = {}
    for option in OPTIONS:
        value = getattr(config, option, None)
        found[option] = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    return found


def with_passes(options: Mapping[str, Any], passes: Sequence[Pass], report: Report) -> dict[str, Any]:
    """Inductor's options with a user's passes and those of the stage `inductor` before Torchweave's own."""
    result = dict(options)
    for option, given in user_passes().items():
        more = [*given, *((_applied(each, report) for each in passes) if option == OPTIONS[0] else ())]
        own = result.get(option)
        if more:
            result[option] = [*more, *([] if own is None else own if isinstance(own, list) else [own])]
    return result


def _applied(each: Pass, report: Report) -> GraphFunction:
    def apply(graph: fx.Graph) -> None:
        result = each.run(graph)
        report.event(
            "pass", name=each.name, stage=each.stage, enabled=True, matches=result.matches, rewritten=result.rewritten
        )

    return apply


def cache_keys(passes: Sequence[Pass]) -> dict[str, Any] | None:
    """Compile-cache keys of the passes over Inductor's graph; None: they cannot be known, so nothing may be stored."""
    users = {option: [_uuid(each) for each in given] for option, given in user_passes().items() if given}
    if passes or any(None in uuids for uuids in users.values()):
        return None
    return {"inductor_passes": users} if users else {}


def _uuid(each: Any) -> str | None:
    uuid = each.uuid() if hasattr(each, "uuid") else None
    return None if uuid is None else str(uuid)
