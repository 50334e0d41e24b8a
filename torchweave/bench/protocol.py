"""Latency and throughput measurements through the public API, as plain data under vLLM's field names where they exist.

Prompts are random token ids; decoding is greedy and ignores end tokens, so the work does not depend on the weights. Times are
wall-clock seconds of `LLM.generate`, which returns when the last token is on the host.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torchweave.engine.request import SamplingParams

if TYPE_CHECKING:
    from torchweave.engine.llm import LLM

Advance = Callable[..., None]
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Workload of the latency, throughput and host benchmarks.

    Attributes:
        batch_sizes: decode batch sizes.
        input_len, output_len: tokens per request of the decode benchmark.
        ttft_lens: prompt lengths, in tokens, of the time to first token.
        prefill: prefill batches as REQUESTSxTOKENS; each request generates one token.
        num_requests: simultaneous requests of mixed lengths; 0 skips this run.
        mixed_input_len, mixed_output_len: bounds LOW,HIGH of their uniformly drawn lengths, in tokens.
        repeats: runs per figure, of which the median counts; the time to first token takes 7 * repeats - 1 runs.
        compare_requests: simultaneous requests of `--compare`.
        compare_input_len: bounds LOW,HIGH of their prompt lengths, in tokens.
        compare_output_len: output tokens of each.
        running: concurrent requests of the host benchmark.
        seed: random seed of the workload.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 256)
    input_len: int = 128
    output_len: int = 128
    ttft_lens: tuple[int, ...] = (16, 1000)
    prefill: tuple[str, ...] = ("16x1024", "4x8192")
    num_requests: int = 512
    mixed_input_len: tuple[int, ...] = (64, 1024)
    mixed_output_len: tuple[int, ...] = (16, 512)
    repeats: int = 3
    compare_requests: int = 32
    compare_input_len: tuple[int, ...] = (8, 64)
    compare_output_len: int = 128
    running: int = 256
    seed: int | None = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "repeats", "compare_requests", "compare_output_len", "running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("batch_sizes", "ttft_lens"):
            if wrong := [each for each in getattr(self, name) if each < 1]:
                raise ValueError(f"{name} holds {wrong[0]}; every number must be at least 1")
        if self.num_requests < 0:
            raise ValueError(f"num_requests={self.num_requests} must be at least 0")
        for text in self.prefill:
            if not re.fullmatch(r"0*[1-9]\d*x0*[1-9]\d*", text):
                raise ValueError(f"prefill={text!r} is not valid: it takes REQUESTSxTOKENS, such as 16x1024")
        for name in ("mixed_input_len", "mixed_output_len", "compare_input_len"):
            values = getattr(self, name)
            if not (1 <= len(values) <= 2 and 1 <= values[0] <= values[-1]):
                raise ValueError(
                    f"{name}={','.join(map(str, values))} is not valid: it takes LOW,HIGH, such as 64,1024"
                )


class Workload:
    """Random prompts for an engine, and timed runs."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self._vocab_size = llm.engine.loaded.module.vocab_size
        self._random = np.random.default_rng(seed)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [self._random.integers(self._vocab_size, size=length).tolist() for _ in range(count)]

    def lengths(self, bounds: Sequence[int], count: int) -> list[int]:
        return self._random.integers(bounds[0], bounds[-1] + 1, size=count).tolist()

    def run(self, prompts: Sequence[Sequence[int]], output_lens: int | Sequence[int]) -> float:
        """Seconds until all prompts have exactly the requested number of output tokens."""
        return self._timed_generate(prompts, output_lens)[0]

    def answers(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        """Output tokens of each prompt."""
        return self._timed_generate(prompts, output_len)[1]

    def _timed_generate(
        self, prompts: Sequence[Sequence[int]], output_lens: int | Sequence[int]
    ) -> tuple[float, list[list[int]]]:
        lengths = [output_lens] * len(prompts) if isinstance(output_lens, int) else output_lens
        params = [fixed_length_params(length) for length in lengths]
        begin = time.perf_counter()
        outputs = self.llm.generate(list(prompts), params)
        elapsed = time.perf_counter() - begin
        answers = [output.outputs[0].token_ids for output in outputs]
        assert [len(answer) for answer in answers] == list(lengths), "an output has another length than requested"
        return elapsed, answers

    def length_error(self, length: int) -> str:
        """Why a request of `length` tokens cannot run; empty if it can."""
        limit = self.llm.plan.max_model_len
        return f"{length} tokens are above max_model_len={limit}" if length > limit else ""


def fixed_length_params(num_tokens: int) -> SamplingParams:
    """Greedy parameters for exactly `num_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def decode(work: Workload, sizes: Sizes, advance: Advance) -> list[Row]:
    """Milliseconds per token of a decode batch: (time of output_len + 1 tokens - time of one) / output_len."""
    rows: list[Row] = []
    total = sizes.input_len + sizes.output_len + 1
    for batch in sizes.batch_sizes:
        row: Row = {"batch_size": batch, "input_len": sizes.input_len, "output_len": sizes.output_len}
        limit = work.llm.plan.max_batch_size
        why = work.length_error(total) or (f"above max_batch_size={limit}" if batch > limit else "")
        if why:
            rows.append(row | {"skipped": why})
            advance(1, f"batch {batch}: skipped")
            continue
        work.run(work.prompts(batch, sizes.input_len), 3)
        whole, first = [], []
        for _ in range(sizes.repeats):
            first.append(work.run(work.prompts(batch, sizes.input_len), 1))
            whole.append(work.run(work.prompts(batch, sizes.input_len), sizes.output_len + 1))
        each = (statistics.median(whole) - statistics.median(first)) / sizes.output_len
        rows.append(
            row
            | {
                "median_tpot_ms": each * 1e3,
                "output_throughput": batch / each,
                "avg_latency": statistics.mean(whole),
                "latencies": whole,
                "first_latencies": first,
            }
        )
        advance(1, f"batch {batch}: {each * 1e3:.2f} ms/token")
    return rows


def first_token(work: Workload, sizes: Sizes, advance: Advance) -> list[Row]:
    """Milliseconds to the only output token of one prompt."""
    rows: list[Row] = []
    for length in sizes.ttft_lens:
        if why := work.length_error(length + 1):
            rows.append({"input_len": length, "skipped": why})
            advance(1, f"prompt of {length}: skipped")
            continue
        for _ in range(2):
            work.run(work.prompts(1, length), 1)
        times = [work.run(work.prompts(1, length), 1) for _ in range(7 * sizes.repeats - 1)]
        rows.append(
            {
                "input_len": length,
                "median_ttft_ms": statistics.median(times) * 1e3,
                "mean_ttft_ms": statistics.mean(times) * 1e3,
                "p99_ttft_ms": float(np.percentile(times, 99)) * 1e3,
            }
        )
        advance(1, f"prompt of {length}: {statistics.median(times) * 1e3:.1f} ms")
    return rows


def prefill(work: Workload, sizes: Sizes, advance: Advance) -> list[Row]:
    """Prompt tokens per second, with one output token per prompt."""
    rows: list[Row] = []
    for text in sizes.prefill:
        count, length = map(int, text.split("x"))
        row: Row = {"num_requests": count, "input_len": length}
        if why := work.length_error(length + 1):
            rows.append(row | {"skipped": why})
            advance(1, f"{count}x{length}: skipped")
            continue
        work.run(work.prompts(count, length), 1)
        elapsed = statistics.median(work.run(work.prompts(count, length), 1) for _ in range(sizes.repeats))
        rows.append(row | {"elapsed_time": elapsed, "input_throughput": count * length / elapsed})
        advance(1, f"{count}x{length}: {count * length / elapsed:,.0f} tokens/s")
    return rows


def mixed(work: Workload, sizes: Sizes, advance: Advance) -> Row:
    """Output tokens per second over simultaneous requests of mixed lengths; a seed fixes the lengths."""
    lengths_in = work.lengths(sizes.mixed_input_len, sizes.num_requests)
    lengths_out = work.lengths(sizes.mixed_output_len, sizes.num_requests)
    if why := work.length_error(sizes.mixed_input_len[-1] + sizes.mixed_output_len[-1]):
        advance(1, "skipped")
        return {"num_requests": sizes.num_requests, "skipped": why}
    prompts = [work.prompts(1, length)[0] for length in lengths_in]
    elapsed = work.run(prompts, lengths_out)
    advance(1, f"{sum(lengths_out) / elapsed:,.0f} tokens/s")
    return {
        "num_requests": sizes.num_requests,
        "input_len": [sizes.mixed_input_len[0], sizes.mixed_input_len[-1]],
        "output_len": [sizes.mixed_output_len[0], sizes.mixed_output_len[-1]],
        "elapsed_time": elapsed,
        "total_input_tokens": sum(lengths_in),
        "total_output_tokens": sum(lengths_out),
        "total_num_tokens": sum(lengths_in) + sum(lengths_out),
        "requests_per_second": sizes.num_requests / elapsed,
        "tokens_per_second": (sum(lengths_in) + sum(lengths_out)) / elapsed,
        "output_throughput": sum(lengths_out) / elapsed,
    }
