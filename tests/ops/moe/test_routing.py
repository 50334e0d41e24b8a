"""The routing op: its reference against the sum over experts that it stands for, its schema, and its kernel without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.interpreted import run_interpreted
from tests.ops.moe.routing_cases import FORMS, PLAIN, arguments
from torchweave.ops.moe.routing import route


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_opcheck(form: dict[str, Any]) -> None:
    torch.library.opcheck(route, (), arguments(form, 5, 12, 2))


def test_reference_token_by_token() -> None:
    given = arguments(FORMS["deepseek_v3"], 6, 12, 3)
    weights, index = route(**given)
    for token, logits in enumerate(given["logits"]):
        scores = logits.sigmoid()
        choice = (scores + given["bias"]).tolist()
        groups = sorted(range(4), key=lambda g: -sum(sorted(choice[3 * g : 3 * g + 3])[-2:]))[:2]
        best = sorted((e for e in range(12) if e // 3 in groups), key=lambda e: -choice[e])[:3]
        assert index[token].tolist() == best
        torch.testing.assert_close(weights[token], scores[best] / scores[best].sum() * 2.5)


def test_kernel_in_the_interpreter() -> None:
    run_interpreted("tests.ops.moe.interpreted_routing")


@pytest.mark.parametrize("form", ["qwen3", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_kernel_builds_for_hopper(form: str) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded
    from torchweave.ops.kernels.moe import routing

    given = arguments(FORMS[form], 4, 128, 8, torch.bfloat16)
    size = (4, 8 + given.get("shared", False))
    weights, index = torch.empty(size, dtype=given.pop("dtype", torch.float32)), torch.empty(size, dtype=torch.int64)
    logits, bias, _ = given.pop("logits"), given.pop("bias"), given.pop("top_k")
    with recorded(routing, "route_kernel") as launches:
        routing.launch_route(logits, bias, weights, index, **PLAIN | given)
    assert "bar.sync" not in compile_for_hopper(launches[0]).asm["ptx"], "one warp a token has nobody to wait for"


@pytest.mark.parametrize("experts", [512, 2048])
def test_a_token_of_many_experts_is_one_warp_without_spills(experts: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper, recorded, spilled_bytes
    from torchweave.ops.kernels.moe import routing

    logits = torch.empty(4, experts, dtype=torch.bfloat16)
    weights, index = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(4, 8, dtype=torch.int64)
    with recorded(routing, "route_kernel") as launches:
        routing.launch_route(logits, None, weights, index, **PLAIN | {"score": "softmax", "renormalize": True})
    compiled = compile_for_hopper(launches[0])
    assert "bar.sync" not in compiled.asm["ptx"] and spilled_bytes(compiled, tmp_path) == 0
    assert compiled.asm["ptx"].count("redux.sync") == 8, "one reduction of integers finds a logit and its expert"
