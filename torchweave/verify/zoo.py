"""Tiny models of many architectures, built from configs, and their reference tokens from transformers.

Random weights make errors visible: a wrong mask, position, window or norm must change tokens, so matrices are larger than at
initialization, norms are not one, and biases are not zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from torchweave.models.materialize import quiet_transformers
from torchweave.utils.suggest import did_you_mean
from torchweave.verify.zoo_models import MODELS, REFUSED_MODELS, ZooModel
from torchweave.verify.zoo_models import VOCAB as VOCAB

ZOO_MODELS = tuple(entry for entry in MODELS if entry.model_type in CONFIG_MAPPING)
"""Architectures that this version of transformers has, and the engine serves."""


def zoo_model(name: str) -> ZooModel:
    """The model called `name`; ValueError suggests the nearest name."""
    for entry in (*ZOO_MODELS, *REFUSED_MODELS):
        if entry.name == name:
            return entry
    names = (entry.name for entry in ZOO_MODELS)
    hint = did_you_mean(name, names, "`torchweave models list` shows those that are known")
    raise ValueError(f"Unknown architecture {name!r}; {hint}")


def build(
    entry: ZooModel, seed: int = 0, from_config: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
) -> PreTrainedModel:
    """transformers' eager float32 model of an entry, with weights that make errors visible."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = from_config(entry.config(), dtype=torch.float32, attn_implementation="eager")
        perturb_weights(model)
    return model.eval().requires_grad_(False)


def save(model: PreTrainedModel, folder: str | Path) -> None:
    """Save a model to a folder."""
    with quiet_transformers():
        model.save_pretrained(folder)


@torch.no_grad()
def perturb_weights(model: nn.Module) -> None:
    """Scale initial weights away from values under which layers have almost no effect."""
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf == "A_log":  # slow decays: recurrent states that last for many tokens
            parameter.normal_(-2.5, 0.5)
        elif parameter.ndim == 3 and parameter.shape[1] == 1:  # depthwise convolution of a few tokens
            parameter.normal_(0.0, 0.6)
        elif parameter.ndim >= 2:
            # About 1.2 / sqrt(fan in) at these widths: peaked attention, and outputs as large as the residual.
            parameter.normal_(0.0, 0.15)
        elif leaf == "weight":
            parameter.add_(torch.randn_like(parameter) * 0.2)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.1)


class Answer(NamedTuple):
    """Generated tokens, and the log-probability of each; None without."""

    tokens: list[int]
    logprobs: list[float] | None = None


@torch.no_grad()
def reference_answers(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Answer]:
    """Greedy answers of transformers' eager model, one prompt at a time, without a cache or stop tokens.

    The attention mask is that of `generate`; without it, some models are not causal in eager mode.
    """
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters

    def logits_of(ids: list[int]) -> Tensor:
        tokens = torch.tensor([ids], device=model.device)
        mask = {"attention_mask": torch.ones_like(tokens)} if takes_mask else {}
        return model(input_ids=tokens, use_cache=False, **mask).logits[0, -1]

    return [greedy_answer(prompt, num_tokens, logits_of) for prompt in prompts]


def greedy_answer(
    prompt: Sequence[int], num_tokens: int, logits_of: Callable[[list[int]], Tensor], excluded: Sequence[int] = ()
) -> Answer:
    """The likeliest token after token, of those that are not `excluded`; `logits_of` the ids so far are `[vocabulary]`."""
    ids, logprobs = list(prompt), []
    for _ in range(num_tokens):
        logits = logits_of(ids).float()
        known = logits.log_softmax(-1)
        logits[list(excluded)] = -torch.inf
        ids.append(int(logits.argmax()))
        logprobs.append(float(known[ids[-1]]))
    return Answer(ids[len(prompt) :], logprobs)


def reference_tokens(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The tokens of `reference_answers`."""
    return [answer.tokens for answer in reference_answers(model, prompts, num_tokens)]
