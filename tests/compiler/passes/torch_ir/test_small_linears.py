"""small_linears: large half-precision linears of few tokens become `torchweave::linear`; others do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compiler.toy import BOUNDARY, DYNAMIC, Toy, example, step
from torchweave.compiler import CompileCache, CompiledGraph, compile_graph
from torchweave.compiler.cache.keys import piece_factors
from torchweave.compiler.cache.store import key_of
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.passes.base import PassResult
from torchweave.compiler.passes.manager import default_passes
from torchweave.compiler.passes.torch_ir.merge_linears import LINEAR, MergeLinears
from torchweave.compiler.passes.torch_ir.small_linears import SmallLinears
from torchweave.compiler.runtime.forward import call_op
from torchweave.config.options import DynamicShapes, TorchCompileConfig
from torchweave.ops.linear import linear
from torchweave.report import Report

OP = torch.ops.torchweave.linear.default
FX = TorchCompileConfig(enable_inductor=False)
PASSES = (MergeLinears(), SmallLinears(devices=("cpu",)))
SIZES = (1, 2, 7, 64)
BF16 = torch.bfloat16


class Half(Toy):
    """The small decoder with cos and sin in the weights' dtype, as in half-precision decoders."""

    def forward(self, input_ids: Tensor, positions: Tensor, logits_index: Tensor) -> Tensor:
        x = self.embed(input_ids)
        angles = positions[:, None, None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), -1)
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        return self.head(self.norm(x)[logits_index])


def decoder() -> Half:
    """Three layers with q/k/v [1536, 768] and gate/up [4608, 768] after merging and down [768, 2304] large; o [768, 768] and the
    head are small."""
    torch.manual_seed(0)
    return Half(hidden=768).to(BF16).eval().requires_grad_(False)


def targets(graph: CapturedGraph) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.target in (LINEAR, OP)]


def apply(
    module: nn.Module, *shape: int, dtype: torch.dtype = BF16, static: bool = False
) -> tuple[CapturedGraph, PassResult]:
    dynamic = {} if static else {"x": {len(shape) - 2: "T"}}
    graph = capture(
        module.requires_grad_(False), {"x": torch.zeros(*shape, dtype=dtype)}, dynamic, "backed_size_oblivious"
    )
    result = PASSES[1].run(graph)
    graph.graph.lint()
    return graph, result


