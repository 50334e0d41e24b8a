"""Formulas of norms and rotary embeddings as models write them, for the tests of passes that recognize them."""

from __future__ import annotations

import torch
from torch import Tensor

BF16 = torch.bfloat16


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * y.to(x.dtype)


def olmo_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight * y).to(x.dtype)


def helium_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight.to(torch.float32) * y).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * (1.0 + weight.float())).type_as(x)


def gemma4_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * weight.float()).type_as(x)


def gemma4_power_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.pow(y.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
    return (y * weight.float()).type_as(x)


NORMS = (llama_norm, olmo_norm, helium_norm, gemma_norm, gemma4_norm, gemma4_power_norm)


def rotate_half(x: Tensor) -> Tensor:
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), dim=-1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q `[1, H, T, D]`, k `[1, KH, T, D]`, cos and sin `[1, T, D]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotary_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Phi 3 and GPT-NeoX: cos and sin are `[1, T, R]`."""
    width = cos.shape[-1]
    q_turned, k_turned = rotary(q[..., :width], k[..., :width], cos, sin)
    return torch.cat([q_turned, q[..., width:]], dim=-1), torch.cat([k_turned, k[..., width:]], dim=-1)


def rotary_wide(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """OLMo 2: cos and sin are float32."""
    q_turned, k_turned = rotary(q, k, cos, sin)
    return q_turned.to(q.dtype), k_turned.to(k.dtype)


def rotary_each(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """With an `unsqueeze` for each projection."""
    return rotary(q, k, cos, sin)[0], rotary(q, k, cos, sin)[1]


def rotary_tokens_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gemma 4: q `[1, T, H, D]` and k rotate one after the other and are transposed afterwards."""
    rotated = [(x * cos.unsqueeze(2) + rotate_half(x) * sin.unsqueeze(2)).transpose(1, 2) for x in (q, k)]
    return rotated[0], rotated[1]


def rotary_chunks(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """gpt-oss: cos and sin are `[1, T, D / 2]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        low, high = torch.chunk(x, 2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    return rotated(q), rotated(k)


def heads(x: Tensor, dim: int = 16) -> Tensor:
    """`[1, T, H * dim]` as `[1, H, T, dim]`."""
    return x.view(1, x.shape[1], -1, dim).transpose(1, 2)
