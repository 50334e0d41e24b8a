"""Run by test_linear with TRITON_INTERPRET=1: both kernels against float64, with odd sizes and strided rows."""

from __future__ import annotations

import torch

from torchweave.ops.linear import LinearConfig

CONFIGS = (LinearConfig("row", 4, 64, 4, 2), LinearConfig("row", 8, 256, 4, 1), LinearConfig("dot", 16, 64, 4, 2))


def main() -> None:
    torch.manual_seed(0)
    for config in CONFIGS:
        for tokens in (1, 2) if config.kernel == "row" else (1, 3, 16, 17):
            for outputs, width in ((32, 128), (37, 200), (5, 40)):
                for bias in (None, torch.randn(outputs)):
                    x, w = torch.randn(tokens, width), torch.randn(outputs, width + 8)[:, :width]
                    out = torch.full((tokens, outputs + 3), torch.nan)[:, :outputs]
                    config.run(x, w, bias, out)
                    expected = x.double() @ w.double().T + (0 if bias is None else bias.double())
                    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


if __name__ == "__main__":
    main()
