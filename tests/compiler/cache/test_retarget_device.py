"""Pieces compiled by one rank are retargeted to the GPUs of the others; nothing is run, so no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.codecache import FxGraphCache
from torch._inductor.triton_bundler import StaticallyLaunchedAutotuner, TritonBundle, TritonKernelArtifacts
from torch._subclasses import FakeTensor

from tests.compiler.toy import DYNAMIC, example, toy
from torchweave.compiler.cache.entries import deserialize_graph, serialize_graph
from torchweave.compiler.capture.capture import capture
from torchweave.compiler.codegen.inductor_artifact import retarget_code, retarget_on_load
from torchweave.compiler.ir.graph import CapturedGraph
from torchweave.compiler.ir.symbols import value


def test_code_is_retargeted_to_another_gpu_of_the_same_kind() -> None:
    code = (
        "with torch.cuda._DeviceGuard(1):\n    torch.cuda.set_device(1)\n    stream1 = get_raw_stream(1)\n"
        "    x = empty_strided((s1, 1), (1, 1), device='cuda:1')\n"
        "triton_meta={'device': DeviceProperties(type='cuda', index=1, multi_processor_count=132)}\n"
        "y = index=10; z = cuda:11; buf1 = f(1)"
    )
    retarget_on_load = retarget_code(code, 1, 0)
    for there in ("_DeviceGuard(0)", "set_device(0)", "get_raw_stream(0)", "'cuda:0'", "index=0, multi"):
        assert there in retarget_on_load
    assert "y = index=10; z = cuda:11; buf1 = f(1)" in retarget_on_load and "(s1, 1), (1, 1)" in retarget_on_load
    assert retarget_code(retarget_on_load, 0, 1) == code


def on_gpu(graph: CapturedGraph, index: int) -> CapturedGraph:
    """The graph with its devices changed to a GPU."""
    from torchweave.compiler.codegen.inductor_artifact import rename_device

    device = torch.device("cuda", index)
    for node in graph.graph.nodes:
        fake = value(node)
        if isinstance(fake, FakeTensor):
            node.meta["example_value"] = FakeTensor(fake.fake_mode, fake.to("meta"), device)
    rename_device(graph.graph, device)
    return graph


def test_captured_graph_is_retargeted_on_load() -> None:
    class Offsets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(4, device=x.device)

    for module, inputs, dynamic in (
        (Offsets(), {"x": torch.zeros(5, 4)}, {"x": {0: "T"}}),
        (toy(), example(), DYNAMIC),
    ):
        captured = on_gpu(capture(module, inputs, dynamic, "backed_size_oblivious"), 0)
        loaded = deserialize_graph(serialize_graph(captured), module, torch.device("cuda:1"))
        devices = {value(node).device for node in loaded.graph.nodes if isinstance(value(node), Tensor)}
        assert devices == {torch.device("cuda:1")}
        assert "cuda:0" not in str(loaded.graph) and "index=0" not in str(loaded.graph)


class Properties(NamedTuple):
    index: int  # type: ignore[assignment]


class Kernel:
    """The GPU of a launcher that Inductor pickled."""

    def __init__(self) -> None:
        self.device_props, self.triton_meta = Properties(0), {"device": 0, "cc": 90}
        self.compile_results = [SimpleNamespace(compile_meta={"device": 0})]


CODE = """
add = async_compile.triton('add', '''
device=DeviceProperties(type='cuda', index=0, cc=90)
''', device_str='cuda')
with torch.cuda._DeviceGuard(0):
    pass
"""


def test_kernels_and_launchers_are_retargeted_with_the_code(monkeypatch: Any) -> None:
    kernel, source = Kernel(), CODE.split("'''")[1]
    launcher = StaticallyLaunchedAutotuner(CompiledTritonKernels.key(source), "add", kernel)  # type: ignore[arg-type]
    bundle = TritonBundle([TritonKernelArtifacts("hash", 0, [])], [launcher])
    graph = SimpleNamespace(source_code=CODE, cache_key="key", _triton_bundle=bundle, device_idxs={0})
    loaded: list[Any] = []

    def load(graph: Any, *rest: Any) -> Any:
        loaded.append(graph)
        return graph, rest

    monkeypatch.setattr(FxGraphCache, "cache_hit_post_compile", staticmethod(load))
    with retarget_on_load(0, 0):
        FxGraphCache.cache_hit_post_compile(graph, {}, None)  # type: ignore[arg-type]
    assert loaded.pop().source_code == CODE
    with retarget_on_load(0, 3):
        FxGraphCache.cache_hit_post_compile(graph, {}, None)  # type: ignore[arg-type]
    assert FxGraphCache.cache_hit_post_compile is load, "the change ends with the block"
    (found,) = loaded
    assert found.source_code == retarget_code(CODE, 0, 3) != CODE
    assert found.cache_key != "key" and found.device_idxs == {3}
    assert [each.device for each in found._triton_bundle.kernel_artifacts] == [3]
    (launcher,) = found._triton_bundle.static_autotuners
    assert launcher.cache_key == CompiledTritonKernels.key(source.replace("index=0", "index=3"))
    assert (
        kernel.device_props.index
        == kernel.triton_meta["device"]
        == kernel.compile_results[0].compile_meta["device"]
        == 3
    )
    assert kernel.triton_meta["cc"] == 90
