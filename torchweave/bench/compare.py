"""Output tokens per second of the engine and of transformers on the same requests, in alternation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchweave.bench.protocol import Sizes, Workload

if TYPE_CHECKING:
    from torchweave.engine.llm import LLM

REPEATS = 3


def compare(llm: LLM, sizes: Sizes, advance: Callable[..., None]) -> list[dict[str, Any]]:
    """Run the simultaneous requests that `sizes.compare_requests`, `compare_input_len` and `compare_output_len` describe.

    Every contender warms up once; timed runs alternate, so that slow moments of the machine affect all. Returns a row per
    contender: `name`, `output_throughput` (median run), `latencies`, `ratio` (its time to the engine's), and `same_tokens`:
    the number of outputs equal to the engine's.

    Raises:
        ValueError: the requests are longer than max_model_len.
    """
    from torchweave.utils.openmp import release_workers
    from torchweave.verify.hf_baseline import TransformersBaseline

    work = Workload(llm, sizes.seed or 0)
    num_requests, input_len, output_len = sizes.compare_requests, sizes.compare_input_len, sizes.compare_output_len
    if why := work.length_error(input_len[-1] + output_len):
        raise ValueError(f"{why}; lower --compare_input_len or --compare_output_len")
    prompts = [work.prompts(1, length)[0] for length in work.lengths(input_len, num_requests)]
    baseline = TransformersBaseline(llm.plan.config.model, llm.engine.loaded.dtype, llm.plan.device)
    runs: dict[str, Callable[[], Sequence[Sequence[int]]]] = {
        "torchweave": lambda: work.answers(prompts, output_len),
        "transformers generate, padded": lambda: baseline.generate(prompts, output_len),
        "transformers generate_batch": lambda: baseline.generate_batch(prompts, output_len),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    answers: dict[str, Sequence[Sequence[int]]] = {}
    try:
        for repeat in range(REPEATS + 1):
            for name, run in runs.items():
                begin = time.perf_counter()
                answers[name] = run()
                elapsed = time.perf_counter() - begin
                if any(len(answer) != output_len for answer in answers[name]):
                    raise RuntimeError(f"{name} did not generate {output_len} tokens per request")
                if repeat:
                    seconds[name].append(elapsed)
                advance(1, f"{name}: {elapsed:.2f} s")
                release_workers()  # OpenMP workers of this thread, used by transformers; the engine releases its own
    finally:
        baseline.close()
    engine_seconds = statistics.median(seconds["torchweave"])
    return [
        {
            "name": name,
            "num_requests": num_requests,
            "input_len": [input_len[0], input_len[-1]],
            "output_len": output_len,
            "latencies": times,
            "output_throughput": num_requests * output_len / statistics.median(times),
            "ratio": statistics.median(times) / engine_seconds,
            "same_tokens": sum(list(a) == list(b) for a, b in zip(answers[name], answers["torchweave"], strict=True)),
        }
        for name, times in seconds.items()
    ]
