"""rotary_attention: attention takes queries and keys before norm and rotation, in real decoders; near-misses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.passes.written import (
    BF16,
    gemma4_power_norm,
    gemma_norm,
    heads,
    helium_norm,
    llama_norm,
    olmo_norm,
    rotary,
    rotary_chunks,
    rotary_each,
    rotary_part,
    rotary_tokens_first,
    rotary_wide,
)
from torchweave.compiler import compile_graph
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.passes.base import PassResult
from torchweave.compiler.passes.manager import run_pass
from torchweave.compiler.passes.torch_ir.rotary_attention import RotaryAttention
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import DynamicShapes, TorchCompileConfig
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import zoo

ATTENTION = {"torchweave::attention"}
PASS = RotaryAttention(devices=("cpu",))
FX = TorchCompileConfig(enable_inductor=False, compile_cache=False)


class Layer(nn.Module):
    """An attention with 4 query heads, 2 key heads of 16 numbers."""

    def __init__(
        self, turn: Any, norm: Any = None, before: bool = True, dtype: torch.dtype = BF16, width: int = 16
    ) -> None:
        super().__init__()
        self.turn, self.norm, self.before, self.width = turn, norm, before, width
        self.product = nn.Linear(32, 128, dtype=dtype)
        self.q_weight, self.k_weight = (nn.Parameter(torch.rand(16).to(dtype) + 0.5) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.product(x[None]).split([64, 32, 32], -1)
        q, k = (self._normed(part, weight) for part, weight in ((q, self.q_weight), (k, self.k_weight)))
        q, k = self.turn(q, k, cos[None], sin[None])
        q, k, v = (part.squeeze(0).transpose(0, 1) for part in (q, k, heads(v)))
        out = torch.empty(q.shape[0], q.shape[1], 16, dtype=q.dtype, device=q.device)
        torch.ops.torchweave.attention(q, k, v, out, 0, 0.25)
        return out.flatten(1)

    def _normed(self, part: Tensor, weight: Tensor) -> Tensor:
        if self.turn is rotary_tokens_first:
            part = part.view(1, part.shape[1], -1, 16)
            return part if self.norm is None else self.norm(part, weight)
        if self.norm is None:
            return heads(part)
        if self.before:
            return self.norm(part.view(1, part.shape[1], -1, 16), weight).transpose(1, 2)
        return self.norm(heads(part), weight)


def inputs(layer: Layer, tokens: int = 9) -> dict[str, Tensor]:
    dtype = torch.float32 if layer.turn is rotary_wide else layer.q_weight.dtype
    angles = torch.randn(2, tokens, layer.width).to(dtype)
    return {"x": torch.randn(tokens, 32).to(layer.q_weight.dtype), "cos": angles[0], "sin": angles[1]}


DYNAMIC = {name: {0: "T"} for name in ("x", "cos", "sin")}


def rewritten(layer: Layer, mode: DynamicShapes = "backed_size_oblivious") -> tuple[PassResult, Any]:
    graph = capture(layer.requires_grad_(False), inputs(layer), DYNAMIC, mode)
    result = run_pass(PASS, graph, debug=True)
    (node,) = (node for node in graph.graph.nodes if "attention" in str(node.target))
    return result, node


LAYERS = {
    "plain": (Layer(rotary), 2),
    "float32": (Layer(rotary, dtype=torch.float32), 2),
    "part": (Layer(rotary_part, width=8), 2),
    "wide": (Layer(rotary_wide), 2),
    "chunks": (Layer(rotary_chunks, width=8), 2),
    "an unsqueeze for each": (Layer(rotary_each), 2),
    "tokens first": (Layer(rotary_tokens_first), 2),
    "tokens first, gemma 4 norm": (Layer(rotary_tokens_first, gemma4_power_norm), 7),
    "helium norm": (Layer(rotary, helium_norm), 7),
    "llama norm": (Layer(rotary, llama_norm), 7),
    "olmo norm": (Layer(rotary, olmo_norm), 7),
    "gemma norm": (Layer(rotary, gemma_norm, before=False), 7),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rotary_attention_fires_once_and_is_exact(name: str) -> None:
    layer, rotary_arguments = LAYERS[name]
    result, node = rewritten(layer)
    assert result.matches == 1 and result.rewritten >= 14 and not result.near_misses
    assert len(node.args) == 10 + rotary_arguments
    compiled_graph = compile_graph(layer, inputs(layer), DYNAMIC, boundary_ops=ATTENTION, config=FX, passes=(PASS,))
    for tokens in (1, 2, 7, 64):
        given = inputs(layer, tokens)
        assert compiled_graph(call_op, *given.values()).equal(layer(**given))


def test_in_place_writes_and_contexts_of_a_module_stay() -> None:
    class Writes(Layer):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            y = super().forward(x, cos, sin)
            y[:, :2] = 3.0
            y[:, 2:4].fill_(5.0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.mm(y.float(), y.float().t())

    layer = Writes(rotary).requires_grad_(False)
    report, given = Report(show=False), inputs(layer)
    compiled_graph = compile_graph(
        layer, given, DYNAMIC, boundary_ops=ATTENTION, config=FX, passes=(PASS,), report=report
    )
    assert report.select("pass")[0]["matches"] == 1
    assert compiled_graph(call_op, *given.values()).equal(layer(**given))


@pytest.mark.parametrize("mode", ["backed", "unbacked"])
def test_rotary_attention_in_every_mode_of_dynamic_shapes(mode: DynamicShapes) -> None:
    assert rewritten(Layer(rotary, llama_norm), mode)[0].matches == 1


def two_angles(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary(q, k, cos, sin)[0], rotary(q, k, cos * 2, sin)[1]


def swapped_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = [x * cos + torch.cat((x[..., 8:], x[..., :8]), dim=-1) * sin for x in (q, k)]
    return turned[0], turned[1]


@pytest.mark.parametrize(
    ("turn", "why"), [(two_angles, "rotate by different angles"), (swapped_halves, "not neg")], ids=["angles", "halves"]
)
def test_rotary_attention_names_near_misses(turn: Any, why: str) -> None:
    result, node = rewritten(Layer(turn))
    assert result.matches == 0 and len(node.args) == 6
    assert why in result.near_misses[0].why


def test_layers_share_the_angles_of_both_halves() -> None:
    module = load(zoo.zoo_model("gpt_oss").config().to_dict(), torch.float32, load_format="dummy").module
    given = {"input_ids": torch.arange(3, 14), "positions": torch.arange(11), "logits_index": torch.tensor([3, 10])}
    names = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}
    graph = capture(module, given, names, "backed_size_oblivious")
    assert run_pass(PASS, graph, debug=True).matches == len(module.attention_layers) > 1
    assert sum(node.target is torch.cat for node in graph.graph.nodes) == 2


def test_rotary_attention_is_for_devices_whose_kernels_rotate() -> None:
    layer = Layer(rotary)
    graph = capture(layer.requires_grad_(False), inputs(layer), DYNAMIC, "backed")
    assert RotaryAttention().run(graph) == PassResult()


@pytest.mark.parametrize(
    ("name", "norms", "starts"),
    [
        ("llama", False, 2),
        ("qwen3", True, 2),
        ("gemma3", True, 1),
        ("phi3", False, 1),
        ("olmo2", False, 1),
        ("gpt_oss", False, 1),
    ],
)
def test_real_decoders_rotate_in_attention_cold_and_warm(name: str, norms: bool, starts: int, tmp_path: Path) -> None:
    module = load(zoo.zoo_model(name).config().to_dict(), torch.float32, load_format="dummy").module
    names = {"input_ids": {0: "T"}, "positions": {0: "T"}, "logits_index": {0: "N"}}
    ids, index = torch.arange(3, 14), torch.tensor([3, 10])
    given = dict(zip(names, (ids, torch.arange(11), index), strict=True))
    config, cache = TorchCompileConfig(enable_inductor=False), CompileCache(tmp_path, Report(show=False))
    calls: list[tuple[Any, ...]] = []

    def boundary(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(args)
        op(*args, **kwargs)

    for source in ("dynamo", "cache")[:starts]:
        report = Report(show=False)
        cache.report = report
        how = {"config": config, "passes": (PASS,), "cache": cache, "report": report}
        compiled_graph = compile_graph(module, given, names, boundary_ops=ATTENTION, **how)
        assert [event["source"] for event in report.select("capture")] == [source]
        (event,) = report.select("pass")
        assert event["matches"] == len(module.attention_layers) and not event["near_misses"]
        calls.clear()
        got = compiled_graph(boundary, *given.values())
        assert all(args[10] is not None and (args[12] is not None) == norms for args in calls)
        assert got.equal(module(**given))
