"""A small decoder in plain torch with a boundary op of its own, and example steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BOUNDARY = frozenset({"toy::attention"})
DYNAMIC = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}
SIZES = ((1, 1), (2, 1), (7, 3), (64, 7), (257, 5))


@torch.library.custom_op("toy::attention", mutates_args=("out",))
def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int = 0) -> None:
    """Causal attention over one sequence: q [T, H, D], k and v [T, KH, D], out [T, H, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1))


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, window: int = 0) -> None: ...


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, hidden: int, index: int, bias: bool) -> None:
        super().__init__()
        self.index, self.heads, self.kv_heads, self.head_dim = index, 4, 2, hidden // 4
        kv = self.kv_heads * self.head_dim
        self.norm_1, self.norm_2 = Norm(hidden), Norm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, width, bias=bias) for width in (hidden, kv, kv))
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.head_dim // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm_1(x)
        q = self.rotate(self.q(y).view(-1, self.heads, self.head_dim), cos, sin)
        k = self.rotate(self.k(y).view(-1, self.kv_heads, self.head_dim), cos, sin)
        v = self.v(y).view(-1, self.kv_heads, self.head_dim)
        out = torch.empty_like(q)
        torch.ops.toy.attention(q, k, v, out, self.index, scale=self.head_dim**-0.5)
        x = x + self.o(out.flatten(1))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Toy(nn.Module):
    """forward(input_ids [T], positions [T], logits_index [N]) -> logits [N, 96]."""

    def __init__(self, layers: int = 3, hidden: int = 64, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, hidden)
        self.layers = nn.ModuleList(Layer(hidden, index, bias) for index in range(layers))
        self.norm, self.head = Norm(hidden), nn.Linear(hidden, 96, bias=False)
        steps = torch.arange(0, hidden // 4, 2).float() / (hidden // 4)
        self.register_buffer("inv_freq", 10000.0**-steps, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
        x = self.embed(input_ids)
        angles = positions[:, None, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.head(self.norm(x)[logits_index])


def toy(seed: int = 0, **options: Any) -> Toy:
    torch.manual_seed(seed)
    return Toy(**options).eval().requires_grad_(False)


def step(tokens: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed + 1000 * tokens + rows)
    ids = torch.randint(0, 96, (tokens,), generator=draw)
    return ids, torch.arange(tokens), torch.randint(0, tokens, (rows,), generator=draw)


def example() -> dict[str, Tensor]:
    return dict(zip(DYNAMIC, step(8, 2), strict=True))
