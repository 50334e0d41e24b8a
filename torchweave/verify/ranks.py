"""The proof against transformers on several ranks: each of them runs the whole engine, and they meet in its collectives.

All ranks form the same steps themselves, one after the other, so that nothing but the collectives passes between them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import numpy as np
import torch

from torchweave.config.options import EngineConfig
from torchweave.distributed.process_groups import (
    ProcessGroups,
    create_rendezvous_store,
    destroy_process_groups,
    init_process_groups,
    join_rendezvous_store,
)
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.startup.build import build
from torchweave.models import load
from torchweave.report import Report
from torchweave.utils.child_process import ChildProcess, exit_with_parent

_TIMEOUT = 300.0
"""Seconds that ranks wait for each other."""
_EXIT_TIMEOUT = 5.0  # seconds that a rank has to leave by itself


class RankResult(NamedTuple):
    """What a rank has to tell: the tokens of each prompt, by how many layers each distinct piece is shared, and why the model was
    not captured as one graph, if it was not."""

    tokens: tuple[list[int], ...]
    shared_by: tuple[int, ...]
    fallback: str


def rank_result(tokens: tuple[list[int], ...], report: Report) -> RankResult:
    """What an engine with this report has to tell."""
    shared_by = tuple(event["shared_by"] for event in report.select("piece"))
    return RankResult(tokens, shared_by, " ".join(event["why"] for event in report.select("fallback")))


class RankProcesses:
    """Processes of this machine that answer the same prompts together; use as a context.

    Args:
        size: how many share each layer; all on the CPU, over gloo.
        stages: that the layers are divided into, each of `size` processes.
    """

    def __init__(self, size: int, stages: int = 1) -> None:
        self.size, self.stages = size, stages
        self._store, address = create_rendezvous_store("localhost")
        self._pipes: list[Connection] = []
        self._processes: list[ChildProcess] = []
        for rank in range(size * stages):
            ours, theirs = Pipe()
            with theirs:
                task = theirs.fileno(), rank, size, stages, address
                self._processes.append(ChildProcess(_rank_main, *task, pass_fds=[theirs.fileno()]))
            self._pipes.append(ours)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.wait(_EXIT_TIMEOUT)
            process.kill_and_wait()

    def generate(self, config: EngineConfig, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[RankResult]:
        """What each rank answered, greedily.

        Raises:
            ValueError: the model is refused.
            RuntimeError: a rank failed, or said nothing.
        """
        for pipe in self._pipes:
            pipe.send((config, prompts, num_tokens))
        answers: dict[int, RankResult | Exception] = {}
        while len(answers) < len(self._pipes):
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers], _TIMEOUT)
            if not ready:
                raise RuntimeError(f"a rank said nothing for {_TIMEOUT:.0f} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[rank] = self._receive(rank)
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return [answer for _, answer in sorted(answers.items()) if isinstance(answer, RankResult)]

    def _receive(self, rank: int) -> RankResult | Exception:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return RuntimeError(f"rank {rank} ended")


def _rank_main(fd: int, rank: int, size: int, stages: int, address: tuple[str, int]) -> None:
    """Process of a rank: serve requests until the pipe closes."""
    exit_with_parent()
    pipe = Connection(fd)
    torch.set_num_threads(1)
    for name in ("transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    process_groups = init_process_groups(rank, size, stages, "cpu", join_rendezvous_store(address), _TIMEOUT)
    with contextlib.suppress(EOFError):
        while True:
            requested = pipe.recv()
            try:
                pipe.send(_generate(process_groups, *requested))
            except ValueError as error:
                pipe.send(ValueError(str(error)))
            except Exception as error:
                pipe.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"))
    destroy_process_groups(process_groups)


def _generate(
    process_groups: ProcessGroups, config: EngineConfig, prompts: Sequence[Sequence[int]], num_tokens: int
) -> RankResult:
    report = Report(show=False)
    loaded = load(
        config.model, config.dtype, report=report, max_model_len=config.max_model_len, process_groups=process_groups
    )
    engine = build(config, report, loaded, process_groups)
    scheduler, runner = engine.scheduler, engine.runner
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        scheduler.add(InferenceRequest(number, np.asarray(prompt), greedy), seed=number)
    answers: dict[int, list[int]] = {}
    runner.start()
    while len(answers) < len(prompts):
        scheduler.poll_grammars()
        step = scheduler.schedule()
        assert step is not None, "requests wait, and nothing is in flight"
        for response in scheduler.update(step, runner.collect(runner.launch(step))):
            answers[response.id] = [int(token) for token in response.output.token_ids]
    return rank_result(tuple(answers[number] for number in range(len(prompts))), report)
