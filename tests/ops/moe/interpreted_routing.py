"""Run by test_routing with TRITON_INTERPRET=1: the kernel against the reference, equal scores, NaN, strided logits."""

from __future__ import annotations

import torch

from tests.ops.moe.routing_cases import FORMS, PLAIN, arguments, dense
from torchweave.ops.kernels.moe.routing import launch_route
from torchweave.ops.moe.routing import route


def by_kernel(logits, bias, top_k, **form):
    size = (len(logits), top_k + form.get("shared", False))
    weights, index = torch.full(size, torch.nan), torch.full(size, -1)
    launch_route(logits, bias, weights, index, **PLAIN | form)
    return weights, index


def agree() -> None:
    for form in FORMS.values():
        form = form | {"dtype": torch.float32}  # the interpreter rounds to bfloat16 in its own way
        for experts, top in ((24, 3), (60, 4)):
            given = arguments(form, 3, experts, top)
            weights, index = route(**given)
            given.pop("dtype")
            wide = torch.full((3, experts + 3), torch.nan)
            wide[:, :experts] = given["logits"]
            got, at = by_kernel(**given | {"logits": wide[:, :experts]})
            torch.testing.assert_close(dense(got, at, experts), dense(weights, index, experts), rtol=1e-6, atol=1e-7)
            assert at.equal(index), (form, at, index)


def first_of_equals_and_nothing_out_of_range() -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 2.0, 0.0], [torch.nan] * 5, [-torch.inf, 3.0, -torch.inf, -torch.inf, -torch.inf]]
    )
    _, index = by_kernel(logits, None, 2, score="softmax")
    assert index[0].tolist() == [1, 2]
    assert index[1].tolist() == [5, 5], "a token that is not a number has experts that add nothing"
    assert index[2].tolist() == [1, 0]
    weights, index = by_kernel(torch.tensor([[-1.0, -0.0, 0.0, -3.0]]), None, 3, score="chosen_softmax")
    assert index[0].tolist() == [1, 2, 0] and weights[0, 0] == weights[0, 1], "both zeros are equal"


if __name__ == "__main__":
    agree()
    first_of_equals_and_nothing_out_of_range()
