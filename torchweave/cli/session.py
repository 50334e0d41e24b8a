"""Engines and sampling parameters from command-line arguments."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from torchweave.cli.arguments import config_from_args, engine_config
from torchweave.config.model_source import reject_draft_head, resolve, resolve_tokenizer
from torchweave.config.options import EngineConfig
from torchweave.config.validate import check_config
from torchweave.engine.startup.early_start import prestart_workers, stored_bytecode
from torchweave.report import Report
from torchweave.tokenizer import Tokenizer
from torchweave.utils import gc

if TYPE_CHECKING:  # imported while bytecode is stored and GPUs are opened
    from torchweave.engine.llm import LLM
    from torchweave.engine.request import SamplingParams


def start_llm(config: EngineConfig, report: Report) -> LLM:
    """Start an engine in this process.

    Raises:
        ValueError: the model or an option is invalid.
    """
    with stored_bytecode(config), prestart_workers(config) as worker_pool:
        with report.stage("imports"), gc.gc_frozen_after():
            import_module("torchweave.engine.startup.open")
            from torchweave.engine.llm import LLM
        # Their advice does not concern users of a command. Imports reset the levels.
        for name in ("transformers", "torch"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return LLM.from_config(config, report, worker_pool)


def _check_tokenizer(config: EngineConfig, chat: bool) -> None:
    """Look for the tokenizer, and for its chat template, before an engine starts.

    Raises:
        ValueError: there is none.
    """
    hub = {"trust_remote_code": config.trust_remote_code, "download_dir": config.download_dir}
    if config.tokenizer is not None:
        folder = resolve_tokenizer(config.tokenizer, **hub)
    else:
        folder = resolve(config.model, revision=config.revision, **hub).folder
    tokenizer = Tokenizer.from_folder(folder, config.trust_remote_code)
    if tokenizer is None:
        if config.tokenizer is None and folder is not None:
            reject_draft_head(config.model, folder)
        raise ValueError(
            f"{config.model} has no tokenizer, and this command takes text; pass --tokenizer with the folder or hub id of its "
            "tokenizer, or give token ids to `torchweave.LLM(...).generate`"
        )
    if not chat:
        return
    with stored_bytecode(config):
        import_module("torchweave.models")  # before the tokenizer imports transformers
    if not tokenizer.has_chat_template():
        raise ValueError(
            f"the tokenizer in {folder} has no chat template; complete plain text by `torchweave generate {config.model}`, or "
            "put the template into the folder as chat_template.jinja"
        )


@contextmanager
def engine(args: argparse.Namespace, needs: Literal["", "tokenizer", "chat template"] = "") -> Iterator[LLM]:
    """An engine for the arguments, after a look at what the command needs; leaving the context cancels running requests."""
    config = engine_config(args)
    check_config(config)
    if needs:
        _check_tokenizer(config, needs == "chat template")
    report = Report(show=False if args.quiet else None)
    for what, why in args.advice:
        report.event("warning", what=what, why=why)
    llm = start_llm(config, report)
    try:
        pooling = llm.engine.loaded.module.pooling
        if needs and pooling is not None:
            raise ValueError(pooling.refusal)
        yield llm
    finally:
        llm.shutdown(drain=False)


def sampling_params_from_args(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    """Sampling parameters from the arguments over the checkpoint's defaults; beam search takes only its max_tokens."""
    from torchweave.engine.request import SamplingParams

    defaults, names = llm.default_sampling_params(), ["max_tokens"]
    if config_from_args(SamplingParams, args).beam_width == 1:
        names += ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
    known: dict[str, Any] = {name: getattr(defaults, name) for name in names}
    return config_from_args(SamplingParams, args, **known)
