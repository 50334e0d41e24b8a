"""Padding options: `enable_padding` for decode graphs, `max_padding_ratio` for graphs of mixed steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchweave.config.options import CudaGraphConfig, EngineConfig, TorchCompileConfig
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.engine.runner.recordings import Recordings

PLAIN = torch.zeros(1)


class FakeRecording:
    """A recorded graph that counts its replays."""

    def __init__(self, num_segments: int = 1) -> None:
        self.output, self.num_segments, self.replays = torch.ones(1), num_segments, 0

    def replay(self) -> None:
        self.replays += 1


def runner_of(config: EngineConfig, sizes: tuple[int, ...]) -> Any:
    """A runner with graphs of these sizes, whose plain launches compute nothing."""
    runner: Any = object.__new__(ModelRunner)
    runner.plan = SimpleNamespace(config=config)
    runner._min_size = 1
    runner.recordings = recordings = object.__new__(Recordings)
    recordings.decode = {size: FakeRecording() for size in sizes}  # type: ignore[misc]
    recordings.mixed = {size: FakeRecording(num_segments=2) for size in sizes}  # type: ignore[misc]
    recordings.rows_of = lambda tokens: tokens  # type: ignore[method-assign]
    plain = lambda *_: (lambda boundary: PLAIN, None)  # noqa: E731
    runner._programs = SimpleNamespace(decode=plain, mixed=plain)
    runner._buffers = SimpleNamespace(tokens=None, out=None)
    runner._upload_inputs = lambda step, rows, tokens, ring_index: None
    return runner


@pytest.mark.parametrize(("padding", "rows", "replayed"), [(True, 3, 4), (True, 4, 4), (False, 3, None), (False, 4, 4)])
def test_enable_padding_decides_whether_a_larger_decode_graph_is_replayed(
    padding: bool, rows: int, replayed: int | None
) -> None:
    runner = runner_of(EngineConfig("demo", cuda_graph_config=CudaGraphConfig(enable_padding=padding)), (1, 2, 4, 8))
    mode, output, *_ = runner._launch_decode(rows)
    assert mode == ("plain" if replayed is None else "decode_graph")
    assert (output is PLAIN) == (replayed is None)
    assert [size for size, graph in runner.recordings.decode.items() if graph.replays] == [replayed] * (
        replayed is not None
    )


@pytest.mark.parametrize(
    ("ratio", "tokens", "replayed"), [(2.0, 32, 64), (2.0, 31, None), (1.0, 63, None), (1.0, 64, 64)]
)
def test_max_padding_ratio_bounds_the_padding_of_a_mixed_step(ratio: float, tokens: int, replayed: int | None) -> None:
    config = EngineConfig("demo", torch_compile_config=TorchCompileConfig(max_padding_ratio=ratio))
    runner = runner_of(config, (16, 64))
    step = SimpleNamespace(num_tokens=tokens, num_rows=2, max_seq_len=tokens)
    mode, output, *_ = runner._launch_mixed(step, 0, {})
    assert mode == ("plain" if replayed is None else "piecewise_graph")
    assert (output is PLAIN) == (replayed is None)
    assert [size for size, graph in runner.recordings.mixed.items() if graph.replays] == [replayed] * (
        replayed is not None
    )
