"""Examine a model's decoder step as the engine runs it."""

from __future__ import annotations

import torch

from torchweave.config import resolve
from torchweave.config.options import EngineConfig
from torchweave.doctor.examine import examine
from torchweave.doctor.finding import Finding
from torchweave.doctor.subject import InputSpec, Subject
from torchweave.engine.startup.device_facts import device_facts
from torchweave.models.load import load, model_facts
from torchweave.ops.registry import boundary_ops
from torchweave.report import Report


def examine_model(config: EngineConfig, report: Report) -> list[Finding]:
    """Findings of a model; see `torchweave.doctor.examine.examine`.

    Raises:
        ValueError: the model or an option is invalid, or there are several ranks.
    """
    if config.num_ranks > 1:
        raise ValueError(
            "The doctor examines a model on one rank; its trace is the same on all. Leave out --tp and --pp."
        )
    revision, download_dir = config.revision, config.download_dir
    facts = model_facts(
        config.model, config.trust_remote_code, revision=revision, download_dir=download_dir, plugins=config.plugins,
        overrides=config.hf_overrides,
    )  # fmt: skip
    plan = resolve(config, device_facts(config.device, attention_backend=config.attention_backend), facts)
    dtype = getattr(torch, plan.dtype)
    trust = config.trust_remote_code
    loaded = load(
        config.model, dtype, plan.device, config.load_format, trust, report, plan.max_model_len,
        revision=revision, download_dir=download_dir, overrides=config.hf_overrides,
        ignore_unused_weights=config.ignore_unused_weights,
    )  # fmt: skip
    inputs = {
        "input_ids": InputSpec("int64", ("T",), loaded.module.vocab_size),
        "positions": InputSpec("arange", ("T",)),
        "logits_index": InputSpec("int64", ("N",), "T"),
    }
    return examine(Subject(facts.name, loaded.module, inputs, boundary_ops(), plan.device))