class One(nn.Module):
    """One linear over x."""

    def __init__(
        self, form: str = "", rows: int = 1024, width: int = 1024, dtype: torch.dtype = BF16, bias: bool = False
    ) -> None:
        super().__init__()
        self.form = form
        self.one = nn.Linear(width, rows, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        w = self.one.weight
        if self.form == "computed weight":
            return F.linear(x, w * 2)
        if self.form == "computed bias":
            return F.linear(x, w, w[:, 0] + 1)
        if self.form == "batch":
            return F.linear(x.expand(2, *x.shape), w)
        if self.form == "keywords":
            return F.linear(x, weight=w, bias=self.one.bias)
        if self.form == "autocast":
            with torch.autocast("cpu", torch.float16):
                return self.one(x)
        return self.one(x)


@pytest.mark.parametrize(
    ("module", "shape"),
    [(One(), (5, 1024)), (One(bias=True), (1, 5, 1024)), (One("keywords", bias=True), (5, 1024))],
    ids=["2-d", "3-d with bias", "keywords"],
)
@pytest.mark.parametrize("mode", ["backed", "backed_size_oblivious", "unbacked"])
def test_it_fires_once_for_a_linear(module: One, shape: tuple[int, ...], mode: DynamicShapes) -> None:
    inputs = {"x": torch.zeros(shape, dtype=BF16)}
    graph = capture(module.requires_grad_(False), inputs, {"x": {len(shape) - 2: "T"}}, mode)
    assert targets(graph) == [LINEAR]
    result = PASSES[1].run(graph)
    assert (result.matches, result.rewritten, result.near_misses) == (1, 1, ())
    assert targets(graph) == [OP]
    assert PASSES[1].run(graph).matches == 0, "its own result must not match again"


@pytest.mark.parametrize(
    ("module", "dtype", "why"),
    [
        (One(dtype=torch.float32), torch.float32, "for float32 [1024, 1024] the op has no kernel but the BLAS"),
        (One(rows=24), BF16, "bfloat16 [24, 1024] the op has no kernel but the BLAS"),
        (One("computed weight"), BF16, "is computed"),
        (One("computed bias"), BF16, "is computed"),
        (One("batch"), BF16, "more than one dimension"),
        (One("autocast"), BF16, "another layout or dtype"),
    ],
    ids=["float32", "small", "computed weight", "computed bias", "batch", "autocast"],
)
def test_near_misses_are_unchanged_and_have_reasons(module: One, dtype: torch.dtype, why: str) -> None:
    graph, result = apply(module, 5, 1024, dtype=dtype)
    assert result.matches == 0 and targets(graph) == [LINEAR]
    (miss,) = result.near_misses
    assert why in miss.why


def test_a_fixed_number_of_tokens_and_an_unknown_argument_are_left_alone() -> None:
    graph, result = apply(One(), 5, 1024, static=True)
    assert targets(graph) == [LINEAR] and "token count is fixed at 5" in result.near_misses[0].why
    graph = capture(One().requires_grad_(False), {"x": torch.zeros(5, 1024, dtype=BF16)}, {"x": {0: "T"}}, "backed")
    (node,) = (node for node in graph.graph.nodes if node.target is LINEAR)
    node.kwargs = {"out": node.args[0]}
    result = PASSES[1].run(graph)
    assert targets(graph) == [LINEAR] and "unexpected argument out" in result.near_misses[0].why


def test_near_misses_of_one_reason_are_grouped() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = module

        def forward(self, x: Tensor) -> Tensor:
            return self.stack(x)

    _, result = apply(Stack(), 5, 64, dtype=torch.float32)
    assert len(result.near_misses) == 1 and result.near_misses[0].node.count(",") == 2


def test_by_default_only_gpus_count() -> None:
    graph = capture(One().requires_grad_(False), {"x": torch.zeros(5, 1024, dtype=BF16)}, {"x": {0: "T"}}, "backed")
    assert SmallLinears().run(graph) == PassResult() and targets(graph) == [LINEAR]


# -- in a decoder ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_and_without_op() -> tuple[CompiledGraph, CompiledGraph]:
    module = decoder()
    make = [
        compile_graph(
            module, example(), DYNAMIC, boundary_ops=BOUNDARY, config=FX, report=Report(show=False), passes=passes
        )
        for passes in (PASSES, PASSES[:1])
    ]
    return make[0], make[1]


def test_a_decoder_behind_merge_linears(with_and_without_op: tuple[CompiledGraph, CompiledGraph]) -> None:
    compiled_graph, plain = with_and_without_op
    event = compiled_graph.report.select("pass")[1]
    assert (event["name"], event["numerics"]) == ("small_linears", "exact")
    assert (event["matches"], event["ops_after"]) == (13, event["ops_before"]), "four in each of three layers, the head"
    assert not event["near_misses"]
    for tokens in SIZES:
        inputs = step(tokens, min(tokens, 3))
        assert torch.equal(compiled_graph(call_op, *inputs), plain(call_op, *inputs)), "on a CPU the op is F.linear"


def test_equal_layers_stay_equal_pieces(with_and_without_op: tuple[CompiledGraph, CompiledGraph]) -> None:
    with_op, without = ([piece.digest for piece in compiled_graph.pieces] for compiled_graph in with_and_without_op)
    assert (
        [with_op.index(digest) for digest in with_op] == [without.index(digest) for digest in without] == [0, 1, 1, 3]
    )
    assert not set(with_op) & set(without), "another pass list must give other pieces"


def test_the_lm_head_is_replaced() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(512, 4096, bias=False, dtype=BF16)

        def forward(self, x: Tensor, logits_index: Tensor) -> Tensor:
            return self.head(x[None][:, logits_index])[0]

    module = Head().requires_grad_(False)
    inputs = {"x": torch.zeros(5, 512, dtype=BF16), "logits_index": torch.zeros(3, dtype=torch.int64)}
    compiled_graph = compile_graph(module, inputs, {"x": {0: "T"}, "logits_index": {0: "N"}}, config=FX, passes=PASSES)
    assert compiled_graph.report.select("pass")[1]["matches"] == 1
    for rows in SIZES:
        x, index = torch.randn(64, 512).to(BF16), torch.arange(rows)
        assert torch.equal(compiled_graph(call_op, x, index), module(x, index))


def test_pass_list_and_switch() -> None:
    merge, small = (each for each in default_passes() if each.name in ("merge_linears", "small_linears"))
    assert (merge.name, small.name) == ("merge_linears", "small_linears"), "merged weights are larger"
    assert isinstance(small, SmallLinears) and small.devices == {"cuda"} and small.token_range == (None, None)
    config = TorchCompileConfig(enable_inductor=False, disabled_passes=("small_linears",))
    compiled_graph = compile_graph(
        One().requires_grad_(False),
        {"x": torch.zeros(5, 1024, dtype=BF16)},
        {"x": {0: "T"}},
        config=config,
        passes=PASSES,
    )
    assert compiled_graph.report.select("pass")[1] == {
        **compiled_graph.report.select("pass")[1],
        "name": "small_linears",
        "enabled": False,
    }


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_pass_list_changes_piece_keys_but_not_graph_keys(tmp_path: Path) -> None:
    """The cache holds the graph as captured, and passes run at each start; the rewritten piece is the key of its build."""
    cache, keys = CompileCache(tmp_path / "cache", Report(show=False)), []
    for passes in (PASSES[:1], PASSES):
        report = cache.report = Report(show=False)
        module, inputs = One().requires_grad_(False), {"x": torch.zeros(5, 1024, dtype=BF16)}
        compiled_graph = compile_graph(
            module, inputs, {"x": {0: "T"}}, config=FX, cache=cache, report=report, passes=passes
        )
        keys.append(key_of("piece", piece_factors(compiled_graph.pieces[0], FX, torch.device("cpu"))))
    assert report.select("capture")[0]["source"] == "cache" and report.select("pass")[1]["matches"] == 1
    assert keys[0] != keys[1]


# -- with Inductor -----------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Arguments of the op's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is OP:
            self.inputs.append(args[0])
        return func(*args, **(kwargs or {}))


class Views(nn.Module):
    """Linears over an input, a strided part of it, its transpose, and something computed."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.part = (nn.Linear(width, 1024, bias=width == 1024, dtype=BF16) for width in (2048, 1024))
        self.turned, self.last = (nn.Linear(1024, 1024, bias=False, dtype=BF16) for _ in range(2))

    def forward(self, x: Tensor, turned: Tensor) -> Tensor:
        part = self.part(x[:, 1024:])
        y = self.whole(x[None])[0] * F.silu(part) + self.turned(turned.t())
        return self.last(y * 0.125)


def test_inductor_calls_the_op_without_copying_its_input(tmp_path: Path) -> None:
    module = Views().requires_grad_(False)
    inputs = {"x": torch.zeros(5, 2048, dtype=BF16), "turned": torch.zeros(1024, 5, dtype=BF16)}
    dynamic = {"x": {0: "T"}, "turned": {1: "T"}}
    cache = CompileCache(tmp_path / "cache", Report(show=False))
    for built in ("inductor", "cache"):
        report = cache.report = Report(show=False)
        compiled_graph = compile_graph(module, inputs, dynamic, cache=cache, report=report, passes=PASSES)
        assert report.select("pass")[1]["matches"] == 4
        assert [event["built"] for event in report.select("piece")] == [built]
        for tokens in SIZES:
            x, turned = torch.randn(tokens, 2048).to(BF16), torch.randn(1024, tokens).to(BF16)
            with Calls() as seen:
                got = compiled_graph(call_op, x, turned)
            torch.testing.assert_close(got, module(x, turned), rtol=2e-2, atol=2e-2)
            where = {(each.data_ptr(), each.stride()[-2:], each.shape[-1]) for each in seen.inputs}
            assert len(seen.inputs) == 4
            assert {
                (x.data_ptr(), (2048, 1), 2048),
                (x.data_ptr() + 2 * 1024, (2048, 1), 1024),
                (turned.data_ptr(), (1, tokens), 1024),
            } < where, "an input was copied"


@pytest.mark.parametrize("form", ["rows", "part", "transpose", "3-d part", "one"])
def test_opcheck_on_views(form: str) -> None:
    x = torch.randn(6, 48)
    x = {"rows": x[:, :16].contiguous(), "part": x[:, 16:32], "transpose": torch.randn(16, 6).t(), "3-d part": x[None, :, 16:32],
         "one": x[:1, :16]}[form]  # fmt: skip
    w = torch.randn(8, 16)
    torch.library.opcheck(linear, (x, w, torch.randn(8)))
    assert torch.equal(linear(x, w), F.linear(x, w))


def test_importing_the_pass_imports_no_kernels() -> None:
    code = "import sys, torchweave.compiler.passes.manager; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
