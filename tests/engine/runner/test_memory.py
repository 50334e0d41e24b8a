"""KV cache sizing, and the error when too little memory is left."""

from __future__ import annotations

import pytest
import torch

from torchweave.config import AttentionFacts, DeviceFacts, ModelFacts, Plan, resolve
from torchweave.config.options import EngineConfig
from torchweave.engine.runner.memory import GIB, MemoryUse, blocks_that_fit, bytes_per_block
from torchweave.engine.startup.build import _with_cache_dtype
from torchweave.ops.attention.op import LayerSpec

LAYERS = [LayerSpec(num_kv_heads=8, head_dim=64, value_dim=64, num_heads=32)] * 16
USE = MemoryUse(total=80 * GIB, in_use=3 * GIB, activations=GIB, graphs=GIB)


def plan(device: str = "cuda:0", **options: object) -> Plan:
    config = EngineConfig(model="m", **options)  # type: ignore[arg-type]
    facts = DeviceFacts(device, "a device", (9, 0), (AttentionFacts("triton", 64), AttentionFacts("torch", 16)))
    return resolve(config, facts, ModelFacts("m", 131072, "bfloat16"))


def test_bytes_per_block_counts_keys_and_values_of_all_layers() -> None:
    assert bytes_per_block(LAYERS, 64, torch.bfloat16) == 64 * 16 * 8 * (64 + 64) * 2


def test_an_fp8_cache_holds_twice_as_many_blocks() -> None:
    block = bytes_per_block(LAYERS, 64, torch.bfloat16)
    kept = _with_cache_dtype(LAYERS, plan(kv_cache_dtype="fp8"))
    assert [layer.cache_dtype for layer in kept] == [torch.float8_e4m3fn] * 16
    assert bytes_per_block(kept, 64, torch.bfloat16) * 2 == block
    assert blocks_that_fit(plan(kv_cache_dtype="fp8"), block // 2, USE) // 2 == blocks_that_fit(plan(), block, USE)


def test_gpu_cache_takes_the_rest_of_gpu_memory_utilization() -> None:
    block = bytes_per_block(LAYERS, 64, torch.bfloat16)
    blocks = blocks_that_fit(plan(), block, USE)
    left = 80 * GIB * 0.9 - 5 * GIB
    assert left - 0.3 * GIB < blocks * block <= left
    more = blocks_that_fit(plan(gpu_memory_utilization=0.95), block, USE)
    assert abs((more - blocks) * block - 80 * GIB * 0.05) < 2 * block


def test_cache_is_not_larger_than_all_slots_can_use() -> None:
    small = plan(max_batch_size=2, max_model_len=640)
    assert blocks_that_fit(small, 1 << 20, USE) == 2 * 10


def test_num_kv_blocks_is_taken_as_asked() -> None:
    assert blocks_that_fit(plan(num_kv_blocks=77), 1 << 20, USE) == 77


def test_cpu_cache_size_comes_from_cpu_kv_cache_gib() -> None:
    assert blocks_that_fit(plan("cpu", cpu_kv_cache_gib=0.5), 1 << 20, None) == 512


@pytest.mark.parametrize(
    ("options", "use", "words"),
    [
        ({"gpu_memory_utilization": 0.05}, USE, "gpu_memory_utilization"),
        ({"max_model_len": 131072, "gpu_memory_utilization": 0.07}, USE, "one request of max_model_len=131072 needs"),
        ({"num_kv_blocks": 3, "max_model_len": 4096}, USE, "num_kv_blocks"),
    ],
)
def test_too_little_memory_gives_a_one_line_error_with_advice(options: dict, use: MemoryUse, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        blocks_that_fit(plan(**options), 1 << 20, use)
    text = str(error.value)
    assert text.endswith(".") and "GiB" in text and text.count(". ") == 0
