"""Matcher and Fusion: argument order, alternatives, near-misses and their reasons, rejected replacements."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from torchweave.compiler.passes.matcher import Match, Pattern, either
from torchweave.compiler.passes.pattern import Fusion
from torchweave.compiler.passes.testing import T, check, graph_of

aten = torch.ops.aten


@torch.library.custom_op("toy::scaled_add", mutates_args=())
def scaled_add(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """(x + y) * factor, and x + y."""
    both = x + y
    return both * factor, both


@scaled_add.register_fake
def _(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def both_kept(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    h = aten.add.Tensor(x, y)
    return aten.mul.Tensor(h, factor), h


def both(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, ...]:
    return torch.ops.toy.scaled_add.default(x, y, factor)


def alone(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return aten.mul.Tensor(aten.add.Tensor(x, y), factor)


def first(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return torch.ops.toy.scaled_add.default(x, y, factor)[0]


FUSION = Fusion("scaled_add", (alone, both_kept), (first, both))
XY = [torch.randn(T, 8), torch.randn(T, 8)]


def test_fires_once_for_symbolic_T_and_passes_opcheck() -> None:
    result = check(FUSION, lambda x, y: torch.relu((x + y) * 3.0), XY, matches=1)
    assert result.rewritten == 2


def test_several_outputs_and_a_reader_between() -> None:
    """A reader of the sum precedes the last call of the pattern, and is moved behind it."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x + y
        early = torch.exp(h)
        return (h * 3.0), early - 1

    check(FUSION, function, XY, matches=1)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x, y: torch.add(x, y, alpha=2) * 3.0, "argument alpha of add is 2, not 1"),
        (lambda x, y: (x + y) * x, "argument other of mul is input_0, not float"),
        (lambda x, y: (x + 1.5) * 3.0, "argument other of add is 1.5, not Tensor"),
        (lambda x, y: (x - y) * 3.0, ""),
    ],
)
def test_near_misses_have_a_reason(function, why: str) -> None:
    result = check(FUSION, function, XY, matches=0)
    assert [miss.why for miss in result.near_misses] == ([why] if why else [])


def test_values_with_other_readers_are_kept() -> None:
    only = Fusion("scaled_add", alone, first)
    check(only, lambda x, y: (((h := x + y) * 3.0), torch.exp(h)), XY, near_miss="add is also read by exp")


def test_a_part_of_another_result_is_no_near_miss() -> None:
    def second(x: Tensor, sizes: list) -> Tensor:
        return aten.split_with_sizes.default(aten.exp.default(x), sizes, 1)[1]

    fusion = Fusion("second", second, lambda x, sizes: torch.exp(x).split(sizes, 1)[1])
    result = check(fusion, lambda x, y: torch.chunk(x + y, 2, 1)[1] * 2.0, XY, matches=0)
    assert not result.near_misses


def test_where_is_the_deprecated_name_of_extra_check() -> None:
    def refuse(match: Match) -> str:
        return "refused"

    old: dict[str, Any] = {"where": refuse}
    with pytest.warns(DeprecationWarning, match="pass extra_check"):
        fusion = Fusion("scaled", alone, first, **old)
    assert fusion.extra_check is refuse
    with pytest.warns(DeprecationWarning, match="read Fusion.extra_check"):
        assert fusion.where is refuse
    check(fusion, lambda x, y: (x + y) * 3.0, XY, near_miss="refused")
    with pytest.raises(ValueError, match="both"):
        Fusion("scaled", alone, first, extra_check=refuse, **old)
    assert dataclasses.replace(fusion, name="other").extra_check is refuse


