"""linear_gelu: a GELU of the tanh formula behind a 16-bit linear becomes one op with it; others do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweave.compiler import compile_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.passes.torch_ir.linear_gelu import LinearGelu
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.ops.linear import linear_gelu
from torchweave.report import Report

PASS = LinearGelu(devices=("cpu",))
BF16 = torch.bfloat16


class Mlp(nn.Module):
    """A tower's MLP in one of several forms."""

    def __init__(self, form: str = "", dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.form = form
        self.up = nn.Linear(24, 40, bias=form != "no bias", dtype=dtype)
        self.down = nn.Linear(40, 24, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight * 2 if self.form == "computed weight" else self.up.weight
        hidden = F.linear(x, weight, self.up.bias)
        y = self.down(F.gelu(hidden, approximate="none" if self.form == "exact" else "tanh"))
        return y + hidden.sum(-1, keepdim=True) if self.form == "hidden is read" else y


@pytest.mark.parametrize("shape", [(5, 24), (1, 5, 24)])
def test_one_op_computes_both(shape: tuple[int, ...]) -> None:
    module, x = Mlp().requires_grad_(False), torch.randn(shape, dtype=BF16)
    expected, report = module(x), Report(show=False)
    config = TorchCompileConfig(enable_inductor=False, pass_numerics="tolerance")
    dynamic = {"x": {len(shape) - 2: "T"}}
    compiled = compile_graph(module, {"x": x}, dynamic, config=config, report=report, passes=(PASS,))
    (event,) = report.select("pass")
    assert (event["name"], event["matches"], event["rewritten"]) == ("linear_gelu", 1, 2)
    assert torch.equal(compiled(call_op, x), expected), "the reference is both calls"


def test_it_is_off_where_every_rounding_is_kept() -> None:
    module, x, report = Mlp().requires_grad_(False), torch.randn(5, 24, dtype=BF16), Report(show=False)
    config = TorchCompileConfig(enable_inductor=False)
    compile_graph(module, {"x": x}, {"x": {0: "T"}}, config=config, report=report, passes=(PASS,))
    assert not any(event["enabled"] and event["matches"] for event in report.select("pass"))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Mlp("exact"), "its GELU is not that of the tanh formula"),
        (Mlp("hidden is read"), "the linear has further readers"),
        (Mlp("no bias"), "its weight or bias is not a parameter"),
        (Mlp("computed weight"), "its weight or bias is not a parameter"),
        (Mlp(dtype=torch.float32), "its weight and bias are not contiguous and in 16 bits"),
    ],
    ids=lambda each: getattr(each, "form", None),
)
def test_others_stay_and_the_reason_is_told(module: Mlp, why: str) -> None:
    x = torch.zeros(5, 24, dtype=module.down.weight.dtype)
    graph = capture(module.requires_grad_(False), {"x": x}, {"x": {0: "T"}}, "backed_size_oblivious")
    result = PASS.run(graph)
    assert result.matches == 0 and [miss.why for miss in result.near_misses] == [why]


def test_op() -> None:
    x, w, bias = torch.randn(2, 3, 24), torch.randn(40, 24), torch.randn(40)
    torch.library.opcheck(linear_gelu, (x, w, bias))
    right = F.gelu(F.linear(x.double(), w.double(), bias.double()), approximate="tanh")
    torch.testing.assert_close(linear_gelu(x, w, bias).double(), right, rtol=1e-5, atol=1e-5)
