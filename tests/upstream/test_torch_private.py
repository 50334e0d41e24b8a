"""Assumptions about private parts of torch, one test each, so that an upgrade names the broken one."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.toy import BOUNDARY, DYNAMIC, example, toy
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.codegen.pieces import build_inductor, compiled_fx_graph, inductor_options
from torchweave.compiler.ir.mutation import storage_id
from torchweave.compiler.ir.symbols import value
from torchweave.compiler.partition.split import Piece, split
from torchweave.compiler.passes.torch_ir.merge_linears import LINEAR
from torchweave.config.options import TorchCompileConfig


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": torch.relu(self.linear(x)), "x": x * 2}


def _capture() -> Any:
    import torch._dynamo as dynamo
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    dynamo.reset()
    module, x = Small(), torch.zeros(5, 4)
    dynamo.mark_dynamic(x, 0)
    with torch.no_grad(), get_metrics_context(), dynamo_timed("test"):
        return module, x, fullgraph_capture(module, (x,))


def test_fullgraph_capture_gives_a_graph_with_sources() -> None:
    _, _, captured = _capture()
    placeholders = [node for node in captured.backend_input.graph_module.graph.nodes if node.op == "placeholder"]
    assert all(hasattr(node, "_dynamo_source") or "grapharg" in node.meta for node in placeholders)
    assert captured.graph_capture_output.traced_code and isinstance(captured.graph_capture_output.import_sources, dict)


def test_capture_bytecode_runs_on_placeholders() -> None:
    module, x, captured = _capture()
    marks = (torch.empty(0), torch.empty(1))
    result = captured.forward_callable(compiled_fn=lambda *args: marks)(module, x)
    assert {key: [mark is tensor for mark in marks] for key, tensor in result.items()} == {
        "y": [True, False],
        "x": [False, True],
    }


def test_nn_linear_is_recorded_as_the_builtin() -> None:
    _, _, captured = _capture()
    assert any(node.target is LINEAR for node in captured.backend_input.graph_module.graph.nodes)


def test_mark_unbacked_takes_a_shape_id() -> None:
    from torch._dynamo.decorators import mark_unbacked

    assert {"shape_id", "hint_override"} <= set(inspect.signature(mark_unbacked).parameters)


def test_views_of_fake_tensors_share_a_storage_identity() -> None:
    graph = capture(toy(1), example(), DYNAMIC, "backed_size_oblivious")
    views = [node for node in graph.graph.nodes if node.op == "call_method" and node.target in ("view", "flatten")]
    assert views and all(storage_id(node) == storage_id(node.all_input_nodes[0]) for node in views)
    assert len({storage_id(node) for node, _ in graph.constants()}) == len(list(graph.constants()))


def test_the_shape_environment_keeps_guards_and_replacements() -> None:
    graph = capture(toy(1), example(), DYNAMIC, "backed_size_oblivious")
    shape_env = graph.fake_mode.shape_env
    assert any("Eq" in str(guard.expr) for guard in shape_env.guards), "ids and positions were found equal"
    assert all(str(shape_env.replace(guard.expr)) == "True" for guard in shape_env.guards if "Eq" in str(guard.expr))


def test_inductor_innermost_function_consumes_its_argument_list() -> None:
    graph = capture(toy(1), example(), DYNAMIC, "backed_size_oblivious")
    graph.boundary_ops = BOUNDARY
    last = split(graph)[-1]
    built = build_inductor(last, TorchCompileConfig())
    assert compiled_fx_graph(built.artifact).current_callable is built.call
    examples = [
        torch.zeros([5 if isinstance(size, torch.SymInt) else size for size in fake.shape], dtype=fake.dtype) + 1
        for fake in last.examples()
    ]
    args = list(examples)
    (inner,) = built.call(args)
    assert args == []
    torch.testing.assert_close(inner, built.artifact(*examples)[0], rtol=0, atol=0)
    torch.testing.assert_close(inner, last.module(*examples)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", sorted(inductor_options(TorchCompileConfig())))
def test_inductor_has_the_options_that_are_set(option: str) -> None:
    assert option in torch._inductor.config.get_config_copy()


def test_the_graph_pickler_keeps_symbols_and_custom_ops() -> None:
    import pickle

    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from torchweave.compiler.cache.entries import deserialize_graph, serialize_graph

    module = toy(1)
    graph = capture(module, example(), DYNAMIC, "backed_size_oblivious")
    pickled = pickle.loads(serialize_graph(graph))[0]
    table, rows, *_ = cast("Any", GraphPickler.loads(pickled, FakeTensorMode(shape_env=ShapeEnv())))
    assert len(rows) == len(graph.graph.nodes)
    operations = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert operations == {node.target for node in table.graph.nodes if node.op == "call_function"}
    again = deserialize_graph(serialize_graph(graph), module, torch.device("cpu"))
    assert [str(value(node)) for node in again.graph.nodes if isinstance(value(node), torch.SymInt)] == [
        str(value(node)) for node in graph.graph.nodes if isinstance(value(node), torch.SymInt)
    ]


def test_guards_of_a_deserialized_graph_name_the_cache_and_its_pieces_compile() -> None:
    from torchweave.compiler.cache.entries import deserialize_graph, serialize_graph

    module = toy(1)
    captured = capture(module, example(), DYNAMIC, "backed_size_oblivious")
    graph = deserialize_graph(serialize_graph(captured), module, torch.device("cpu"))
    graph.boundary_ops = frozenset(BOUNDARY)
    shapes = graph.fake_mode.shape_env
    sizes = [size for node in graph.placeholders() for size in value(node).shape if isinstance(size, torch.SymInt)]
    assert sizes[0] < 1000, "which is a guard"
    assert str(shapes.guards[-1].sloc) == "(a graph of the compile cache)"
    piece = next(part for part in split(graph) if isinstance(part, Piece))
    assert build_inductor(piece, TorchCompileConfig()).built == "inductor", (
        "Inductor writes guards out, and where they are from"
    )


def test_functional_calls_describe_views_of_mutated_arguments() -> None:
    from torch._higher_order_ops import auto_functionalize as functional

    names, types = functional.get_mutable_args(torch.ops.aten.add_.Tensor)
    assert names == ["self"]
    written = {"_self_base_index": 0, "_self_size": [2], "_self_stride": [3], "_self_storage_offset": 1, "other": 5}
    infos = functional.read_view_information_from_args(names, types, written, [torch.zeros(9)])
    assert isinstance(infos["self"], functional.AsStridedViewInfo) and list(written) == ["other"]
    assert (infos["self"].base_index, infos["self"].size, infos["self"].stride) == (0, [2], [3])
    sliced = {"_self_base_index": 0, "_self_slice_dim": 0, "_self_slice_start": 1, "_self_slice_end": 4}
    info = functional.read_view_information_from_args(names, types, sliced, [torch.zeros(9)])["self"]
    assert isinstance(info, functional.SliceViewInfo) and (info.dim, info.start, info.end) == (0, 1, 4)
    assert issubclass(functional.AliasViewInfo, functional.ViewInfo) and issubclass(
        functional.NotView, functional.ViewInfo
    )


def test_an_allocation_into_a_pool_is_ended_by_its_device_and_id() -> None:
    """As `torch.cuda.use_mem_pool` ends it."""
    assert "_cuda_endAllocateToPool(device_index, pool.id)" in inspect.getsource(torch.cuda.use_mem_pool)
    assert callable(torch._C._cuda_endAllocateToPool)