def test_either_matches_each_spelling_and_defaults_fill_what_it_leaves_unbound() -> None:
    def pattern(x: Tensor, y: Tensor, factor: float) -> Tensor:
        total = aten.add.Tensor(x, y)
        return torch.ops.aten.relu.default(either(total, aten.mul.Tensor(total, factor)))

    def replacement(x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
        return torch.clamp_min((x + y) * factor, 0.0)

    fusion = Fusion("scaled_relu", pattern, replacement)
    check(fusion, lambda x, y: torch.relu(x + y), XY, matches=1)
    check(fusion, lambda x, y: torch.relu((x + y) * 3.0), XY, matches=1)
    check(fusion, lambda x, y: torch.relu((x + y) / 3.0), XY, matches=0)
    with pytest.raises(ValueError, match="returns `either` among several outputs"):
        Pattern(either_and_another)


def either_and_another(x: Tensor, y: Tensor) -> Any:
    total = aten.add.Tensor(x, y)
    return either(total, aten.exp.default(total)), aten.sin.default(total)


def test_extra_check_decides_and_gives_the_reason() -> None:
    def extra_check(match) -> str | None:
        return None if match["factor"] == 3.0 and match.value("x").shape[-1] == 8 else "the factor is not 3"

    only = Fusion("scaled_add", alone, first, extra_check=extra_check)
    check(only, lambda x, y: (x + y) * 3.0 + (y + x) * 2.0, XY, matches=1, near_miss="the factor is not 3")


def test_a_replacement_of_another_kind_is_refused() -> None:
    def wide(x: Tensor, y: Tensor) -> Tensor:
        return (x + y).double()

    only = Fusion("wide", alone, wide)
    result = check(only, lambda x, y: (x + y) * 3.0, XY, near_miss="float64[s")
    assert result.rewritten == 0


@pytest.mark.parametrize(
    ("replacement", "why"),
    [
        (lambda x, y: x.add_(y).mul_(3.0), "writes to input_0; compute"),
        (lambda x, y: (x + y) * 3.0 if x.shape[0] == T else x, "not for all sizes"),
    ],
)
def test_an_invalid_replacement_is_one_sentence(replacement: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"a replacement .*{why}"):
        check(Fusion("none", alone, replacement), lambda x, y: (x + y) * 3.0, XY, matches=1)


def test_cyclic_match_is_rejected() -> None:
    def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return aten.exp.default(x), aten.sin.default(y)

    def swapped(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x), torch.sin(y)

    fusion = Fusion("pair", pair, swapped)
    check(fusion, lambda x, y: torch.sin(torch.cos(torch.exp(x))), XY, near_miss="computed from its own result")


def test_sums_match_in_either_order_and_dims_from_either_end() -> None:
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
        return weight * (x * aten.rsqrt.default(mean + eps))

    def again(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * x
        return y * weight

    fusion = Fusion("norm", norm, again)
    examples = [torch.randn(T, 16), torch.randn(16)]
    result = check(fusion, function, examples, matches=1)
    assert result.rewritten == 6
    graph = graph_of(function, examples)
    found = [Pattern(norm).match_at(node) for node in graph.graph.nodes]
    (match,) = [each for each in found if each is not None and not isinstance(each, str)]
    assert match["eps"] == 1e-5 and match["weight"].name == "input_1"


def test_repeated_wildcard_binds_one_value() -> None:
    def square(x: Tensor) -> Tensor:
        return aten.mul.Tensor(aten.exp.default(x), x)

    fusion = Fusion("square", square, lambda x: torch.exp(x) * x)
    check(fusion, lambda x, y: torch.exp(x) * x, XY, matches=1)
    check(fusion, lambda x, y: torch.exp(x) * y, XY, near_miss="argument other of mul is input_1, not input_0")


def test_lists_with_symbolic_sizes_are_wildcards() -> None:
    def flat(x: Tensor, shape: list) -> Tensor:
        return aten.view.default(aten.exp.default(x), shape)

    fusion = Fusion("flat", flat, lambda x, shape: torch.exp(x.view(shape)))
    check(fusion, lambda x: torch.exp(x).view(x.shape[0], 2, 4), [torch.randn(T, 8)], matches=1)


def test_a_parameter_without_an_annotation_is_a_tensor() -> None:
    def scaled(x, factor: float):
        return aten.mul.Tensor(aten.exp.default(x), factor)

    fusion = Fusion("scaled", scaled, lambda x, factor: torch.exp(x) * factor)
    check(fusion, lambda x: torch.exp(x) * 2.0, [torch.randn(T, 8)], matches=1)
    assert Pattern(lambda x: aten.exp.default(x)).num_operations == 1


def test_bad_fusions_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="its pattern has no parameter z"):
        Fusion("bad", alone, lambda z: z)
    with pytest.raises(ValueError, match="2 patterns need 1 or 2 replacements"):
        Fusion("bad", (alone, alone), (first, first, first))
