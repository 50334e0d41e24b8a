"""Small mixtures of every form, and their sum over experts in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.moe.experts import ExpertForm, ExpertsCall

NUM_EXPERTS, WIDTH, INNER, TOP = 6, 32, 16, 2
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt_oss": {"transposed": True, "biased": True, "interleaved": True, "alpha": 1.702, "limit": 1.0},
    "transposed": {"transposed": True, "activation": "gelu_tanh"},
    "interleaved": {"interleaved": True, "biased": True, "activation": "gelu"},
    "ungated": {"gated": False, "activation": "relu2", "biased": True},
    "relu": {"gated": False, "activation": "relu"},
    "odd": {"width": 40, "inner": 24, "top": 3, "limit": 0.5},
    "shared": {"shared": True},
    "residual": {"residual": True, "biased": True},
    "shared_residual": {"shared": True, "residual": True},
}


def cases(
    tokens: int, *, transposed: bool = False, interleaved: bool = False, biased: bool = False, gated: bool = True,
    alpha: float = 0.0, limit: float = 0.0, dtype: torch.dtype = torch.float32, activation: str = "silu",
    num_experts: int = NUM_EXPERTS, width: int = WIDTH, inner: int = INNER, top: int = TOP, seed: int = 0,
    shared: bool = False, residual: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of `torchweave::experts`, in order."""
    generator = torch.Generator().manual_seed(tokens + seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    columns = 2 * inner if gated else inner
    scale = 1.7 / width**0.5
    up = rand(num_experts, width, columns) if transposed else rand(num_experts, columns, width)
    down = rand(num_experts, inner, width) if transposed else rand(num_experts, width, inner)
    routed = num_experts - shared
    index = torch.stack([torch.randperm(routed, generator=generator)[: top - shared] for _ in range(tokens)])
    return {
        "x": rand(tokens, width),
        "index": F.pad(index, (0, 1), value=routed) if shared else index,
        "weight": rand(tokens, top).float().softmax(-1),
        "up": up * scale,
        "down": down * scale,
        "up_bias": rand(num_experts, columns) if biased else None,
        "down_bias": rand(num_experts, width) if biased else None,
        "activation": activation,
        "gated": gated,
        "interleaved": interleaved,
        "transposed": transposed,
        "alpha": alpha,
        "limit": limit,
        "shared": shared,
        "residual": rand(tokens, width) if residual else None,
    }


def call_of(case: dict[str, Any]) -> ExpertsCall:
    """The same arguments as the op passes them."""
    names = ("activation", "gated", "interleaved", "transposed", "alpha", "limit")
    tensors = [value for key, value in case.items() if key not in (*names, "shared", "residual")]
    form = ExpertForm(**{name: case[name] for name in names})
    out = torch.empty_like(case["x"])
    return ExpertsCall(*tensors, out, form, shared=case["shared"], residual=case["residual"])


def expected(call: ExpertsCall) -> Tensor:
    """The weighted sum, token by token, in float64."""
    rows = []
    for x, index, weight in zip(call.x.double(), call.index, call.weight.double(), strict=True):
        total = torch.zeros(call.out.shape[1], dtype=torch.float64, device=x.device)
        for e, share in zip(index.tolist(), weight, strict=True):
            if e < call.num_experts:
                total += share * _one(call, x, e)
        rows.append(total)
    result = torch.stack(rows)
    return result if call.residual is None else result + call.residual


def _one(call: ExpertsCall, x: Tensor, e: int) -> Tensor:
    form, up, down = call.form, call.up[e].double(), call.down[e].double()
    h = x @ up if form.transposed else up @ x
    if call.up_bias is not None:
        h = h + call.up_bias[e]
    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda z: F.relu(z) ** 2,
    }
    if not form.gated:
        h = act[form.activation](h)
    else:
        gate, lift = (h[::2], h[1::2]) if form.interleaved else h.chunk(2)
        if form.limit:
            gate, lift = gate.clamp(max=form.limit), lift.clamp(-form.limit, form.limit)
        h = (lift + 1) * gate * torch.sigmoid(form.alpha * gate) if form.alpha else act[form.activation](gate) * lift
    y = h @ down if form.transposed else down @ h
    return y if call.down_bias is None else y + call.down_bias[e]
