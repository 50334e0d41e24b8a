"""CUDA graph recordings equal plain runs at every size, full and piecewise, in one pool sized by the largest; pieces are cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.toy import BOUNDARY, DYNAMIC, step, toy
from torchweave.compiler import compile_graph, eager_forward
from torchweave.compiler.cache.store import CompileCache
from torchweave.compiler.runtime.cuda_graphs import GraphPool, Recording, record
from torchweave.compiler.runtime.forward import BoundaryHandler, call_op
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report

pytestmark = pytest.mark.gpu
SIZES = (1, 2, 7, 64, 257)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def on(device: torch.device, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


@pytest.fixture(scope="module", params=["inductor", "fx", "broken"])
def model(request: Any, device: torch.device) -> Any:
    module = toy(hidden=128).to(device)
    want = {size: module(*on(device, step(size, 3))) for size in SIZES}
    example = dict(zip(DYNAMIC, on(device, step(8, 2)), strict=True))
    if request.param == "broken":
        return eager_forward(module, BOUNDARY), want
    config = TorchCompileConfig(enable_inductor=request.param == "inductor")
    return compile_graph(
        module, example, DYNAMIC, boundary_ops=BOUNDARY, config=config, report=Report(show=False)
    ), want


def test_compiled_graph_equals_the_module(model: Any, device: torch.device) -> None:
    forward, want = model
    for size in SIZES:
        torch.testing.assert_close(forward(call_op, *on(device, step(size, 3))), want[size], rtol=1e-3, atol=1e-3)


def _record(
    forward: Any, size: int, capture_boundary_ops: bool, pool: GraphPool, device: torch.device
) -> tuple[Any, Recording[Tensor]]:
    buffers = on(device, step(size, 3, seed=9))
    run = lambda boundary: forward(boundary, *buffers)  # noqa: E731
    return buffers, record(
        run, call_op, capture_boundary_ops=capture_boundary_ops, pool=pool, debug=True, inputs=buffers
    )


@pytest.mark.parametrize("capture_boundary_ops", [True, False])
def test_replays_equal_plain_runs_at_every_size_in_any_order(
    model: Any, device: torch.device, capture_boundary_ops: bool
) -> None:
    forward, want = model
    pool = GraphPool(device)
    recordings = {
        size: _record(forward, size, capture_boundary_ops, pool, device) for size in sorted(SIZES, reverse=True)
    }
    assert all(recording.num_segments == (1 if capture_boundary_ops else 4) for _, recording in recordings.values())
    for size in (*SIZES, *reversed(SIZES)):
        buffers, recording = recordings[size]
        for buffer, values in zip(buffers, step(size, 3), strict=True):
            buffer.copy_(values)
        torch.testing.assert_close(recording.replay(), want[size], rtol=1e-3, atol=1e-3)


def test_smaller_sizes_reuse_the_pool_of_the_largest(model: Any, device: torch.device) -> None:
    pool = GraphPool(device)
    sizes = (2048, 1024, 512, 256, 1)
    recordings = [_record(model[0], size, False, pool, device)[1] for size in sizes]
    assert recordings[0].bytes > 0
    assert sum(recording.bytes for recording in recordings[1:]) <= 0.25 * recordings[0].bytes
    assert pool.num_bytes() >= recordings[0].bytes


def test_layers_reuse_memory_within_a_piecewise_recording(device: torch.device) -> None:
    """Tensors read by boundary ops are kept by address only: each further layer takes less than one layer's tensors."""
    grown = []
    for layers in (2, 8):
        module = toy(layers=layers, hidden=256).to(device)
        recording = _record(eager_forward(module, BOUNDARY), 4096, False, GraphPool(device), device)[1]
        grown.append(recording.bytes)
    assert grown[1] < 1.5 * grown[0]


def test_a_replay_launches_on_the_current_stream(device: torch.device) -> None:
    x, pool = torch.zeros(1 << 20, device=device), GraphPool(device)
    recording = record(lambda boundary: x + 1, call_op, capture_boundary_ops=True, pool=pool)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        x.fill_(4)
        result = recording.replay().clone()
    stream.synchronize()
    assert result.eq(5).all()


