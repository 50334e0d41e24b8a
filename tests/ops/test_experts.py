"""The routed experts op: every way of running it against the plain sum over experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchweave.ops import experts as ops

E, K, INNER, TOP = 6, 32, 16, 2


def arguments(
    tokens: int, *, transposed: bool = False, interleaved: bool = False, biased: bool = False, gated: bool = True,
    alpha: float = 0.0, limit: float = 0.0, dtype: torch.dtype = torch.float32, activation: str = "silu",
) -> dict[str, Any]:  # fmt: skip
    generator = torch.Generator().manual_seed(tokens)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    columns = 2 * INNER if gated else INNER
    up = rand(E, K, columns) if transposed else rand(E, columns, K)
    return {
        "x": rand(tokens, K),
        "index": torch.stack([torch.randperm(E, generator=generator)[:TOP] for _ in range(tokens)]),
        "weight": rand(tokens, TOP).float().softmax(-1),
        "up": up * 0.3,
        "down": (rand(E, INNER, K) if transposed else rand(E, K, INNER)) * 0.3,
        "up_bias": rand(E, columns) if biased else None,
        "down_bias": rand(E, K) if biased else None,
        "out": torch.empty(tokens, K, dtype=dtype),
        "activation": activation,
        "gated": gated,
        "interleaved": interleaved,
        "transposed": transposed,
        "alpha": alpha,
        "limit": limit,
    }


def expected(a: dict[str, Any]) -> torch.Tensor:
    rows = []
    for x, index, weight in zip(a["x"].double(), a["index"], a["weight"].double(), strict=True):
        total = torch.zeros(K, dtype=torch.float64)
        for e, w in zip(index.tolist(), weight, strict=True):
            if e >= E:
                continue
            up, down = a["up"][e].double(), a["down"][e].double()
            h = x @ up if a["transposed"] else up @ x
            if a["up_bias"] is not None:
                h = h + a["up_bias"][e]
            if not a["gated"]:
                h = F.relu(h).square()
            else:
                gate, lift = (h[::2], h[1::2]) if a["interleaved"] else h.chunk(2)
                if a["limit"]:
                    gate, lift = gate.clamp(max=a["limit"]), lift.clamp(-a["limit"], a["limit"])
                h = (lift + 1) * gate * torch.sigmoid(a["alpha"] * gate) if a["alpha"] else F.silu(gate) * lift
            y = h @ down if a["transposed"] else down @ h
            total += w * (y if a["down_bias"] is None else y + a["down_bias"][e])
        rows.append(total)
    return torch.stack(rows)


FORMS = [
    {},
    {"transposed": True, "biased": True, "interleaved": True, "alpha": 1.702, "limit": 1.0},
    {"gated": False, "activation": "relu2"},
    {"limit": 0.5},
]


@pytest.mark.parametrize("form", FORMS, ids=["plain", "gpt_oss", "ungated", "clamped"])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_all_ways_agree(form: dict[str, Any], tokens: int) -> None:
    a = arguments(tokens, **form)
    torch.ops.torchweave.experts(*a.values())
    torch.testing.assert_close(a["out"].double(), expected(a), atol=1e-4, rtol=1e-4)
    names = ("activation", "gated", "interleaved", "transposed", "alpha", "limit")
    tensors = [value for key, value in a.items() if key not in (*names, "out")]
    for way in (ops._dense, ops._grouped):
        out = torch.empty_like(a["out"])
        way(*tensors, out, tuple(a[name] for name in names))
        torch.testing.assert_close(out.double(), expected(a), atol=1e-4, rtol=1e-4, msg=way.__name__)


def test_experts_of_another_rank_add_nothing() -> None:
    a = arguments(9)
    a["index"][::2, 1] = E + 3
    torch.ops.torchweave.experts(*a.values())
    torch.testing.assert_close(a["out"].double(), expected(a), atol=1e-4, rtol=1e-4)


def test_opcheck() -> None:
    for form in FORMS:
        torch.library.opcheck(ops.experts, tuple(arguments(5, **form).values()))
