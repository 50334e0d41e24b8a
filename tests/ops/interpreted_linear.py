"""Run by test_linear with TRITON_INTERPRET=1: every kernel against float64, with odd sizes, strided rows and all that is fused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch

from torchweave.ops.linear import LinearFusion, run
from torchweave.ops.linear_config import LinearConfig

CONFIGS = (
    LinearConfig("row", 4, 64, 4, 2),
    LinearConfig("row", 8, 256, 4, 1),
    LinearConfig("dot", 16, 64, 4, 2),
    LinearConfig("split", 16, 32, 4, 2),
)
EPS = 1e-3


def around_of(kind: str, tokens: int, outputs: int, width: int) -> LinearFusion:
    """What a letter stands for: b bias, n norm as Llama's, w norm as Gemma's, r residual, a another addend, g gate, h the other
    gate, x a factor of the input, f one of some columns, v one of each column."""
    bias = torch.randn(outputs) if "b" in kind else None
    norm = torch.rand(width) if set(kind) & {"n", "w"} else None
    activation = "silu" if "g" in kind else "gelu_tanh" if "h" in kind else None
    columns = outputs // 2 if activation else outputs
    residual = torch.randn(tokens, columns + 5)[:, :columns] if "r" in kind else None
    addend = torch.randn(tokens, columns + 5)[:, :columns] if "a" in kind else None
    fusion = LinearFusion(
        bias, norm, EPS, 1.0 if "w" in kind else 0.0, "w" in kind, residual, activation, addend=addend
    )
    scaling: dict[str, Any] = {"input_factor": 1.25 if "x" in kind else 1.0}
    if "f" in kind:
        scaling |= {"factor": 0.3, "begin": outputs // 2, "end": outputs - 1}
    if "v" in kind:
        scaling["factors"] = torch.rand(outputs)
    return replace(fusion, **scaling)


def expected_of(x: torch.Tensor, w: torch.Tensor, fusion: LinearFusion) -> torch.Tensor:
    x, w = x.double(), w.double()
    if fusion.norm is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (fusion.norm.double() + fusion.offset)
    y = x * fusion.input_factor @ w.T + (0 if fusion.bias is None else fusion.bias.double())
    if fusion.factors is not None:
        y = y * fusion.factors
    y[:, fusion.begin : fusion.end or None] *= fusion.factor
    if fusion.activation is not None:
        gate, up = y.chunk(2, -1)
        act = (
            torch.nn.functional.silu
            if fusion.activation == "silu"
            else lambda v: torch.nn.functional.gelu(v, approximate="tanh")
        )
        y = act(gate) * up
    if fusion.addend is not None:
        y = y + fusion.addend.double()
    return y if fusion.residual is None else y + fusion.residual.double()


def check(config: LinearConfig, tokens: int, outputs: int, width: int, kind: str) -> None:
    x, w = torch.randn(tokens, width), torch.randn(outputs, width + 8)[:, :width] / width**0.5
    fusion = around_of(kind, tokens, outputs, width)
    columns = outputs // 2 if fusion.activation else outputs
    out = torch.full((tokens, columns + 3), torch.nan)[:, :columns]
    run(config, x, w, out, fusion)
    torch.testing.assert_close(out.double(), expected_of(x, w, fusion), rtol=1e-5, atol=1e-4)


def main() -> None:
    torch.manual_seed(0)
    for config in CONFIGS:
        for tokens in (1, 2, 3) if config.kernel == "row" else (1, 17):
            for outputs, width in ((38, 72),):
                for kind in ("", "b"):
                    check(config, tokens, outputs, width, kind)
        for tokens, kind in product((1, 4), ("n", "r", "g", "wbh", "bngr", "xv", "nxfr", "fg", "far")):
            check(config, tokens, 38, 72, kind)


if __name__ == "__main__":
    main()
