"""The measurements, through the engine's public API alone; each returns plain data under vLLM's field names where it has one.

Prompts are random token ids, end tokens are ignored and decoding is greedy, so that the work is the same whatever the
weights are. Times are wall-clock seconds of `LLM.generate`, which returns when the last token is on the host.
"""

from __future__ import annotations

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
    """What is run.

    Attributes:
        batch_sizes: decode batches.
        input_len, output_len: tokens of a request while decoding is measured.
        decode_repeats: runs of which the median is taken.
        ttft_lens: prompts whose time to first token is measured.
        ttft_repeats: runs of which the median is taken.
        prefill: batches of prompts that are read for one token each, as (requests, tokens).
        prefill_repeats: runs of which the median is taken.
        num_requests: requests of the mixed run.
        mixed_input, mixed_output: bounds of their uniformly drawn lengths, both inclusive.
        seed: of all that is drawn.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 256)
    input_len: int = 128
    output_len: int = 128
    decode_repeats: int = 3
    ttft_lens: tuple[int, ...] = (16, 1000)
    ttft_repeats: int = 20
    prefill: tuple[tuple[int, int], ...] = ((16, 1024), (4, 8192))
    prefill_repeats: int = 3
    num_requests: int = 512
    mixed_input: tuple[int, int] = (64, 1024)
    mixed_output: tuple[int, int] = (16, 512)
    seed: int = 0


class Workload:
    """Random prompts for one engine, and timed runs of them."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self._vocab_size = llm.engine.loaded.module.vocab_size
        self._random = np.random.default_rng(seed)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [self._random.integers(self._vocab_size, size=length).tolist() for _ in range(count)]

    def lengths(self, bounds: tuple[int, int], count: int) -> list[int]:
        return self._random.integers(bounds[0], bounds[1] + 1, size=count).tolist()

    def run(self, prompts: Sequence[Sequence[int]], output_lens: int | Sequence[int]) -> float:
        """Seconds until all are answered with exactly as many tokens as asked."""
        return self._timed_generate(prompts, output_lens)[0]

    def answers(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        """The tokens that are answered."""
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
        assert [len(answer) for answer in answers] == list(lengths), "an answer has not the length that was asked for"
        return elapsed, answers

    def length_error(self, length: int) -> str:
        """Why a request of so many tokens cannot run; empty when it can."""
        limit = self.llm.plan.max_model_len
        return f"{length} tokens are above max_model_len={limit}" if length > limit else ""


def fixed_length_params(num_tokens: int) -> SamplingParams:
    """Greedy, `num_tokens` tokens, no more and no less."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def decode(work: Workload, sizes: Sizes, advance: Advance) -> list[Row]:
    """Milliseconds a token while a batch decodes: (time of all + 1 tokens - time of one) / all."""
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
        for _ in range(sizes.decode_repeats):
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
    """Milliseconds until the only token of one prompt is back."""
    rows: list[Row] = []
    for length in sizes.ttft_lens:
        if why := work.length_error(length + 1):
            rows.append({"input_len": length, "skipped": why})
            advance(1, f"prompt of {length}: skipped")
            continue
        for _ in range(2):
            work.run(work.prompts(1, length), 1)
        times = [work.run(work.prompts(1, length), 1) for _ in range(sizes.ttft_repeats)]
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
    """Prompt tokens read a second, one token out each."""
    rows: list[Row] = []
    for count, length in sizes.prefill:
        row: Row = {"num_requests": count, "input_len": length}
        if why := work.length_error(length + 1):
            rows.append(row | {"skipped": why})
            advance(1, f"{count}x{length}: skipped")
            continue
        work.run(work.prompts(count, length), 1)
        elapsed = statistics.median(work.run(work.prompts(count, length), 1) for _ in range(sizes.prefill_repeats))
        rows.append(row | {"elapsed_time": elapsed, "input_throughput": count * length / elapsed})
        advance(1, f"{count}x{length}: {count * length / elapsed:,.0f} tokens/s")
    return rows


def mixed(work: Workload, sizes: Sizes, advance: Advance) -> Row:
    """Output tokens a second over requests of all lengths that come at once. The lengths are the same in each run."""
    lengths_in = work.lengths(sizes.mixed_input, sizes.num_requests)
    lengths_out = work.lengths(sizes.mixed_output, sizes.num_requests)
    if why := work.length_error(sizes.mixed_input[1] + sizes.mixed_output[1]):
        advance(1, "skipped")
        return {"num_requests": sizes.num_requests, "skipped": why}
    prompts = [work.prompts(1, length)[0] for length in lengths_in]
    elapsed = work.run(prompts, lengths_out)
    advance(1, f"{sum(lengths_out) / elapsed:,.0f} tokens/s")
    return {
        "num_requests": sizes.num_requests,
        "input_len": list(sizes.mixed_input),
        "output_len": list(sizes.mixed_output),
        "elapsed_time": elapsed,
        "total_input_tokens": sum(lengths_in),
        "total_output_tokens": sum(lengths_out),
        "total_num_tokens": sum(lengths_in) + sum(lengths_out),
        "requests_per_second": sizes.num_requests / elapsed,
        "tokens_per_second": (sum(lengths_in) + sum(lengths_out)) / elapsed,
        "output_throughput": sum(lengths_out) / elapsed,
    }
