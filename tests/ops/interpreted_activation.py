"""Run by test_activation with TRITON_INTERPRET=1: the kernel against float64, and its roundings against the reference's."""

from __future__ import annotations

import torch

from tests.ops.fusion_cases import draw
from torchweave.ops.activation import ACTIVATIONS, gated_activation_pair
from torchweave.ops.kernels.activation import launch_gated


def main() -> None:
    for name, function in ACTIVATIONS.items():
        merged = draw(2, 3, 2 * 37) * 4
        for gate, up in (merged.chunk(2, -1), (draw(5, 8), draw(5, 8) * 3)):
            exact = function(gate.double()) * up.double()
            # Models' own float32 result lies further from it: gelu's 1 + tanh cancels for large negative inputs.
            torch.testing.assert_close(launch_gated(gate, up, name).double(), exact, rtol=1e-6, atol=1e-6)
        gate, up = (merged / 4).half().chunk(2, -1)
        same = launch_gated(gate, up, name) == gated_activation_pair(gate, up, name)
        assert same.float().mean() > 0.99, f"{name}: {same.float().mean()} of the roundings agree"
    assert launch_gated(torch.empty(0, 8), torch.empty(0, 8), "silu").shape == (0, 8)


if __name__ == "__main__":
    main()
