"""Run by test_low_rank with TRITON_INTERPRET=1: the kernels against float64; rows without an adapter keep their bits."""

from __future__ import annotations

import torch

from torchweave.ops.kernels.low_rank import launch
from torchweave.ops.low_rank import low_rank


def main() -> None:
    torch.manual_seed(0)
    for tokens, inputs, outputs, rank, dtype in (
        (5, 40, 24, 4, torch.float32), (3, 300, 530, 12, torch.float16), (1, 16, 7, 1, torch.float32),
    ):  # fmt: skip
        merged = torch.randn(tokens, 2 * outputs, dtype=torch.float64).to(dtype)
        x, y = torch.randn(tokens, inputs, dtype=torch.float64).to(dtype), merged[:, outputs:]
        a, b = (
            torch.randn(3, *shape, dtype=torch.float64).to(dtype) * 0.1 for shape in ((rank, inputs), (outputs, rank))
        )
        index = torch.tensor([3, 0, 1, 2, 3, 1], dtype=torch.int32)
        exact = y.double()
        for row in range(tokens):
            if index[row]:
                exact[row] += b[index[row] - 1].double() @ (a[index[row] - 1].double() @ x[row].double())
        bound = {"rtol": 2**-21, "atol": 2**-18} if dtype == torch.float32 else {"rtol": 2**-10, "atol": 2**-12}
        for function in (launch, low_rank):
            got = function(y[None], x[None], index, a, b)
            assert got.shape == (1, tokens, outputs) and got.is_contiguous() and got.dtype == dtype
            torch.testing.assert_close(got[0].double(), exact, **bound)
            base = index[:tokens] == 0
            assert torch.equal(got[0][base], y[base])
    assert launch(y[:0], x[:0], index, a, b).shape == (0, outputs)


if __name__ == "__main__":
    main()
