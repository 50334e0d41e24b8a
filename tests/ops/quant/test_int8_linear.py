"""W8A8: rounding of tokens, the product against float64, and the kernels without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.interpreted import run_interpreted
from torchweave.ops.quant.int8_linear import Int8Config, choose, int8_linear, quantize_tokens


def operands(
    tokens: int, outputs: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x with tokens of different sizes, w, scale, bias."""
    generator = torch.Generator().manual_seed(tokens + width)
    x = torch.randn(tokens, width, generator=generator) * torch.logspace(-3, 2, max(tokens, 1))[:tokens, None]
    w = torch.randint(-128, 128, (outputs, width), generator=generator, dtype=torch.int8)
    scale = torch.rand(outputs, 1, generator=generator) * 0.01 + 0.001
    return x.to(dtype), w, scale.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


def expected(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """float64: every token in steps of a 255th of twice its largest size."""
    step = (x.float().abs().amax(1, keepdim=True) / 127.5).double()
    q = (x.float() / step.float()).round().clamp(-128, 127).double()
    product = (q * step) @ (w.double() * scale.double()).t()
    return product if bias is None else product + bias.double()


def test_tokens_are_rounded_to_the_nearest_step() -> None:
    x = torch.tensor([[1.0, -1.0, 0.5, 0.003], [0.0, 0.0, 0.0, 0.0], [-300.0, 2.0, 1.0, 0.0]])
    q, s = quantize_tokens(x)
    assert q.tolist()[0][2:] == [64, 0] and q.tolist()[1] == [0] * 4 and q.tolist()[2][1:] == [1, 0, 0]
    assert {abs(each) for each in (*q.tolist()[0][:2], q.tolist()[2][0])} <= {127, 128}, "127.5 is between two steps"
    inside = q[0, 1:].float() * s[0]
    torch.testing.assert_close(inside, x[0, 1:], rtol=0, atol=float(s[0]) / 2 + 1e-3)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_product_is_that_of_the_rounded_tokens(tokens: int) -> None:
    x, w, scale, bias = operands(tokens, 40, 208)
    for added in (None, bias):
        got = int8_linear(x[None], w, scale, added)
        assert got.shape == (1, tokens, 40)
        torch.testing.assert_close(got[0].double(), expected(x, w, scale, added), rtol=1e-5, atol=1e-5)
    torch.library.opcheck(int8_linear, (x[None], w, scale, bias))


def check_kernels() -> None:
    from torchweave.ops.kernels.quant.int8_linear import launch

    for tokens, width, config in ((1, 96, Int8Config(16, 16, 32, 4, 2)), (19, 200, Int8Config(32, 16, 64, 4, 2))):
        x, w, scale, bias = operands(tokens, 40, width)
        for added in (None, bias):
            out = torch.full((tokens, 43), torch.nan)[:, :40]
            launch(config, x, w, scale, added, out)
            torch.testing.assert_close(out.double(), expected(x, w, scale, added), rtol=1e-5, atol=1e-5)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.quant.test_int8_linear")


@pytest.mark.parametrize("tokens", [1, 32, 64, 512])
def test_kernels_build_for_hopper(tokens: int) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.quant import int8_linear as kernels

    x, w, scale, bias = operands(tokens, 256, 4096, torch.bfloat16)
    with recorded(kernels, "quantize_kernel", "product_kernel") as launches:
        kernels.launch(choose(tokens, 256), x, w, scale, bias, torch.empty(tokens, 256, dtype=torch.bfloat16))
    _, product = (compile_for_hopper(each) for each in launches)
    assert ".s32.s8.s8" in product.asm["ptx"] and product.metadata.shared <= 227 << 10


if __name__ == "__main__":
    check_kernels()
