"""Milliseconds of a decode step of a model with few layers: passes left out, and bytes that are prefetched, in turns.

    python bench/compiler/prefetch_in_turns.py shape:qwen3.5-35b-a3b 8 [seconds]
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.compiler.passes import compare, opened
from torchweave.bench.protocol import Sizes
from torchweave.config.options import EngineConfig, TorchCompileConfig
from torchweave.models import resolve
from torchweave.ops.kernels import prefetch

MIB = 1 << 20
NEW = ("experts_residual", "prefetch_weights", "conv_prefetch")
VARIANTS = [
    ("no prefetch", NEW[1:], 16), ("no prefetch_weights", NEW[1:2], 16), ("no conv_prefetch", NEW[2:], 16), ("8 MiB", (), 8),
    ("24 MiB", (), 24), ("none of the passes", NEW, 16), ("32 MiB", (), 32),
]  # fmt: skip


def main() -> None:
    model, layers, *rest = sys.argv[1:]
    end = time.monotonic() + float(rest[0] if rest else 70)
    resolve.SHAPES[model]["num_hidden_layers"] = int(layers)
    sizes = Sizes(batch_sizes=(1, 2), output_len=128, ttft_lens=(), repeats=1)
    config = EngineConfig(
        model=model, load_format="dummy", max_batch_size=2, num_kv_blocks=128,
        max_model_len=sizes.input_len + sizes.output_len + 1, enable_prefix_caching=False,
        torch_compile_config=TorchCompileConfig(enable_piecewise_cuda_graph=False),
    )  # fmt: skip
    prefetch.PREFETCH_BYTES = 16 * MIB
    with opened(config) as first:
        for name, disabled, size in VARIANTS:
            if time.monotonic() > end:
                break
            prefetch.PREFETCH_BYTES = size * MIB
            compiled = replace(config.torch_compile_config, disabled_passes=disabled)
            with opened(replace(config, torch_compile_config=compiled)) as other:
                print(name, json.dumps(compare(first, other, sizes, 7)), flush=True)


if __name__ == "__main__":
    main()
