"""Messages name a size as forward reads it, `tokens.shape[0]`, and never by torch's symbol of it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from torchweave.compiler import GraphPass, PassResult
from torchweave.compiler.passes.base import NearMiss, Stage
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
SYMBOL = re.compile(r"\b[su]\d+\b")


def module_of(forward: Any) -> nn.Module:
    return type("Module", (nn.Module,), {"forward": forward})()


def compile_(forward: Any, config: TorchCompileConfig = FX, **options: Any) -> Any:
    """Compiled for `tokens [T, 8]` and, where forward takes it, `mask [S, 8]`."""
    inputs = {"tokens": torch.randn(5, 8), "mask": torch.randn(6, 8)}
    names = forward.__code__.co_varnames[1 : forward.__code__.co_argcount]
    dynamic = {name: {0: {"tokens": "T", "mask": "S"}[name]} for name in names}
    return torchweave.compile(module_of(forward), {name: inputs[name] for name in names}, dynamic, config, **options)


def _concatenate(self: nn.Module, tokens: Tensor) -> Tensor:
    return torch.cat([tokens, tokens.t()])


def _add(self: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens + mask


def _multiply(self: nn.Module, tokens: Tensor) -> Tensor:
    return tokens @ tokens


def _view(self: nn.Module, tokens: Tensor) -> Tensor:
    return tokens.view(-1, 3)


def _branch(self: nn.Module, tokens: Tensor) -> Tensor:
    return tokens * 2 if tokens.shape[0] % 2 == 0 else tokens


def _compare(self: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.sum() if tokens.size(0) < mask.size(0) else mask.sum()


def _loop(self: nn.Module, tokens: Tensor) -> Tensor:
    for number in range(tokens.shape[0]):
        tokens = tokens + number
    return tokens


def _split(self: nn.Module, tokens: Tensor) -> Tensor:
    return tokens.split(tokens.shape[0] // 2)[0]


def _raise(self: nn.Module, tokens: Tensor) -> Tensor:
    raise KeyError(f"no kernel for {tokens.shape}")


def _select(self: nn.Module, tokens: Tensor) -> Tensor:
    found = tokens.nonzero()
    return found * 2 if found.shape[0] > 3 else found


def _slice(self: nn.Module, tokens: Tensor) -> Tensor:
    return tokens[: int(tokens[0, 0].item())]


def _select_a_branch(self: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    if tokens.sum() > 0:
        return tokens
    return -tokens


def _sleep(self: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    time.sleep(0)
    return tokens


def _seed(self: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    torch.manual_seed(0)
    return tokens + torch.rand_like(tokens)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (_concatenate, r"torch cannot run `cat` .* but got tokens\.shape\[0\] for tensor number 1 in the list; leave"),
        (_add, r"tensor a \(tokens\.shape\[0\]\) must match the size of tensor b \(mask\.shape\[0\]\) at"),
        (
            _multiply,
            r"torch cannot run `matmul` .* but got \[tokens\.shape\[0\], 8\] X \[tokens\.shape\[0\], 8\]; leave",
        ),
        (_view, r"'\[-1, 3\]' is invalid for input of size 8\*tokens\.shape\[0\]; leave"),
        (_branch, r"another path for a size of 2 \(`\(tokens\.shape\[0\] % 2\) != 0` in `return tokens \* 2 if .*`\)$"),
        (_compare, r"another path for a size of 2 \(`tokens\.shape\[0\] < mask\.shape\[0\]` in `return .*`\)$"),
        (
            _loop,
            r"T \(tokens\.shape\[0\]\) was fixed to 5 by `for .*`, which needs a number \(`tokens\.shape\[0\] == 5`\)$",
        ),
        (_split, r"another path for a size of 2 \(`.*tokens\.shape\[0\] // 2\)\) == 3` in `return tokens\.split.*`\)$"),
        (
            _raise,
            r"forward raises KeyError\('no kernel for torch\.Size\(\[tokens\.shape\[0\], 8\]\)'\) while it is traced$",
        ),
        (
            _select,
            r"forward decides by the values of a tensor \(a branch, a loop or a Python number\); compute each result",
        ),
        (
            _select_a_branch,
            r"forward decides by the values of a tensor \(a branch, a loop or a Python number\); compute each result",
        ),
        (
            _sleep,
            r"forward calls `time.sleep`, which cannot be captured; call it outside of forward, or in a custom op$",
        ),
        (
            _seed,
            r"forward calls `manual_seed`, which cannot be captured; call it outside of forward, or in a custom op$",
        ),
        (
            _slice,
            r"forward makes a tensor with a size that depends on the values of a tensor; every size must be constant or",
        ),
    ],
)
def test_a_refusal_names_the_sizes_of_arguments(forward: Any, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        compile_(forward)
    text = str(refused.value)
    assert text.startswith(f"{__file__}:") and "\n" not in text
    assert not SYMBOL.search(text) and "failed while attempting" not in capfd.readouterr().err  # torch's log


def test_a_branch_with_unbacked_sizes_names_the_size() -> None:
    config = TorchCompileConfig(enable_inductor=False, compile_cache=False, dynamic_shapes="unbacked")
    said = r'dynamic_shapes="unbacked" decides no branch on a size, and forward has one \(`.*tokens\.shape\[0\].*`\)$'
    with pytest.raises(ValueError, match=said):
        compile_(_branch, config)


def test_an_argument_that_a_decorator_passes_on_is_named() -> None:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return _concatenate(*args, **kwargs)

    forward.__wrapped__ = _concatenate  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"but got tokens\.shape\[0\] for tensor number 1"):
        torchweave.compile(module_of(forward), {"tokens": torch.randn(5, 8)}, {"tokens": {0: "T"}}, FX)


def test_a_size_that_two_inputs_share_is_named_with_the_input_that_gives_it() -> None:
    inputs = {"tokens": torch.randn(5, 8), "mask": torch.randn(5, 8)}
    compiled = torchweave.compile(module_of(_add), inputs, {"tokens": {0: "T"}, "mask": {0: "T"}}, FX)
    compiled_for = r"the module was compiled for float32\[T, 8\] on cpu, 1 <= sizes <= \d+"
    said = rf"^mask is float32\[4, 8\] on cpu; {compiled_for}, where T \(tokens\.shape\[0\]\) is 3$"
    with pytest.raises(ValueError, match=said):
        compiled(torch.randn(3, 8), torch.randn(4, 8))


class _Reports(GraphPass):
    """A pass whose near misses hold sizes, as those of a pattern with another shape do."""

    def __init__(self, stage: Stage) -> None:
        self.name, self.stage = f"reports_{stage}", stage

    def run(self, graph: Any) -> PassResult:
        node = next(node for node in graph.graph.nodes if node.op == "call_function")
        fake = node.meta.get("example_value", node.meta.get("val"))
        return PassResult(0, 0, (NearMiss(node.name, f"it has the shape {list(fake.shape)}"),))


def test_the_report_names_the_sizes_of_arguments() -> None:
    def forward(self: nn.Module, tokens: Tensor) -> Tensor:
        return (tokens + 1).t().contiguous() * 2

    report = Report(show=False)
    compile_(forward, report=report, passes=[_Reports("torch_ir"), _Reports("aten")])
    near_misses = [miss for each in report.select("pass") for miss in each["near_misses"]]
    assert [miss.partition(": ")[2] for miss in near_misses] == ["it has the shape [tokens.shape[0], 8]"] * 2
    assert [each["expression"] for each in report.select("assumption")] == ["tokens.shape[0] != 1"]
