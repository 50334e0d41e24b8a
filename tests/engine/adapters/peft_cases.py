"""Random adapters by PEFT for tiny models, and what PEFT's own model answers with them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from tests.engine.captured import CAPTURED
from torchweave import LLM, EngineConfig, LoRARequest, RequestOutput, SamplingParams
from torchweave.models.load import LoadedModel, load
from torchweave.models.parallel.linear_roles import is_linear
from torchweave.report import Report
from torchweave.verify import zoo

NUM_TOKENS = 8


def make_adapter(
    base: PreTrainedModel, folder: Path, prompts: Sequence[Sequence[int]], seed: int = 0, **options: Any
) -> list[zoo.Answer]:
    """Save an adapter with random matrices to a folder; returns PEFT's answers to prompts."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model: Any = get_peft_model(copy.deepcopy(base), LoraConfig(**given))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    model.eval().save_pretrained(folder)
    return zoo.reference_answers(model, prompts, NUM_TOKENS)


def linears(model: PreTrainedModel) -> list[str]:
    """Names of the linears of a model, its head among them where it is not tied, without routers of experts."""
    excluded = {"gate", "router"}
    if any(parameter.ndim == 3 and ".experts." in name for name, parameter in model.named_parameters()):
        excluded |= {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}  # for which PEFT takes those of the experts
    if model.config.model_type in ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"):
        excluded |= {"out_proj"}  # which PEFT refuses
    tied = model.get_output_embeddings() if model.config.get_text_config().tie_word_embeddings else None
    named = ((name, module) for name, module in model.named_modules() if is_linear(module) and module is not tied)
    return [name for name, _ in named if name.rpartition(".")[2] not in excluded]


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "max_model_len": 64, "max_batch_size": 8, "max_num_tokens": 48, "num_kv_blocks": 64, "dtype": "float32",
        "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "torch_compile_config": CAPTURED,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **(given | options))


@contextlib.contextmanager
def engine(folder: Path, **options: Any):
    """An engine over a saved model."""
    config = engine_config(folder, **options)
    loaded: LoadedModel = load(str(folder), torch.float32, "cpu", max_model_len=config.max_model_len)
    with LLM.from_loaded(loaded, config, Report(show=False)) as llm:
        yield llm


def ask(llm: LLM, prompts: Sequence[Sequence[int]], adapters: Sequence[LoRARequest | None]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    return llm.generate([list(each) for each in prompts], params, lora_request=list(adapters))


def answer(output: RequestOutput) -> zoo.Answer:
    first = output.outputs[0]
    assert first.logprobs is not None
    return zoo.Answer(
        list(first.token_ids), [at[token].logprob for at, token in zip(first.logprobs, first.token_ids, strict=True)]
    )


def assert_equal(output: RequestOutput, expected: zoo.Answer) -> None:
    got = answer(output)
    assert got.tokens == expected.tokens
    torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs), rtol=0, atol=1e-4)
