"""The whole engine on a GPU: CUDA graphs change no token, padding never leaks, memory is freed."""

from __future__ import annotations

import gc
import queue
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

from torchweave.config.options import CudaGraphConfig, EngineConfig, TorchCompileConfig
from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams
from torchweave.images import EncodedPrompt
from torchweave.models.load import load
from torchweave.report import Report

pytestmark = pytest.mark.gpu

SMALL = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def build(dtype: str = "float32", *, graphs: bool = True, compiled: bool = True, **options: Any) -> LLM:
    torch.manual_seed(0)
    loaded = load(SMALL, dtype, "cuda", "dummy")
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
    compile_config = TorchCompileConfig(
        enable_fullgraph=compiled,
        enable_inductor=compiled,
        enable_piecewise_cuda_graph=graphs,
        capture_num_tokens=(16, 64, 256),
        compile_cache=False,
        debug=True,
    )
    graph_config = options.pop("cuda_graph_config", CudaGraphConfig(max_batch_size=0 if graphs else -1))
    sizes = {"max_batch_size": 16, "max_num_tokens": 256, "num_kv_blocks": 400, "max_model_len": 1024} | options
    config = EngineConfig(
        model="small",
        dtype=dtype,  # type: ignore[arg-type]
        device="cuda",
        torch_compile_config=compile_config,
        cuda_graph_config=graph_config,
        **sizes,
    )
    return LLM.from_loaded(loaded, config, Report(show=False))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    lengths = [3, 70, 1, 33, 300, 17, 500, 64, 5, 128, 2, 90]
    return [[rng.randrange(1000) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def plain_tokens(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Tokens of the uncompiled model without graphs, one prompt at a time."""
    with build(graphs=False, compiled=False) as llm:
        yield [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]


WAYS = {
    "compiled, whole graphs": {},
    "compiled, piecewise graphs": {"cuda_graph_config": CudaGraphConfig(capture_mixed=False)},
    "uncompiled, piecewise graphs": {"compiled": False, "cuda_graph_config": CudaGraphConfig(capture_mixed=False)},
    "uncompiled, whole graphs": {"compiled": False},
    "compiled, no graphs": {"graphs": False},
    "torch attention": {"graphs": False, "attention_backend": "torch"},
}


@pytest.mark.parametrize("way", WAYS)
def test_cuda_graphs_change_no_token(way: str, prompts: list[list[int]], plain_tokens: list[list[int]]) -> None:
    with build(**WAYS[way]) as llm:
        outputs = llm.generate(prompts, GREEDY)
        counts = llm.manager.counts
    assert [output.outputs[0].token_ids for output in outputs] == plain_tokens
    if "no graphs" in way or "torch" in way:
        assert set(counts) == {"plain"}
    else:
        assert counts["decode_graph"] > 10
        assert ("piecewise_graph" in counts) == ("piecewise" in way)
        assert ("mixed_graph" in counts) == ("whole" in way)


def test_padding_rows_never_leak(prompts: list[list[int]], plain_tokens: list[list[int]]) -> None:
    """NaN in every unused block and every padded row of the buffers changes nothing."""
    with build() as llm:
        runner = llm.engine.runner
        for layer in runner.caches:
            layer.k.fill_(float("nan"))
            layer.v.fill_(float("nan"))
        torch.cuda.synchronize()
        for number in (0, 4, 7):  # batches of 1: padded to the smallest sizes that were recorded
            assert llm.generate(prompts[number], GREEDY)[0].outputs[0].token_ids == plain_tokens[number]
        outputs = llm.generate(prompts[:5], GREEDY)  # a batch of 5 replays the graph of 8
        assert [output.outputs[0].token_ids for output in outputs] == plain_tokens[:5]


def test_sampling_does_not_depend_on_the_batch(prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=7, max_tokens=20, ignore_eos=True)
    with build() as llm:
        alone = llm.generate(prompts[1], params)[0].outputs[0].token_ids
        together = llm.generate(prompts, params)[1].outputs[0].token_ids
        other = llm.generate(prompts[1], SamplingParams(temperature=0.9, seed=8, max_tokens=20, ignore_eos=True))
    assert alone == together != other[0].outputs[0].token_ids


def test_logprobs_of_greedy_tokens_are_the_largest(prompts: list[list[int]]) -> None:
    with build() as llm:
        result = llm.generate(prompts[3], SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True))
    output = result[0].outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 5
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert len(entry) == 3 and max(entry, key=entry.__getitem__) == token


def test_2000_mixed_requests_with_random_cancels_leave_every_block_free() -> None:
    rng = np.random.default_rng(0)
    with build("bfloat16", max_batch_size=64, num_kv_blocks=600) as llm:
        client, inbox = llm._client, queue.SimpleQueue()
        submitted: dict[int, int] = {}
        final: set[int] = set()
        while len(final) < 2000:
            while len(submitted) < 2000 and len(submitted) - len(final) < 200:
                params = SamplingParams(
                    temperature=float(rng.choice([0.0, 1.0])),
                    top_p=float(rng.choice([1.0, 0.9])),
                    max_tokens=int(rng.integers(1, 60)),
                    stop_token_ids=rng.integers(0, 1000, 3).tolist(),
                )
                prompt = rng.integers(0, 1000, int(rng.integers(1, 400)))
                number = client.submit(EncodedPrompt(prompt), params, inbox, streaming=bool(rng.integers(2)))
                submitted[number] = len(prompt)
            llm.manager.wake()
            for response in inbox.get(timeout=60):
                assert not response.error
                if response.final:
                    assert response.id not in final
                    final.add(response.id)
            if rng.random() < 0.05:
                client.stop(int(rng.choice(list(submitted))))
        scheduler = llm.engine.scheduler
        scheduler.kv.check()
        assert scheduler.kv.num_free == scheduler.kv.num_blocks and scheduler.num_active == 0


def test_first_requests_compile_no_kernel(
    prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compilation would delay all requests in flight by a third of a second."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    built: list[str] = []

    def note(**facts: Any) -> None:
        built.append(facts["fn"].name)

    with build(dtype="bfloat16") as llm, monkeypatch.context() as patched:
        patched.setattr(triton.knobs.runtime, "jit_cache_hook", note)
        llm.generate(prompts[0], GREEDY)
        llm.generate(prompts, GREEDY)
        llm.generate(prompts, SamplingParams(temperature=0.7, top_p=0.9, max_tokens=24))
    assert built == []


def test_insufficient_memory_gives_a_one_line_error() -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization") as error:
        build(num_kv_blocks=None, gpu_memory_utilization=0.001)
    assert "GiB" in str(error.value)


def test_closed_engine_frees_its_memory() -> None:
    """Although it is part of reference cycles, and the collector is off while an engine is built."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    with build() as llm:
        first = torch.cuda.memory_allocated() - before
    del llm
    with build():
        assert torch.cuda.memory_allocated() - before < 1.5 * first
