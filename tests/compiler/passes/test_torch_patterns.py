"""What people who write passes for torch bring along: pattern matchers, passes in Inductor's config, custom ops of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor import pattern_matcher as pm
from torch._inductor.custom_graph_pass import CustomGraphPass

import torchweave
from torchweave.compiler.passes import inductor_graph
from torchweave.compiler.passes.base import TorchPatternPass, as_pass, load_pass
from torchweave.compiler.passes.manager import PassManager
from torchweave.config.options import TorchCompileConfig
from torchweave.ops import registry
from torchweave.report import Report

INDUCTOR = TorchCompileConfig(compile_cache=False)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * y - x


def gated_fake(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


calls: list[tuple[int, ...]] = []


def gated_op(x: Tensor, y: Tensor) -> Tensor:
    calls.append(tuple(x.shape))
    return gated(x, y)


OP = torchweave.register_custom_op("tests::gated", gated_op, mutates_args=[], fake_impl=gated_fake)


class Gate(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return gated(x, y) + 1


def patterns(name: str | None = None) -> Any:
    matcher = pm.PatternMatcherPass(pass_name=name)
    pm.register_replacement(
        gated, lambda x, y: torch.ops.tests.gated(x, y), [torch.empty(4, 8), torch.empty(4, 8)], pm.fwd_only, matcher
    )
    return matcher


def compiled(**options: Any) -> tuple[Any, Report]:
    report, inputs = Report(show=False), {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    return torchweave.compile(Gate(), inputs, {"x": {0: "T"}, "y": {0: "T"}}, INDUCTOR, report, **options), report


def check(function: Any) -> None:
    """The op runs, at a size other than the example's."""
    calls.clear()
    x, y = torch.randn(7, 8), torch.randn(7, 8)
    torch.testing.assert_close(function(x, y), Gate()(x, y))
    assert calls == [(7, 8)]


def test_a_pattern_matcher_of_torch_is_a_pass() -> None:
    function, report = compiled(passes=[*torchweave.compiler.default_passes(), patterns("gates")])
    check(function)
    (event,) = [each for each in report.select("pass") if each["name"] == "gates"]
    assert (event["stage"], event["enabled"], event["matches"]) == ("inductor", True, 1)


def test_a_pass_of_inductors_config_runs() -> None:
    matcher = patterns()
    with inductor_config.patch(post_grad_custom_post_pass=lambda graph: matcher.apply(graph)):
        function, _ = compiled()
    check(function)


def test_a_pattern_matcher_named_in_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_patterns.py").write_text(
        "from torch._inductor.pattern_matcher import PatternMatcherPass\nGATES = PatternMatcherPass()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_patterns", raising=False)
    each = load_pass("own_patterns:GATES")
    assert isinstance(each, TorchPatternPass) and each.name == "own_patterns:GATES"
    manager = PassManager([each], TorchCompileConfig(enable_inductor=False))
    assert "off: runs only in inductor builds" in str(manager)
    assert PassManager([each], TorchCompileConfig(disabled_passes=(each.name,))).passes("inductor") == ()


class Known(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> Any:
        return b"known"


def test_builds_with_passes_that_have_no_digest_are_not_cached() -> None:
    assert inductor_graph.cache_keys([]) == {}
    assert inductor_graph.cache_keys([as_pass(patterns())]) is None
    with inductor_config.patch(post_grad_custom_post_pass=[Known()]):
        assert inductor_graph.cache_keys([]) == {"inductor_passes": {"post_grad_custom_post_pass": ["b'known'"]}}
    with inductor_config.patch(joint_custom_pre_pass=lambda graph: None):
        assert inductor_graph.cache_keys([]) is None


def test_a_users_passes_run_before_our_own() -> None:
    user, own = Known(), Known()
    with inductor_config.patch(post_grad_custom_post_pass=user):
        options = inductor_graph.with_passes({"post_grad_custom_post_pass": own, "x": 1}, [], Report(show=False))
    assert options == {"post_grad_custom_post_pass": [user, own], "x": 1}
    untouched = {"post_grad_custom_post_pass": own}
    assert inductor_graph.with_passes(untouched, [], Report(show=False)) == untouched


# -- custom ops --------------------------------------------------------------------------------------------------------


def test_an_op_of_any_namespace_has_a_kernel_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpu(x: Tensor) -> Tensor:
        return x

    def reference(x: Tensor) -> Tensor:
        return x.clone()

    torchweave.register_custom_op("elsewhere::copied", reference, (), torch.empty_like, cuda=on_gpu)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("elsewhere::copied", "CUDA")
    assert registry.cuda_kernel("elsewhere::copied") is on_gpu
    assert torch.equal(torch.ops.elsewhere.copied(torch.ones(2)), torch.ones(2))


def test_an_op_without_a_namespace_that_writes() -> None:
    def add_into(out: Tensor, x: Tensor) -> None:
        out.add_(x)

    torchweave.register_custom_op("tests_add_into", add_into, ["out"], None)
    out = torch.zeros(2)
    torch.ops.torchweave.tests_add_into(out, torch.ones(2))
    assert out.tolist() == [1, 1]


def nothing(x: Tensor) -> None:
    pass


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("tests::gated", gated, (), gated_fake), "is registered already"),
        (("a b", gated, (), gated_fake), "is not valid"),
        (("a::b::c", gated, (), gated_fake), "is not valid"),
        (("tests::no_fake", gated, ()), "returns values; give fake_impl"),
        (("tests::writes", nothing, ("y",)), "mutates_args names 'y', which tests::writes has not; it has x"),
    ],
)
def test_ops_that_cannot_be_registered(arguments: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        torchweave.register_custom_op(*arguments)
