"""Load the draft model or the draft head of `speculative_config`, check that it suits its model, and adapt the number of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torchweave.config import Plan
from torchweave.config.model_source import resolve
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.engine.scheduler.speculation import AdaptiveDrafts, StepCosts
from torchweave.models.decoder import DecoderStep
from torchweave.models.load import LoadedModel, load
from torchweave.models.multimodal.image_step import ImageDecoderStep
from torchweave.models.multimodal.support import image_token_id
from torchweave.report import Report

if TYPE_CHECKING:
    from torchweave.models.drafters.eagle import EagleHead
    from torchweave.models.drafters.mtp import MtpHead

_OPTION = "speculative_config.model"


def load_draft_model(
    plan: Plan, target: LoadedModel, report: Report, process_groups: ProcessGroups
) -> DecoderStep | None:
    """The draft model or head, in the dtype and on the device of the plan; None without one.

    Raises:
        ValueError: there is no such model, or it cannot draft for `target`.
    """
    name, method = plan.config.speculative_config.model, plan.config.speculative_config.method
    target.module.hidden_states = None  # of an engine before this one
    if method == "mtp":
        return _load_mtp(plan, target, report)
    if name is None:
        return None
    if method == "eagle3":
        return _load_head(name, plan, target, report)
    config, quiet = plan.config, Report(show=False)  # events and stages of loading are about the model
    with report.stage("loading the draft model"):
        try:
            draft = load(
                name,
                getattr(torch, plan.dtype),
                plan.device,
                load_format=config.load_format,
                trust_remote_code=config.trust_remote_code,
                report=quiet,
                max_model_len=plan.max_model_len,
                process_groups=process_groups,
                expert_parallel=config.enable_expert_parallel,
                ignore_unused_weights=config.ignore_unused_weights,
            )
        except ValueError as error:
            raise ValueError(f"{_OPTION}={name}: {error}") from error
    _check(draft, target)
    report.event(
        "draft_model",
        model=name,
        architecture=draft.architecture,
        parameters=draft.num_parameters,
        bytes=draft.weight_bytes,
        layers=len(draft.module.attention_layers),
    )
    return draft.module


def _load_head(name: str, plan: Plan, target: LoadedModel, report: Report) -> EagleHead:
    from torchweave.models.drafters.eagle import load_eagle_head  # imports transformers' Llama

    with report.stage("loading the draft head"):
        try:
            folder = resolve(name, plan.config.trust_remote_code).folder
            if folder is None:
                raise ValueError("a draft head has weights; give a folder or a hub id")
            head = load_eagle_head(folder, target.module, getattr(torch, plan.dtype), plan.max_model_len)
        except ValueError as error:
            raise ValueError(f"{_OPTION}={name}: {error}") from error
    parameters = sum(each.numel() for each in head.parameters())
    num_bytes = sum(each.nbytes for each in head.parameters())
    report.event("draft_model", model=name, architecture="EAGLE-3", parameters=parameters, bytes=num_bytes, layers=1)
    return head


def _load_mtp(plan: Plan, target: LoadedModel, report: Report) -> MtpHead:
    from torchweave.models.drafters.mtp import load_mtp_head

    if isinstance(target.module, ImageDecoderStep):
        raise ValueError(
            f"speculative_config.method=mtp is not supported for {target.name}, which takes images; choose another method"
        )
    config = plan.config
    with report.stage("loading the MTP layer"):
        try:
            source = resolve(
                target.name, config.trust_remote_code, config.revision, config.download_dir, config.hf_overrides
            )
            head = load_mtp_head(
                target,
                source,
                config.load_format,
                config.trust_remote_code,
                plan.quantization,
                config.enable_expert_parallel,
            )
        except ValueError as error:
            raise ValueError(f"speculative_config.method=mtp: {error}") from error
    size = {"parameters": head.num_parameters, "bytes": head.num_bytes}
    report.event("draft_model", model=target.name, architecture="MTP", **size, layers=1)
    return head


def _check(draft: LoadedModel, target: LoadedModel) -> None:
    """Reject a draft model that reads other tokens, or whose layers keep more than keys and values of tokens."""
    module, other = draft.module, f"{_OPTION}={draft.name}"
    if module.recurrent_layers or any(layer.sparse or layer.index_keys for layer in module.attention_layers):
        raise ValueError(
            f"{other} is not supported: a draft model has attention to all its keys or to a window in every layer; choose another"
        )
    if module.rope_axes or isinstance(module, ImageDecoderStep):
        raise ValueError(f"{other} is not supported: it takes images; choose a decoder of text")
    if isinstance(target.module, ImageDecoderStep):
        token_id = image_token_id(target.module.model.config)
        if token_id >= module.vocab_size:
            raise ValueError(
                f"{other} has {module.vocab_size} tokens, not the image token {token_id} of {target.name}; choose a draft model "
                "with the same tokenizer"
            )
    if draft.tokenizer is not None and target.tokenizer is not None:
        vocab, target_vocab = draft.tokenizer.hf_tokenizer.get_vocab(), target.tokenizer.hf_tokenizer.get_vocab()
        if vocab != target_vocab:
            text = min(
                token for token in vocab.keys() | target_vocab.keys() if vocab.get(token) != target_vocab.get(token)
            )
            raise ValueError(
                f"{other} has another tokenizer than {target.name} (the token {text!r} is {vocab.get(text)} in one and "
                f"{target_vocab.get(text)} in the other); choose a draft model with the same tokenizer"
            )


def adaptive_drafts(plan: Plan, step_costs: Sequence[tuple[int, int, float]], report: Report) -> AdaptiveDrafts | None:
    """Selects the number of drafts of each step; None without speculation, or if it is fixed."""
    if not plan.query_lens or not plan.config.speculative_config.adaptive:
        return None
    for rows, query_len, seconds in step_costs:
        report.event("step_cost", rows=rows, tokens=query_len, seconds=seconds)
    costs = StepCosts(plan.max_batch_size, plan.query_lens, step_costs)
    by_model = plan.config.speculative_config.method != "ngram"
    # After steps without drafts, a draft model first computes what it lacks.
    return AdaptiveDrafts(plan.max_batch_size, costs, **({"min_interval": 64} if by_model else {}))
