"""Routers of every form that the op supports, as arguments of `torchweave::route` and as the models write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_V3 = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "group_best": 2, "fill": float("-inf")}
FORMS: dict[str, dict[str, Any]] = {
    "qwen3": {"score": "softmax", "renormalize": True, "dtype": torch.bfloat16},
    "olmoe": {"score": "softmax"},
    "gpt_oss": {"score": "chosen_softmax", "dtype": torch.bfloat16},
    "minimax": {"score": "sigmoid", "biased": True, "renormalize": True},
    "deepseek_v3": _V3 | {"biased": True, "renormalize": True, "epsilon": 1e-20, "scale": 2.5},
    "deepseek_v2": {"score": "softmax", "num_groups": 4, "top_groups": 2, "fill": 0.0, "scale": 16.0},
    "qwen3_next": {"score": "softmax", "renormalize": True, "shared": True, "gated": True, "dtype": torch.bfloat16},
    "glm4_moe": _V3 | {"biased": True, "renormalize": True, "scale": 2.5, "shared": True},
    "three_groups": _V3 | {"num_groups": 3, "top_groups": 1, "biased": True},
}
PLAIN: dict[str, Any] = {
    "num_groups": 1,
    "top_groups": 1,
    "group_best": 1,
    "fill": 0.0,
    "renormalize": False,
    "epsilon": 0.0,
    "scale": 1.0,
}
"""What a launch gets where a form does not say otherwise."""


def arguments(
    form: dict[str, Any], tokens: int, experts: int, top: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Keyword arguments of the op; no two scores of a token are equal."""
    generator = torch.Generator().manual_seed(tokens * experts + top)
    ranks = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    logits = (ranks - experts / 2) * (6.0 / experts) + torch.rand(tokens, 1, generator=generator)
    bias = torch.rand(experts, generator=generator) * 0.2 if form.get("biased") else None
    rest = {key: value for key, value in form.items() if key not in ("biased", "gated")}
    if form.get("gated"):
        rest["shared_gate"] = torch.randn(tokens, 1, generator=generator).to(dtype)
    return {"logits": logits.to(dtype), "bias": bias, "top_k": top, "dtype": torch.float32, **rest}


def dense(weights: Tensor, index: Tensor, experts: int) -> Tensor:
    """[T, E + 1] with each expert's weight, the shared one's last, independent of the order of the selected experts."""
    return torch.zeros(len(weights), experts + 1, dtype=torch.float64, device=weights.device).scatter(
        1, index, weights.double()
    )
