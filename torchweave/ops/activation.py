"""Gated activations, `act(gate) * up`, over the output of a merged gate/up projection.

Rounding follows eager mode: the activation is computed in float32 and rounded to the dtype, then the product is. The kernel's
exponential differs in the last bits of float32, so a result may differ by one unit in the last place next to a tie.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.registry import define

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}
"""Values of the argument `activation`."""


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function called `name`; ValueError lists the valid names."""
    function = ACTIVATIONS.get(name)
    if function is None:
        raise ValueError(f"activation {name!r} is unknown; expected one of {', '.join(ACTIVATIONS)}")
    return function


def _fake(gate_up: Tensor, activation: str) -> Tensor:
    get_activation(activation)
    return torch.empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device)


def _split_gate_up(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up.split([half, half], -1)
    return gate, up


def _launch(gate_up: Tensor, activation: str) -> Tensor:
    return _launch_pair(*_split_gate_up(gate_up), activation)


def _launch_pair(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from torchweave.ops.kernels.activation import launch_gated

    return launch_gated(gate, up, activation)


@define("torchweave::gated_activation", fake=_fake, cuda=_launch)
def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """`act(gate_up[..., :I]) * gate_up[..., I:]`: `[..., 2 * I]` -> `[..., I]`, contiguous."""
    return _gated(*_split_gate_up(gate_up), activation)


def _fake_pair(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    get_activation(activation)
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@define("torchweave::gated_activation_pair", fake=_fake_pair, cuda=_launch_pair)
def gated_activation_pair(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`act(gate) * up` of two tensors of one shape and dtype, contiguous."""
    return _gated(gate, up, activation)


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return (get_activation(activation)(gate) * up).contiguous()
