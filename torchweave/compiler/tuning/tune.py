"""Everything that can be asked about a module on this device, asked: which configuration each of its products of few tokens takes,
whether passes that wait for a measurement pay, whether pieces are faster over several streams or built for one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from torchweave.compiler.passes.manager import default_passes
from torchweave.compiler.runtime.compiled_graph import Woven
from torchweave.compiler.tuning import linears, pieces
from torchweave.compiler.tuning.measure import Clock
from torchweave.compiler.tuning.table import COMPILE_SIZES, STREAMS, Table
from torchweave.compiler.tuning.tuner import Question, tune
from torchweave.config.options import TorchCompileConfig
from torchweave.report import Report


@dataclass(frozen=True)
class Module:
    """A module that is tuned.

    Attributes:
        weave: compiles it by a config.
        step: runs what was woven once, on a number of tokens.
        device: where it is.
    """

    weave: Callable[[TorchCompileConfig], Woven]
    step: Callable[[Woven, int], object]
    device: torch.device


def tune_module(
    module: Module,
    config: TorchCompileConfig,
    clock: Clock,
    known: Table,
    report: Report,
    tokens: Sequence[int] = linears.TOKENS,
) -> Table:
    """The answers that are not in `known`, an event `tuned` for each.

    Args:
        config: what the module will be built by: streams and fixed sizes are asked about when it has them.
        tokens: numbers of tokens to ask for.
    """
    plain = replace(config, max_num_streams=1, compile_sizes=())
    woven = module.weave(plain)
    asked: dict[tuple[linears.LinearShape, torch.dtype], list[int]] = {}
    for count in tokens:
        with linears.Products() as products:
            module.step(woven, count)
        for shape, dtype in products.shapes:
            if not known.answers(shape.subject, shape.key):
                asked.setdefault((shape, dtype), []).append(count)
    about_pieces = list(_about_pieces(module, woven, plain, config, known, tokens))
    about_products = linears.questions(asked, module.device)
    total = sum(map(len, asked.values())) + len(about_pieces)
    return tune(chain(about_products, about_pieces), clock, known.device, report, total)


def _about_pieces(
    module: Module,
    woven: Woven,
    plain: TorchCompileConfig,
    config: TorchCompileConfig,
    known: Table,
    tokens: Sequence[int],
) -> Iterator[Question]:
    others = {
        each.name: (replace(plain, enabled_passes=(*plain.enabled_passes, each.name)), tokens)
        for each in default_passes()
        if each.gated and each.stage == "aten" and each.name not in (*plain.enabled_passes, *plain.disabled_passes)
    }
    if config.max_num_streams > 1:
        others[STREAMS] = (replace(plain, max_num_streams=config.max_num_streams), tokens)
    if config.compile_sizes:
        others[COMPILE_SIZES] = (replace(plain, compile_sizes=config.compile_sizes), config.compile_sizes)
    for subject, (other, counts) in others.items():
        found = pieces.questions(subject, woven, module.weave(other), counts)
        yield from (each for each in found if not known.answers(each.subject, each.shape))
