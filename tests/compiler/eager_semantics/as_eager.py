"""Compare a compiled forward with eager code: results, what inputs hold afterwards, and the memory that results share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torchweave
from torchweave.config.options import TorchCompileConfig

INDUCTOR = TorchCompileConfig(compile_cache=False)
FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)


def module_of(forward: Any) -> nn.Module:
    return type("Module", (nn.Module,), {"forward": forward})().eval()


def check(
    forward: Callable[..., Any] | nn.Module,
    *makers: Callable[[], dict[str, Tensor]],
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    tolerance: float = 1e-5,
    config: TorchCompileConfig = INDUCTOR,
) -> Any:
    """Compile a forward (or a module) for the tensors that the first of `makers` makes, and compare a call with those of each.

    A forward takes `self` first. Returns the compiled module.
    """
    module = forward if isinstance(forward, nn.Module) else module_of(forward)
    compiled = torchweave.compile(module, makers[0](), dynamic, config)
    for make in makers:
        expected, left = _call(module, make)
        got, got_left = _call(compiled, make)
        pairs = zip((*pytree.tree_leaves(got), *got_left), (*pytree.tree_leaves(expected), *left), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert _shared(got, got_left) == _shared(expected, left)
    return compiled


def _call(function: Any, make: Callable[[], dict[str, Tensor]]) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    inputs = make()
    with torch.no_grad():
        return function(*inputs.values()), list(inputs.values())


def _shared(result: Any, inputs: list[Tensor]) -> list[int]:
    """For each tensor the first one with the same memory."""
    tensors = [each for each in (*inputs, *pytree.tree_leaves(result)) if isinstance(each, Tensor)]
    addresses = [each.untyped_storage().data_ptr() for each in tensors]
    return [addresses.index(each) for each in addresses]
