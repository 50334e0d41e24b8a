"""Verification on several ranks: each process runs the whole engine and its own scheduler.

All ranks schedule the same steps, so they communicate through the model's collectives only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchweave.config.options import EngineConfig
from torchweave.distributed.process_groups import (
    ProcessGroups,
    StoreAddress,
    create_rendezvous_store,
    destroy_process_groups,
    init_process_groups,
    join_rendezvous_store,
)
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.engine.scheduler.step import Step, StepResult
from torchweave.engine.startup.build import build
from torchweave.images import EncodedPrompt
from torchweave.models import load
from torchweave.report import Report
from torchweave.utils.child_process import ChildProcess, exit_with_parent
from torchweave.verify.image_zoo import IMAGE_TOKEN
from torchweave.verify.zoo import Answer

_TIMEOUT = 300.0
"""Seconds to wait for a rank."""
_EXIT_TIMEOUT = 5.0  # seconds until a rank is killed


class RankResult(NamedTuple):
    """Result of a rank.

    Attributes:
        answers: to each prompt, then to each again.
        shared_by: uses of each distinct piece.
        fallback: the reason of a failed capture.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
    """

    answers: tuple[Answer, ...]
    shared_by: tuple[int, ...]
    fallback: str
    num_cached_tokens: int = 0


def rank_result(answers: tuple[Answer, ...], report: Report, num_cached_tokens: int = 0) -> RankResult:
    """The result of an engine with this report."""
    shared_by = tuple(event["shared_by"] for event in report.select("piece"))
    return RankResult(
        answers, shared_by, " ".join(event["why"] for event in report.select("fallback")), num_cached_tokens
    )


def greedy_params(config: EngineConfig, num_tokens: int, has_images: bool) -> SamplingParams:
    """Parameters of a greedy answer of `num_tokens` tokens, with log-probabilities where the engine does not speculate.

    The token of images is a stop token, which is not generated before `min_tokens`: a request with a bias has no drafts.
    """
    logprobs = None if config.speculative_config.method else 0  # a request with log-probabilities has no drafts either
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        min_tokens=num_tokens,
        ignore_eos=True,
        logprobs=logprobs,
        stop_token_ids=[IMAGE_TOKEN] if has_images else [],
    )


class RankProcesses:
    """Rank processes on this machine, on the CPU over gloo; use as a context.

    Args:
        size: tensor-parallel ranks.
        stages: pipeline stages, each of `size` ranks.
    """

    def __init__(self, size: int, stages: int = 1) -> None:
        self.size, self.stages = size, stages
        self._pipes: list[Connection] = []
        self._processes: list[ChildProcess] = []
        self._start()

    def _start(self) -> None:
        self._store, address = create_rendezvous_store("localhost")
        for rank in range(self.size * self.stages):
            parent_end, child_end = Pipe()
            with child_end:
                task = child_end.fileno(), rank, self.size, self.stages, address
                self._processes.append(ChildProcess(_rank_main, *task, pass_fds=[child_end.fileno()]))
            self._pipes.append(parent_end)

    def _end(self, timeout: float) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.wait(timeout)
            process.kill_and_wait()
        self._pipes, self._processes = [], []

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(_EXIT_TIMEOUT)

    def generate(self, config: EngineConfig, prompts: Sequence[EncodedPrompt], num_tokens: int) -> list[RankResult]:
        """Generate greedily on all ranks, twice; returns the result of each. Once a rank fails, all are replaced by new ones.

        With images among the prompts, the model is loaded with its tower and never generates its image token.

        Raises:
            ValueError: the model is not supported.
            RuntimeError: a rank failed or timed out.
        """
        for pipe in self._pipes:
            pipe.send((config, prompts, num_tokens))
        results: dict[int, RankResult] = {}
        while len(results) < len(self._pipes):
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in results], _TIMEOUT)
            if not ready:
                raise RuntimeError(f"a rank did not respond within {_TIMEOUT:.0f} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                result = self._receive(rank)
                if isinstance(result, Exception):
                    for process in self._processes:
                        process.kill()  # the others may wait for this rank in a collective
                    self._end(_EXIT_TIMEOUT)
                    self._start()
                    raise result
                results[rank] = result
        return [result for _, result in sorted(results.items())]

    def _receive(self, rank: int) -> RankResult | Exception:
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return RuntimeError(f"rank {rank} ended")


def _rank_main(fd: int, rank: int, size: int, stages: int, address: StoreAddress) -> None:
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
                pipe.send(generate(process_groups, *requested))
            except ValueError as error:
                pipe.send(ValueError(str(error)))
            except Exception as error:
                pipe.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"))
    destroy_process_groups(process_groups)


def run_step(process_groups: ProcessGroups, runner: ModelRunner, step: Step) -> StepResult:
    """Run a step on this rank; its result is that of the last pipeline stage, which alone samples."""
    launched = runner.launch(step)
    if process_groups.pipeline_parallel_size == 1:
        return runner.collect(launched)
    runner.on_idle()  # receives the tokens on other stages
    result = [runner.collect(launched)]
    dist.broadcast_object_list(result, src=0)
    return result[0]


def generate(
    process_groups: ProcessGroups, config: EngineConfig, prompts: Sequence[EncodedPrompt], num_tokens: int
) -> RankResult:
    """Generate greedily on this rank, twice."""
    report, has_images = Report(show=False), any(prompt.images for prompt in prompts)
    loaded = load(
        config.model,
        config.dtype,
        report=report,
        max_model_len=config.max_model_len,
        process_groups=process_groups,
        images=has_images,
    )
    if has_images and loaded.no_images:
        raise ValueError(f"the model is served without images: {loaded.no_images}")
    engine = build(config, report, loaded, process_groups)
    scheduler, runner = engine.scheduler, engine.runner
    greedy = greedy_params(config, num_tokens, has_images)
    answers: dict[int, Answer] = {}
    num_cached_tokens = 0
    runner.start()
    for begin in (0, len(prompts)):  # the second time each prompt reuses a prefix
        for number, prompt in enumerate(prompts, begin):
            scheduler.add(InferenceRequest(number, prompt.token_ids, greedy, images=prompt.images), seed=number)
        while len(answers) < begin + len(prompts):
            scheduler.poll_parts()
            step = scheduler.schedule()
            assert step is not None, "requests wait, and nothing is in flight"
            for response in scheduler.update(step, run_step(process_groups, runner, step)):
                output = response.output
                logprobs = [each.logprob for each in output.logprobs] if output.logprobs else None
                answers[response.id] = Answer(output.token_ids.tolist(), logprobs)
                num_cached_tokens += output.num_cached_tokens
    return rank_result(tuple(answers[number] for number in range(2 * len(prompts))), report, num_cached_tokens)
