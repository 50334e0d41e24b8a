"""The routing kernel on a GPU: every router form against the reference, half precision, dependent launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchweave.ops.moe.experts  # noqa: F401 (defines torchweave::experts)
from tests.ops.moe.routing_cases import FORMS, arguments, dense
from torchweave.ops.moe.routing import SCORES, route

pytestmark = pytest.mark.gpu


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in given.items()}


@pytest.mark.parametrize("sizes", [(128, 8), (60, 4), (256, 8), (12, 2)], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_router_form_equals_the_reference(form: dict[str, Any], sizes: tuple[int, int]) -> None:
    experts, top = sizes
    if experts % form.get("num_groups", 1):
        pytest.skip("the groups do not divide the experts")
    for tokens in (1, 7, 300):
        given = arguments(form, tokens, experts, top)
        weights, index = route(**given)
        got, at = route(**on_gpu(given))
        assert got.dtype == given["dtype"] and at.dtype == torch.int64
        assert at.cpu().equal(index)
        tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            dense(got, at, experts).cpu(), dense(weights, index, experts), rtol=tolerance, atol=1e-6
        )


def test_equal_scores_take_the_first_expert_and_every_token_gets_distinct_ones() -> None:
    logits = torch.randn(500, 128, device="cuda").mul(4).round().bfloat16()  # few values, so many are equal
    weights, index = route(logits, None, 8, "softmax", torch.float32, renormalize=True)
    order = torch.sort(logits.float(), dim=1, descending=True, stable=True)[1][:, :8]
    assert index.equal(order)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(500, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_16_bit_logits_choose_the_experts_of_float32(score: str, dtype: torch.dtype) -> None:
    """A key of a logit and its expert chooses what two reductions over float32 do, among negative zeros and equal logits.

    The two kernels add scores in different orders, so float32 weights differ by some 1e-7 of their size, and weights that are
    rounded to 16 bits by at most one unit in the last place.
    """
    for experts, top in ((32, 4), (60, 4), (128, 8), (257, 8), (512, 10), (2048, 8)):
        logits = torch.randn(300, experts, device="cuda").mul(16).round().div(8).to(dtype)
        logits[:, ::7] = -0.0
        logits[::2, 1::3] = -torch.inf
        weights, index = route(logits, None, top, score, dtype, renormalize=True, scale=1.5)
        wide, right = route(logits.float(), None, top, score, dtype, renormalize=True, scale=1.5)
        assert index.equal(right)
        units = weights.view(torch.int16).int() - wide.view(torch.int16).int()  # positive numbers sort like their bits
        assert int(units.abs().max()) <= 1


def test_routing_between_router_and_experts_in_a_graph() -> None:
    """Dependent launches wait for their inputs: the preceding linear, and the following experts."""
    x = torch.randn(2, 256, device="cuda", dtype=torch.bfloat16)
    router = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16) / 16
    up, down = (
        torch.randn(16, 384, 256, device="cuda").bfloat16() / 16,
        torch.randn(16, 256, 192, device="cuda").bfloat16() / 14,
    )

    def step() -> torch.Tensor:
        weights, index = route(x @ router.T, None, 4, "softmax", torch.bfloat16, renormalize=True)
        return torch.ops.torchweave.experts(x, index, weights, up, down, None, None, "silu")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        got = out.clone()
        torch.testing.assert_close(got, step(), rtol=0, atol=0)
