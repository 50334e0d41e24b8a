"""gated_attention: attention multiplies its result by the gate, in real decoders; near misses; kernels that remain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweave.compiler import compile_graph
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.passes.base import PassResult
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.torch_ir.fp8_attention import Fp8Attention
from torchweave.compiler.passes.torch_ir.gated_attention import GatedAttention
from torchweave.compiler.passes.torch_ir.merge_linears import MergeLinears
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import DynamicShapes, TorchCompileConfig
from torchweave.models import load
from torchweave.ops.attention.op import attention
from torchweave.ops.quant.fp8 import FP8, GROUP, fp8_quant
from torchweave.report import Report
from torchweave.verify import zoo

ATTENTION = {"torchweave::attention"}
PASS = GatedAttention(devices=("cpu",))
FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)
DYNAMIC = {"x": {0: "T"}}
GATE = 18
"""Position of the gate in the op's arguments."""


def times_sigmoid(y: Tensor, gate: Tensor) -> Tensor:
    return y * torch.sigmoid(gate)


def functional_first(y: Tensor, gate: Tensor) -> Tensor:
    return F.sigmoid(gate) * y


def by_method(y: Tensor, gate: Tensor) -> Tensor:
    return y * gate.sigmoid()


class Layer(nn.Module):
    """An attention with 4 query heads, 2 key heads of 16 numbers, and a gate.

    interleaved: each head of the first projection is a query and its gate (Qwen 3-Next); else the gate follows the queries (AFMoE).
    by_heads: the gate multiplies heads (HRM), else their concatenation.
    """

    def __init__(
        self,
        gated: Callable[[Tensor, Tensor], Tensor] = times_sigmoid,
        interleaved: bool = True,
        by_heads: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.gated, self.interleaved, self.by_heads = gated, interleaved, by_heads
        self.product, self.output = nn.Linear(32, 192, dtype=dtype), nn.Linear(64, 32, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        both, k, v = self.product(x[None]).split([128, 32, 32], -1)
        if self.interleaved:
            q, gate = both.view(1, tokens, -1, 32).chunk(2, -1)
        else:
            q, gate = (half.view(1, tokens, -1, 16) for half in both.split([64, 64], -1))
        k, v = (each.view(tokens, -1, 16) for each in (k, v))
        if not self.by_heads:
            gate = gate.reshape(1, tokens, -1)
        out = torch.empty(tokens, 4, 16, dtype=q.dtype, device=q.device)
        torch.ops.torchweave.attention(q[0], k, v, out, 0, 0.25)
        y = out.unsqueeze(0)
        if not self.by_heads:
            y = y.reshape(1, tokens, -1).contiguous()
        return self.output(self.gated(y, gate).reshape(tokens, -1))


def rewritten(layer: nn.Module, mode: DynamicShapes = "backed_size_oblivious") -> tuple[PassResult, Any]:
    (weight, *_) = layer.parameters()
    graph = capture(layer.requires_grad_(False), {"x": torch.randn(9, 32).to(weight.dtype)}, DYNAMIC, mode)
    result = run_pass(PASS, graph, debug=True)
    (node,) = (node for node in graph.graph.nodes if "attention" in str(node.target))
    return result, node


LAYERS = {
    "interleaved": Layer(),
    "float32": Layer(dtype=torch.float32),
    "sigmoid first": Layer(functional_first),
    "method": Layer(by_method),
    "behind queries": Layer(interleaved=False),
    "heads": Layer(by_heads=True),
    "heads behind queries": Layer(functional_first, interleaved=False, by_heads=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gated_attention_fires_once_and_is_exact(name: str) -> None:
    layer = LAYERS[name]
    result, node = rewritten(layer)
    assert result.matches == 1 and result.rewritten >= 2 and not result.near_misses
    gate = node.args[GATE].meta["example_value"]
    assert list(map(str, gate.shape[1:])) == ["4", "16"] and gate.stride(-1) == 1 and gate.stride(0) == 192
    (weight, *_) = layer.parameters()
    given = {"x": torch.randn(9, 32).to(weight.dtype)}
    compiled_graph = compile_graph(layer, given, DYNAMIC, boundary_ops=ATTENTION, config=FX, passes=(PASS,))
    for tokens in (1, 2, 7, 64):
        x = torch.randn(tokens, 32).to(weight.dtype)
        got = compiled_graph(call_op, x)
        if x.dtype == torch.bfloat16:
            assert got.equal(layer(x))
        else:  # a CPU's sigmoid of strided numbers differs in the last bit
            torch.testing.assert_close(got, layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["backed", "unbacked"])
def test_gated_attention_in_every_mode_of_dynamic_shapes(mode: DynamicShapes) -> None:
    assert rewritten(Layer(), mode)[0].matches == 1


def test_no_kernel_copies_or_multiplies_by_the_gate() -> None:
    """Inductor's kernels around attention: the copy of the gate and the product before, none behind."""
    layer = Layer(dtype=torch.float32).requires_grad_(False)
    config = TorchCompileConfig(compile_cache=False)
    counts = []
    for passes in ((), (PASS,)):
        built = compile_graph(
            layer, {"x": torch.randn(9, 32)}, DYNAMIC, boundary_ops=ATTENTION, config=config, passes=passes
        )
        counts.append([piece.code.count("= async_compile.") for piece in built.built.values()])
        x = torch.randn(7, 32)
        torch.testing.assert_close(built(call_op, x), layer(x), rtol=1e-5, atol=1e-6)
    assert counts == [[1, 1], [0, 0]]


def also_read(y: Tensor, gate: Tensor) -> Tensor:
    return y * torch.sigmoid(gate) + y


def one_for_each_token(y: Tensor, gate: Tensor) -> Tensor:
    return y * torch.sigmoid(gate[..., :1])


def in_float32(y: Tensor, gate: Tensor) -> Tensor:
    return (y * torch.sigmoid(gate.float())).to(y.dtype)


def written(y: Tensor, gate: Tensor) -> Tensor:
    gate.mul_(2.0)
    return y * torch.sigmoid(gate)


def from_the_result(y: Tensor, gate: Tensor) -> Tensor:
    return y * torch.sigmoid(gate + 1.0)


def rows_of_heads(y: Tensor, gate: Tensor) -> Tensor:
    return y.view(-1, 16) * torch.sigmoid((gate + 0).view(-1, 16))


def tanh(y: Tensor, gate: Tensor) -> Tensor:
    return y * torch.tanh(gate)


@pytest.mark.parametrize(
    ("gated", "by_heads", "why"),
    [
        (also_read, False, None),
        (one_for_each_token, False, "the product broadcasts"),
        (in_float32, False, "its gate is torch.float32 and its result torch.bfloat16"),
        (written, True, "writes to its gate"),
        (from_the_result, False, "its gate is computed after attention"),
        (rows_of_heads, False, "which is not by heads"),
        (tanh, False, "not a sigmoid"),
    ],
)
def test_near_misses_are_left_alone(gated: Any, by_heads: bool, why: str | None) -> None:
    layer = Layer(gated, by_heads=by_heads)
    result, node = rewritten(layer)
    assert result.matches == 0 and len(node.args) == 6
    assert [why in miss.why for miss in result.near_misses] == ([True] if why else [])
    given = {"x": torch.randn(9, 32, dtype=torch.bfloat16)}
    compiled_graph = compile_graph(layer, given, DYNAMIC, boundary_ops=ATTENTION, config=FX, passes=(PASS,))
    assert compiled_graph(call_op, given["x"]).equal(layer(given["x"]))


def test_gated_attention_runs_on_gpus_only() -> None:
    graph = capture(Layer().requires_grad_(False), {"x": torch.randn(9, 32).bfloat16()}, DYNAMIC, "backed")
    assert GatedAttention().run(graph) == PassResult()


class QuantizedLayer(Layer):
    """The result, gated, in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Identity()
        self.register_buffer("scale", torch.tensor([0.01]))

    def forward(self, x: Tensor) -> Tensor:
        q, _ = torch.ops.torchweave.fp8_quant(super().forward(x), 0, self.scale)
        return q.float()


def test_fp8_attention_follows_the_gate() -> None:
    layer, given = QuantizedLayer().requires_grad_(False), {"x": torch.randn(9, 32, dtype=torch.bfloat16)}
    report = Report(show=False)
    passes = (PASS, Fp8Attention())
    compiled_graph = compile_graph(
        layer, given, DYNAMIC, boundary_ops=ATTENTION, config=FX, passes=passes, report=report
    )
    assert [event["matches"] for event in report.select("pass")] == [1, 1]
    for tokens in (1, 7):
        x = torch.randn(tokens, 32, dtype=torch.bfloat16)
        assert compiled_graph(call_op, x).equal(layer(x))


@pytest.mark.parametrize("quantized", [False, True])
def test_the_op_itself_multiplies(quantized: bool) -> None:
    q, k, v, gate = (torch.randn(7, heads, 128).bfloat16() for heads in (4, 2, 2, 4))
    plain = torch.empty_like(q)
    attention(q, k, v, plain, 0, 0.1)
    right = plain * gate.sigmoid()
    if not quantized:
        out = torch.empty_like(q)
        attention(q, k, v, out, 0, 0.1, gate=gate)
        assert torch.equal(out, right)
        return
    out, written = torch.empty(7, 4, 128, dtype=FP8), torch.empty(4, 7)
    torch.ops.torchweave.attention_fp8(q, k, v, out, written, 0, 0.1, gate=gate)
    wanted, scale = fp8_quant(right.flatten(1), GROUP, None)
    assert torch.equal(out.flatten(1).float(), wanted.float()) and torch.equal(written, scale)


@pytest.mark.parametrize(("name", "starts"), [("qwen3_next", 2), ("afmoe", 1), ("hrm_text", 1)])
def test_real_decoders_gate_in_attention_cold_and_warm(name: str, starts: int, tmp_path: Path) -> None:
    module = load(zoo.zoo_model(name).config().to_dict(), torch.float32, load_format="dummy").module
    names = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}
    given = dict(zip(names, (torch.arange(3, 14), torch.arange(11), torch.tensor([3, 10])), strict=True))
    config, cache = TorchCompileConfig(enable_inductor=False), CompileCache(tmp_path, Report(show=False))
    boundary_ops = ATTENTION | {"torchweave::causal_conv", "torchweave::gated_delta"}
    gates: list[Tensor | None] = []

    def boundary(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if op is torch.ops.torchweave.attention.default:
            gates.append(args[GATE])
        op(*args, **kwargs)

    for source in ("dynamo", "cache")[:starts]:
        report = Report(show=False)
        cache.report = report
        how = {"config": config, "passes": (MergeLinears(), PASS), "cache": cache, "report": report}
        compiled_graph = compile_graph(module, given, names, boundary_ops=boundary_ops, **how)
        assert [event["source"] for event in report.select("capture")] == [source]
        event = next(event for event in report.select("pass") if event["name"] == PASS.name)
        assert event["matches"] == len(module.attention_layers) and not event["near_misses"]
        gates.clear()
        got = compiled_graph(boundary, *given.values())
        assert gates and all(gate is not None for gate in gates)
        torch.testing.assert_close(got, module(**given), rtol=1e-5, atol=1e-6)
