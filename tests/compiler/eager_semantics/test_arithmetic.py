"""Values and dtypes for which stock torch.compile computes something else; see `arithmetic` and `small_integers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweave
from tests.compiler.eager_semantics.as_eager import FX, INDUCTOR, check

NAN, INF = float("nan"), float("inf")


def test_identities_hold_for_every_value() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        zeros = torch.zeros_like(x)
        negative = torch.ceil(y)  # -0.0
        return (
            *(x * 0, 0 * x, x * 0.0, x - x, x * zeros),
            *(1 / (negative + 0.0), torch.reciprocal(negative + zeros[:3]), 1 / (zeros[:3] + negative)),
            *(1 / (negative - 0.0), 1 / (negative * torch.ones(3)), 1 / (0 - negative)),
        )

    check(
        forward,
        lambda: {"x": torch.tensor([NAN, INF, 1.0, -0.0]), "y": torch.tensor([-0.5, -0.1, -0.9])},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floor_division_and_remainder_of_floats(dtype: torch.dtype) -> None:
    def forward(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (
            *(a // b, torch.div(a, b, rounding_mode="floor"), torch.remainder(a, b), torch.fmod(a, b), a % b),
            *(a // 0.1, a % 0.1, 1.0 // b, a // 3, torch.div(a, b, rounding_mode="trunc"), a.long() // 0.1),
        )

    numbers = torch.tensor([1.0, 0.5, 6.0, 1.0, -3.0, 0.0, -0.0, 5.0, INF, 3.0] * 3)
    others = torch.tensor([0.1, 0.1, 0.2, 1 / 3, 0.3, 2.0, -2.0, 0.0, 2.0, INF] * 3)
    check(forward, lambda: {"a": numbers.to(dtype).nan_to_num(posinf=9.0), "b": others.to(dtype)}, tolerance=0)


def test_floor_division_of_integers() -> None:
    def forward(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a // b, a % b, torch.div(a, b, rounding_mode="trunc"), a / b, a // 2, a % 2

    for dtype in (torch.int64, torch.int8):
        a, b = torch.tensor([7, -7, 8, -8, 0] * 4, dtype=dtype), torch.tensor([2, 2, -3, -3, 5] * 4, dtype=dtype)
        check(forward, lambda a=a, b=b: {"a": a, "b": b})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_products_of_integers_keep_their_dtype(dtype: torch.dtype) -> None:
    def forward(self: Any, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return torch.bmm(a, b), torch.bmm(a, b[:, :, :1]), a[0] @ b[0], a[0] @ b[0, :, :1], a[0, 0] @ b[0, :, 0]

    check(
        forward,
        lambda: {
            "a": torch.randint(0, 9, (2, 1, 40)).to(dtype),
            "b": torch.randint(0, 9, (2, 40, 3)).to(dtype),
        },
    )


def test_a_cumsum_over_ones_keeps_its_dtype() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        ones = torch.ones(3, 4)
        mask = torch.ones(3, 4, dtype=torch.bool)
        return (
            *(ones.cumsum(1), ones.cumsum(0, dtype=torch.float64), mask.cumsum(1, dtype=torch.bfloat16)),
            *(mask.cumsum(1), ones.cumsum(1, dtype=torch.int32) + x.int(), torch.full((3, 4), 2).cumsum(0)),
        )

    check(forward, lambda: {"x": torch.randn(3, 4)})


def test_any_and_ldexp_and_promotion_have_the_dtypes_of_eager_code() -> None:
    def forward(self: Any, u: Tensor, h: Tensor, f: Tensor, b: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return (
            *(u.any(), u.any(1), u.all(0), b.any(), f.any(1), i.all()),
            *(torch.ldexp(b, h), torch.ldexp(h, f), torch.ldexp(f, i), torch.ldexp(i, b), torch.ldexp(u, u)),
            *(h + i, b + b, u + i, u * 2.5, f.half() + i, torch.where(b, h, f), i / 2, u - b.int(), h * f),
        )

    def inputs() -> dict[str, Tensor]:
        kinds = {"u": torch.uint8, "h": torch.half, "f": torch.float32, "b": torch.bool, "i": torch.int32}
        return {name: torch.randint(0, 3, (3, 20)).to(dtype) for name, dtype in kinds.items()}

    check(forward, inputs)


def test_operands_beside_a_factor_of_zero_are_not_read() -> None:
    def forward(self: Any, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        nan = x * torch.nan
        return (
            torch.addmm(nan, a, b, beta=0),
            torch.addmm(nan[:1], a, b[:, :1], beta=0),
            torch.addmm(x, a * torch.nan, b, alpha=0),
        )

    check(forward, lambda: {"x": torch.randn(4), "a": torch.randn(1, 4), "b": torch.randn(4, 4)})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_extremes_of_small_integers(dtype: torch.dtype) -> None:
    """16 or more elements fill a vector, whose lanes began with a number out of range."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        return (
            *(x.min(), x.max(), x.argmin(), x.argmax(), x.amin(), x.amax(), *x.aminmax(), x.sum(), x.abs().max()),
            *(x.amin(1), x.amax(0), x.argmax(1), x.argmin(0), *x.min(1), *x.max(0), x.amax((0, 1))),
        )

    def rows(number: int, low: int, high: int) -> Any:
        return lambda: {"x": torch.randint(low, high, (number, 33)).to(dtype)}

    low, high = (1, 255) if dtype is torch.uint8 else (-128, -3)
    check(forward, rows(40, low, high), rows(3, 100, 127), rows(2, 7, 8), dynamic={"x": {0: "T"}})


