"""Generation with transformers, as the baseline of comparisons with the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from torchweave.config.model_source import resolve
from torchweave.models.load import read_config
from torchweave.models.materialize import quiet_transformers


class TransformersBaseline:
    """A model loaded and run by transformers: default attention, greedy decoding, end tokens ignored.

    Args:
        name: a model name of the engine; a shape gets random weights.
        dtype: dtype of the weights.
        device: device of the model.
    """

    def __init__(self, name: str, dtype: torch.dtype, device: str) -> None:
        source = resolve(name)
        with torch.random.fork_rng(devices=[]), torch.device(device), quiet_transformers():
            if source.folder is not None:
                model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype)
            else:
                model = AutoModelForCausalLM.from_config(read_config(source), dtype=dtype)
        self.model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.model.config.eos_token_id = None
        self.model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Run `model.generate` on all prompts as one left-padded batch."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        device = self.model.device
        generate: Any = self.model.generate  # type: ignore[attr-defined]
        output = generate(input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=num_tokens)
        return output[:, longest:].tolist()

    @torch.no_grad()
    def generate_batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Run `model.generate_batch` (continuous batching over a paged cache) with a persistent manager."""
        before = self.model.config._attn_implementation
        try:
            outputs: Any = self.model.generate_batch(  # type: ignore[operator]
                [list(prompt) for prompt in prompts],
                max_new_tokens=num_tokens,
                persistent_manager=True,
                continuous_batching_config=self._batching(prompts, num_tokens),
            )
        finally:
            self.model.config._attn_implementation = before
        return [list(output.generated_tokens) for output in outputs.values()]

    def _batching(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> ContinuousBatchingConfig:
        """A cache for all requests at once; the default fills the machine's memory, which takes a minute on a CPU."""
        config = ContinuousBatchingConfig()
        page = getattr(config, "page_size", None) or getattr(config, "block_size", 32)  # renamed in transformers 5.2x
        config.num_blocks = sum(-(-(len(prompt) + num_tokens) // page) + 1 for prompt in prompts)
        return config

    def close(self) -> None:
        """Stop the continuous-batching manager of `generate_batch`."""
        self.model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]