def test_tensors_outside_the_pool_are_kept_alive(device: torch.device) -> None:
    x, result = torch.zeros(1024, device=device), torch.zeros(1024, device=device)

    def run(boundary: BoundaryHandler, outside: list[Tensor]) -> Tensor:
        boundary("add", (x * 1, outside[0]), {})
        return result * 1

    held = [torch.full((1024,), 3.0, device=device)]
    recording = record(
        lambda boundary: run(boundary, held),
        lambda op, args, kwargs: result.copy_(args[0] + args[1]),
        capture_boundary_ops=False,
        pool=GraphPool(device),
    )
    held.clear()
    filler = [torch.full((1024,), -7.0, device=device) for _ in range(64)]
    x.fill_(1)
    assert recording.replay().eq(4).all() and len(filler) == 64


def test_an_error_while_recording_leaves_the_device_usable(device: torch.device) -> None:
    runs: list[int] = []

    def run(boundary: BoundaryHandler) -> Tensor:
        runs.append(1)
        y = torch.ones(4, device=device) + 1
        if len(runs) == 2:
            raise RuntimeError("stop")
        return y

    pool = GraphPool(device)
    with pytest.raises(RuntimeError, match="stop"):
        record(run, call_op, capture_boundary_ops=True, pool=pool)
    assert record(run, call_op, capture_boundary_ops=True, pool=pool).replay().eq(2).all()


def test_results_of_products_are_contiguous(device: torch.device) -> None:
    """A padded one would take its bias by a copy before the product."""
    module = nn.Sequential(nn.Linear(64, 1076), nn.GELU(), nn.Linear(1076, 64)).to(device, torch.bfloat16)
    example = {"input": torch.zeros(256, 64, device=device, dtype=torch.bfloat16)}
    compiled = compile_graph(module, example, report=Report(show=False))
    code = compiled.built[compiled.pieces[0].digest].code
    assert "(256, 1076), (1076, 1)" in code and "addmm" in code


def test_rows_in_registers_are_stored_in_the_cache(device: torch.device, tmp_path: Path) -> None:
    """A LayerNorm of a SigLIP layer: built once, then loaded, as at a warm start and on the other ranks."""
    module = nn.Sequential(nn.LayerNorm(1152), nn.ReLU()).to(device).requires_grad_(False)
    x = torch.randn(300, 1152, device=device)
    for built in ("inductor", "cache"):
        graph = compile_graph(
            module,
            {"input": x},
            {"input": {0: "T"}},
            config=TorchCompileConfig(),
            cache=CompileCache(tmp_path, Report(show=False)),
        )
        (piece,) = graph.built.values()
        assert piece.built == built and (built == "cache" or "persistent_reduction" in piece.code)
        torch.testing.assert_close(graph(call_op, x), module(x), rtol=1e-5, atol=1e-5)


def test_pieces_of_inductors_disk_cache_are_stored(device: torch.device, tmp_path: Path) -> None:
    """Kernels of such pieces have launchers before they are stored."""
    module = toy(hidden=192).to(device)
    example = dict(zip(DYNAMIC, on(device, step(8, 2)), strict=True))
    for folder, expected in (("first", {"miss", "stored"}), ("second", {"miss", "stored"}), ("second", {"hit"})):
        report = Report(show=False)
        forward = compile_graph(
            module,
            example,
            DYNAMIC,
            boundary_ops=BOUNDARY,
            config=TorchCompileConfig(),
            cache=CompileCache(tmp_path / folder, report),
            report=report,
        )
        cached = [event for event in report.select("cache") if event["entry"] == "piece"]
        assert {event["outcome"] for event in cached} == expected, (folder, cached)
        assert not any("not stored" in event.get("why", "") for event in cached), cached
        want = module(*on(device, step(7, 3)))
        torch.testing.assert_close(forward(call_op, *on(device, step(7, 3))), want, rtol=1e-3, atol=1e-3)
