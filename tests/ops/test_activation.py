"""Gated activations equal eager mode, from one merged tensor or two, and their kernel without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.fusion_cases import draw
from tests.ops.interpreted import run_interpreted
from torchweave.ops.activation import ACTIVATIONS, gated_activation, gated_activation_pair


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_references_equal_eager_mode(name: str, dtype: torch.dtype) -> None:
    gate_up = draw(1, 5, 96, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    written = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": torch.nn.GELU("tanh"),
        "relu": F.relu,
        "sigmoid": torch.sigmoid,
    }
    got = gated_activation(gate_up, name)
    assert got.is_contiguous() and got.equal(written[name](gate) * up)
    assert gated_activation_pair(gate, up, name).equal(got)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation 'swish' is unknown; expected one of silu, gelu"):
        gated_activation(draw(2, 8), "swish")


def test_opcheck() -> None:
    torch.library.opcheck(gated_activation, (draw(1, 3, 16), "silu"))
    torch.library.opcheck(gated_activation_pair, (draw(3, 16), draw(3, 16) * 2, "gelu_tanh"))


def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted("tests.ops.interpreted_activation")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_kernel_builds_for_hopper(name: str) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels import activation as kernels

    gate, up = torch.empty(8, 16384, dtype=torch.bfloat16).chunk(2, -1)
    with recorded(kernels, "gated_kernel") as launches:
        kernels.launch_gated(gate, up, name)
    assert ".v4.b32" in compile_for_hopper(launches[0]).asm["ptx"], "rows must be read 16 bytes at a time"
