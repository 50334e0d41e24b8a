"""Run by test_routing with TRITON_INTERPRET=1: the kernel against the reference, logits in 16 bits, equal scores, NaN."""

from __future__ import annotations

import itertools

import torch

from tests.ops.moe.routing_cases import FORMS, PLAIN, arguments, dense
from torchweave.ops.kernels.moe.routing import launch_route, supports_logit_keys
from torchweave.ops.moe.routing import SCORES, route


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


def routing_of_16_bit_logits_equals_float32() -> None:
    """One reduction over keys of logit and expert against two over scores; here both add scores in one order."""
    for dtype, (experts, top), score in itertools.product(
        (torch.bfloat16, torch.float16), ((24, 3), (60, 4), (257, 8), (512, 10)), SCORES
    ):
        logits = (torch.randn(3, experts) * 3).to(dtype)
        logits[1] = logits[1].round()  # few values, so many are equal
        logits[:, ::5], logits[2, 1::3] = -0.0, -torch.inf
        form = {"score": score, "renormalize": True, "scale": 1.5}
        assert supports_logit_keys(logits, None, 1) and not supports_logit_keys(logits.float(), None, 1)
        weights, index = by_kernel(logits, None, top, **form)
        wide, right = by_kernel(logits.float(), None, top, **form)
        assert index.equal(torch.sort(logits.float(), dim=1, descending=True, stable=True)[1][:, :top])
        assert index.equal(right) and weights.equal(wide), (dtype, experts, score)


def nans_among_16_bit_logits() -> None:
    logits = torch.tensor([[torch.nan] * 5, [1.0, torch.nan, 3.0, -torch.inf, 2.0]], dtype=torch.bfloat16)
    weights, index = by_kernel(logits, None, 2, score="softmax")
    assert index.tolist() == [[5, 5], [2, 4]] and bool(weights.isnan().all())
    weights, index = by_kernel(logits, None, 4, score="sigmoid")
    assert index.tolist() == [[5, 5, 5, 5], [2, 4, 0, 3]]
    torch.testing.assert_close(weights[1], torch.tensor([3.0, 2.0, 1.0, -torch.inf]).sigmoid())


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
    routing_of_16_bit_logits_equals_float32()
    nans_among_16_bit_logits()
    first_of_equals_and_nothing_out_of_range()
