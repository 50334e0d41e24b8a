"""What a compiled module was compiled for: its weights and the modes of its submodules, to find changes at a call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn


class ModuleState:
    """The weights of a module, and which of its submodules are in training mode, when it was compiled.

    A graph binds weights once: writes in place reach it, a tensor instead of another does not. It holds what forward does in
    one mode.
    """

    def __init__(self, module: nn.Module) -> None:
        weights = list(_weights(module))
        self._names, self._slots = [name for name, _, _ in weights], [(registry, key) for _, registry, key in weights]
        # Aliases of the tensors: their memory cannot be given to other weights.
        self._compiled_for = [registry[key].detach() for registry, key in self._slots]
        self._addresses = self._read_addresses()
        self._moved: list[tuple[Tensor, int]] = []  # weights that another compilation moved, and their versions
        self._by_mode = [(name, each) for name, each in module.named_modules() if _reads_training(each)]
        self._modes = [each.training for _, each in self._by_mode]
        self._has_warned = False

    def check(self) -> None:
        """Raise ValueError where the module has other weights, or another mode, than it was compiled for."""
        if self._read_addresses() != self._addresses or any(each._version != before for each, before in self._moved):
            self._check_weights()
        if [each.training for _, each in self._by_mode] != self._modes:
            self._refuse_mode()

    def check_gradients(self, names: tuple[str, ...], inputs: tuple[Tensor, ...]) -> None:
        """Refuse inputs whose gradients would be lost, and warn once where those of weights are; with gradients enabled.

        Raises:
            ValueError: an input requires gradients.
        """
        for name, tensor in zip(names, inputs, strict=True):
            if tensor.requires_grad:
                raise ValueError(
                    f"{name} requires gradients, which a compiled module does not compute; call it in `torch.no_grad()` or pass "
                    f"`{name}.detach()`, and train the module itself"
                )
        if not self._has_warned and any(registry[key].requires_grad for registry, key in self._slots):
            self._has_warned = True
            warnings.warn(
                "the results of a compiled module have no gradients, and its weights require them; call it in `torch.no_grad()`, "
                "and train the module itself",
                stacklevel=3,
            )

    def _read_addresses(self) -> list[int]:
        try:
            return [registry[key].data_ptr() for registry, key in self._slots]
        except (KeyError, AttributeError):  # deleted, or None
            return []

    def _check_weights(self) -> None:
        """Accept weights that another compilation of the module moved, while their values are the same."""
        moved: list[tuple[Tensor, int]] = []
        for name, (registry, key), before in zip(self._names, self._slots, self._compiled_for, strict=True):
            now = registry.get(key)
            if now is None or (now.dtype, now.device) != (before.dtype, before.device) or not torch.equal(now, before):
                raise ValueError(
                    f"`{name}` is another tensor than when the module was compiled; write to it in place (`load_state_dict`, "
                    "`copy_`), or compile the module again"
                )
            if now.data_ptr() != before.data_ptr():
                moved.append((now, now._version))
        self._addresses, self._moved = self._read_addresses(), moved

    def _refuse_mode(self) -> None:
        name, before = next(
            (name, before)
            for (name, each), before in zip(self._by_mode, self._modes, strict=True)
            if each.training != before
        )
        modes = ("training", "evaluation", "train") if before else ("evaluation", "training", "eval")
        raise ValueError(
            f"{f'submodule `{name}`' if name else 'the module'} was in {modes[0]} mode when the module was compiled and is in "
            f"{modes[1]} mode; compile it again, or call `{modes[2]}()`"
        )


def _weights(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The name of each weight, and the place in its module's registry."""
    for path, each in module.named_modules():
        for registry in (each._parameters, each._buffers):
            for key, tensor in registry.items():
                if type(tensor) in (Tensor, nn.Parameter, nn.Buffer):  # others may have no memory of their own
                    yield f"{path}.{key}" if path else key, registry, key


def _reads_training(module: nn.Module) -> bool:
    """Whether a module's own functions read `training`; dropout of probability 0 is the same in both modes."""
    if 0.0 in (getattr(module, "p", None), getattr(module, "dropout", None)):
        return False
    classes = [each for each in type(module).__mro__ if each is not nn.Module]
    functions = [each for owner in classes for each in vars(owner).values() if isinstance(each, FunctionType)]
    return any("training" in function.__code__.co_names for function in functions)
