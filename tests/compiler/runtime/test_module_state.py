"""A compiled module refuses to compute with weights or a mode that its module no longer has, and loses no gradient in silence."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing

import torchweave
from torchweave.config.options import TorchCompileConfig

FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
INDUCTOR = TorchCompileConfig(compile_cache=False)


def compile_(module: nn.Module, config: TorchCompileConfig = FX) -> Any:
    return torchweave.compile(module, {"input": torch.randn(5, 8)}, {"input": {0: "T"}}, config)


class Branches(nn.Module):
    """Two linears of one input, which are merged: their weights move to other memory."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, input: Tensor) -> Tensor:
        return self.left(input) + self.right(input).tanh()


def _other_parameter(module: Any) -> None:
    module.left.weight = nn.Parameter(torch.zeros(8, 8))


def _other_data(module: Any) -> None:
    module.left.weight.data = torch.zeros(8, 8)


def _assigned_state(module: nn.Module) -> None:
    state = Branches().state_dict()
    module.load_state_dict({**module.state_dict(), "left.weight": state["left.weight"]}, assign=True)


def _parametrized(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.left)


@pytest.mark.parametrize("change", [_other_parameter, _other_data, _assigned_state, _parametrized, nn.Module.double])
def test_a_replaced_weight_is_refused(change: Any) -> None:
    module = Branches()
    compiled, x = compile_(module), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
        change(module)
        with pytest.raises(
            ValueError, match=r"^`left\.weight` is another tensor than when the module was compiled; write to it"
        ):
            compiled(x)


@torch.no_grad()
def test_weights_are_written_in_place() -> None:
    module, other, x = Branches(), Branches(), torch.randn(3, 8)
    compiled = compile_(module)
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(x), other(x))
    module.left.weight.mul_(2)
    torch.testing.assert_close(compiled(x), module(x))


@torch.no_grad()
def test_weights_that_another_compilation_moved_are_valid_until_they_are_written() -> None:
    module, x = Branches(), torch.randn(3, 8)
    first, second = compile_(module), compile_(module)
    for compiled in (first, second, first, second):
        torch.testing.assert_close(compiled(x), module(x))
    module.right.weight.mul_(2)
    torch.testing.assert_close(second(x), module(x))
    with pytest.raises(ValueError, match=r"^`right\.weight` is another tensor"):
        first(x)


@torch.no_grad()
def test_another_mode_is_refused_where_forward_reads_it() -> None:
    x = torch.randn(6, 8)
    norm = nn.BatchNorm1d(8).eval()
    compiled = compile_(norm)
    torch.testing.assert_close(compiled(x), norm(x))
    norm.train()
    with pytest.raises(
        ValueError, match=r"^the module was in evaluation mode .* is in training mode; .*, or call `eval\(\)`$"
    ):
        compiled(x)
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9))
    compiled = compile_(module)
    module.eval()
    with pytest.raises(
        ValueError, match=r"^submodule `1` was in training mode .* is in evaluation mode; .* `train\(\)`$"
    ):
        compiled(x)


@torch.no_grad()
def test_another_mode_is_valid_where_forward_does_not_read_it() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.ReLU()), torch.randn(3, 8)
    compiled = compile_(module)
    module.eval()
    torch.testing.assert_close(compiled(x), module(x))


@torch.no_grad()
def test_the_mode_of_a_decorated_module_is_checked() -> None:
    @torchweave.compile(dynamic={"x": {0: "T"}}, config=FX)
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.9, training=self.training)

    module, x = Drops().eval(), torch.randn(3, 8)
    assert torch.equal(module(x), x)
    module.train()
    with pytest.raises(ValueError, match=r"^the module was in evaluation mode"):
        module(x)


def test_an_input_that_requires_gradients_is_refused() -> None:
    module = nn.ReLU()
    compiled, x = compile_(module), torch.randn(3, 8, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"^input requires gradients, which a compiled module does not compute; call it in `tor"
    ):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), module(x))
    assert torch.equal(compiled(x.detach()), module(x))


def test_gradients_of_weights_that_are_lost_are_told_of_once() -> None:
    module, x = nn.Linear(8, 4), torch.randn(3, 8)
    compiled = compile_(module)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x)
    with pytest.warns(
        UserWarning, match=r"^the results of a compiled module have no gradients, and its weights require them; "
    ):
        compiled(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x)
        compile_(module.requires_grad_(False))(x)


@pytest.mark.parametrize("copy_it", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_compiled_module_is_not_copied(copy_it: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^a compiled module cannot be copied or pickled; copy the module that it was compiled fr"
    ):
        copy_it(compile_(nn.ReLU()))


def test_an_input_on_another_kind_of_device_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^input is float32\[3, 8\] on meta; the module was compiled for float32\[T, 8\] on cpu"
    ):
        compile_(nn.ReLU())(torch.randn(3, 8, device="meta"))


def _autocast_inside(self: nn.Module, input: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = input @ input.t()
    return y.t()


def _fails_inside(self: nn.Module, input: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return input.index_select(0, (input[:, 0] * 100).long()) @ input.t()  # there is no row 100


@pytest.mark.parametrize("config", [FX, INDUCTOR], ids=["fx", "inductor"])
def test_autocast_is_as_before_after_a_compilation_and_a_call(config: TorchCompileConfig) -> None:
    """The analysis of returned views entered autocast, and left it on for the whole thread."""
    module, x = type("Module", (nn.Module,), {"forward": _autocast_inside})(), torch.randn(3, 8)
    compiled = compile_(module, config)
    assert not torch.is_autocast_enabled("cpu")
    assert compiled(x).dtype is torch.bfloat16 and (x @ x.t()).dtype is torch.float32


def test_autocast_is_left_where_a_call_raises() -> None:
    compiled = compile_(type("Module", (nn.Module,), {"forward": _fails_inside})())
    with pytest.raises((RuntimeError, IndexError)):
        compiled(torch.ones(3, 8))
    assert not torch.is_autocast_enabled("cpu") and torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_threads_compile_one_after_another() -> None:
    """Compiling sets modes of the whole process; two threads at once left the mode of symbolic tracing on."""
    failures: list[str] = []

    def work(width: int) -> None:
        module, x = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)), torch.randn(3, 8)
        try:
            with torch.no_grad():
                torch.testing.assert_close(compile_(module)(x), module(x))
        except Exception as error:  # reported below
            failures.append(f"{type(error).__name__}: {error}")

    before = torch._debug_has_internal_overlap  # type: ignore[attr-defined]
    threads = [threading.Thread(target=work, args=(width,)) for width in (8, 9, 10, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not is_fx_tracing()
    assert torch._debug_has_internal_overlap is before  # type: ignore[attr-defined]