def test_casts_of_floats_to_small_integers_wrap() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        return x.to(torch.int32), x.to(torch.uint8), x.to(torch.int8), x.bool(), x.long(), (x * 2).to(torch.uint8)

    check(forward, lambda: {"x": torch.tensor([1.9, -1.9, 200.7, 255.2, 100.0] * 7)})


class _Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.shift = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return x * y, x.double() * y, y * 2 + 1, x * self.scale + self.shift, x + n, y + n, x[:2] / y


@pytest.mark.parametrize("config", [INDUCTOR, FX], ids=["inductor", "fx"])
def test_tensors_of_one_float64(config: Any) -> None:
    """They ended in `TensorifyScalarRestartAnalysis` without a text."""

    def inputs(y: float) -> Any:
        return lambda: {"x": torch.arange(4.0), "y": torch.tensor(y, dtype=torch.float64), "n": torch.tensor(3)}

    module = _Scalars().requires_grad_(False)
    check(module, inputs(2.5), inputs(-1.25), inputs(0.0), dynamic={"x": {0: "T"}}, config=config)


def test_a_tensor_of_the_size_of_another() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        one, other = torch.Tensor(x.size()).zero_(), torch.Tensor(*x.shape).fill_(2.0)
        return one, other, torch.Tensor([4, 6]) + x.sum(), torch.Tensor(x.shape[1]).zero_()

    check(forward, lambda: {"x": torch.randn(4, 6)})


def test_idle_dropout_returns_its_input() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        functional = nn.functional
        return (
            functional.dropout(x, 0.5, False),
            functional.dropout(x * 2, 0.0, True),
            functional.alpha_dropout(x, 0.3, False),
            torch.dropout(x, 0.1, False) + 1,
        )

    check(forward, lambda: {"x": torch.randn(4, 6)})


def _expanded(self: Any, x: Tensor) -> Tensor:
    y = (x + 0)[:, :1].expand(-1, 3)
    y[-1] = 3
    return y


def _expanded_add(self: Any, x: Tensor) -> Tensor:
    y = (x[0] * 2).expand(5, -1)
    y += 1
    return y


def _shifted(self: Any, x: Tensor) -> Tensor:
    x[1:] = x[:-1]
    return x


def _transposed(self: Any, x: Tensor) -> Tensor:
    return x[:4, :4].contiguous().view(4, 4).add_(1), x.sub_(
        x.view(-1).view(8, 8).flatten(0).as_strided((8, 8), (1, 8))
    )[0]


@pytest.mark.parametrize("forward", [_expanded, _expanded_add, _shifted, _transposed])
def test_a_write_that_eager_code_refuses_is_refused(forward: Any) -> None:
    module = type("Module", (nn.Module,), {"forward": forward})()
    with pytest.raises(RuntimeError, match="unsupported operation"):
        module(torch.randn(8, 8))
    with pytest.raises(ValueError, match="which eager code refuses"):
        torchweave.compile(module, {"x": torch.randn(8, 8)}, config=FX)


def test_writes_that_touch_no_common_element_are_compiled() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x[4:] = x[:4]
        x[:, 0].add_(x[:, 1])
        x.copy_(x)
        x += x
        return x.expand(2, -1, -1).clone().mul_(2)

    check(forward, lambda: {"x": torch.randn(8, 8)})
