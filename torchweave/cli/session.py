"""What the commands share: an engine for the arguments, and a report that can be told to draw nothing."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchweave import imports
from torchweave.cli.arguments import engine_config, fill
from torchweave.engine.request import SamplingParams
from torchweave.log import Report
from torchweave.plan.check import check_names, check_numbers

if TYPE_CHECKING:
    from torchweave.engine.llm import LLM


def engine_class() -> type[LLM]:
    """`LLM`, imported."""
    with imports.for_good():
        from torchweave.engine.llm import LLM
    return LLM


@contextmanager
def engine(args: argparse.Namespace) -> Iterator[LLM]:
    """An engine for the arguments; requests in flight end with it."""
    config = engine_config(args)
    check_names(config, None)  # before the model is looked for
    check_numbers(config)
    for name in ("transformers", "torch"):  # their advice on start-up is not for whoever runs a command
        logging.getLogger(name).setLevel(logging.ERROR)
    llm = engine_class().from_config(config, report=Report(show=False if args.quiet else None))
    try:
        yield llm
    finally:
        llm.shutdown(drain=False)


def sampling(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    """Sampling parameters from the arguments, over what the checkpoint asks for."""
    defaults = llm.default_sampling_params()
    names: tuple[str, ...] = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    known: dict[str, Any] = {name: getattr(defaults, name) for name in names}
    return fill(SamplingParams, args, **known)


def check_sampling(args: argparse.Namespace) -> None:
    """Refuse bad sampling parameters before a model is loaded."""
    fill(SamplingParams, args)
