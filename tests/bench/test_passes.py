"""`bench/compiler/passes.py`: the engine that it measures."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from torchweave.bench.protocol import Sizes


@pytest.mark.parametrize(("prompts", "longest"), [((), 160), ((32,), 160), ((512, 2048), 2048)])
def test_an_engine_has_room_for_every_size(prompts: tuple[int, ...], longest: int) -> None:
    spec = importlib.util.spec_from_file_location(
        "passes", Path(__file__).parents[2] / "bench" / "compiler" / "passes.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(script)
    sys.path[:] = path
    sizes = Sizes(batch_sizes=(1, 8), input_len=128, output_len=32, ttft_lens=prompts)
    arguments = Namespace(model="shape:llama-1b", num_kv_blocks=None, tensor_parallel_size=1, quantization=None)
    config = script.config_of(arguments, sizes, only_fx=False)
    assert config.max_model_len == longest + 1
    assert config.num_kv_blocks * 16 >= 8 * 161 + sum(prompts[-1:])
    assert config.torch_compile_config.enable_piecewise_cuda_graph is bool(prompts)
