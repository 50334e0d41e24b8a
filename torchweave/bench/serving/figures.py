"""Metrics of a load test, with the names and definitions of vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torchweave.bench.serving.request import RequestStats
    from torchweave.bench.serving.stalls import SlowPeriod

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def figures(
    stats: Sequence[RequestStats], duration: float, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Metrics of a run of `duration` seconds; `goodput` holds limits in milliseconds by metric."""
    good = [each for each in stats if each.success]
    tokens_in, tokens_out = sum(each.input_tokens for each in good), sum(each.output_tokens for each in good)
    values = _values(good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(stats) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration,
        "request_goodput": _num_within_slo(values, goodput) / duration if goodput else None,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": _peak_tokens_per_second(good),
        "max_concurrent_requests": _peak_concurrency(good),
    }
    spent = {**values, "tpot": [value for value, each in zip(values["tpot"], good, strict=True) if _has_tpot(each)]}
    for name in METRICS:
        milliseconds = np.asarray(spent[name] or [0.0]) * 1e3
        result[f"mean_{name}_ms"] = float(milliseconds.mean())
        result[f"median_{name}_ms"] = float(np.median(milliseconds))
        result[f"std_{name}_ms"] = float(milliseconds.std())
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return result


def itl_outside_slow_periods(
    stats: Sequence[RequestStats], slow_periods: Sequence[SlowPeriod], percentiles: Sequence[float]
) -> dict[str, float]:
    """Inter-token latencies that do not overlap a slow period of the machine; empty without slow periods."""
    if not slow_periods:
        return {}
    begins, ends = np.asarray(slow_periods).T
    gaps_outside = [np.empty(0)]
    for each in stats:
        if each.success and each.itl:
            gaps = np.asarray(each.itl)
            until = each.start + each.ttft + np.cumsum(gaps)
            # Periods are disjoint and sorted: only the first that ends after a gap's begin can overlap it.
            nearest = np.searchsorted(ends, until - gaps)
            gaps_outside.append(gaps[np.append(begins, np.inf)[nearest] > until])
    milliseconds = np.concatenate(gaps_outside) * 1e3
    if not milliseconds.size:
        return {}
    return {"median_itl_ms": float(np.median(milliseconds))} | {
        f"p{percentile:g}_itl_ms": float(np.percentile(milliseconds, percentile)) for percentile in percentiles
    }


def details(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Data of each request in sending order; times in seconds."""
    return {
        "input_lens": [each.input_tokens for each in stats],
        "output_lens": [each.output_tokens for each in stats],
        "ttfts": [each.ttft for each in stats],
        "itls": [each.itl for each in stats],
        "latencies": [each.latency for each in stats],
        "start_times": [each.start for each in stats],
        "queue_times": [each.queued for each in stats],
        "generated_texts": [each.text for each in stats],
        "errors": [each.error for each in stats],
    }


def _has_tpot(each: RequestStats) -> bool:
    return each.output_tokens > 1


def _values(good: Sequence[RequestStats]) -> dict[str, list[float]]:
    """Seconds by metric; `tpot` of a single-token output is 0, for goodput."""
    return {
        "ttft": [each.ttft for each in good],
        "tpot": [
            (each.latency - each.ttft) / max(1, each.output_tokens - 1) if _has_tpot(each) else 0.0 for each in good
        ],
        "itl": [gap for each in good for gap in each.itl],
        "e2el": [each.latency for each in good],
    }


def _num_within_slo(values: Mapping[str, list[float]], goodput: Mapping[str, float]) -> int:
    met = [[value * 1e3 <= limit for value in values[name]] for name, limit in goodput.items()]
    return sum(map(all, zip(*met, strict=True)))


def _peak_tokens_per_second(good: Sequence[RequestStats]) -> float:
    if not good:
        return 0.0
    begin = min(each.start for each in good)
    end = max(each.start + each.latency for each in good)
    counts = np.zeros(math.ceil(end - begin) + 1)
    for each in good:
        at = each.start - begin + each.ttft + np.cumsum([0.0, *each.itl])
        np.add.at(counts, at.astype(int), 1)
    return float(counts.max())


def _peak_concurrency(good: Sequence[RequestStats]) -> int:
    changes = sorted([(each.start, 1) for each in good] + [(each.start + each.latency, -1) for each in good])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Table rows (heading, subject, value, note) of a result."""
    rate = "all at once" if result["request_rate"] == "inf" else f"{result['request_rate']:g} a second"
    failed = f"{result['failed']} FAILED: {result['errors'][0][:200]}" if result["failed"] else "none failed"
    limit = f"{rate}, at most {result['max_concurrency'] or 'any number'} open"
    read, written = f"{result['total_input_tokens']:,} in", f"{result['total_output_tokens']:,}"
    table_rows = [
        ("Load", "requests", f"{result['completed']:,}", limit),
        ("Load", "duration", f"{result['duration']:.2f} s", failed),
        ("Load", "most at once", f"{result['max_concurrent_requests']:,}", ""),
        ("Throughput", "requests", f"{result['request_throughput']:,.2f} /s", _good(result)),
        ("Throughput", "output tokens", f"{result['output_throughput']:,.1f} /s", written),
        ("Throughput", "all tokens", f"{result['total_token_throughput']:,.1f} /s", read),
        ("Throughput", "most output tokens in a second", f"{result['max_output_tokens_per_s']:,.0f}", ""),
    ]
    for name, what in METRICS.items():
        others = [key.split("_")[0] for key in result if key.endswith(f"_{name}_ms") and not key.startswith("median")]
        note = ", ".join(f"{other} {result[f'{other}_{name}_ms']:,.2f}" for other in others)
        table_rows.append(("Latency, median", what, f"{result[f'median_{name}_ms']:,.2f} ms", note))
    if stalls := result.get("machine_stalls"):
        often = f"of a sleeping process; {stalls['over_2_ms']} stalls above 2 ms"
        table_rows.append(("Client machine", "longest stall", f"{stalls['longest_ms']:,.2f} ms", often))
        slow = f"{stalls['slow_s']:.2f} s in total in which a fixed computation took at least 3 times as long"
        table_rows.append(("Client machine", "slow periods", f"{stalls['slow_spells']}", slow))
    if outside := result.get("outside_slow_spells"):
        others = ", ".join(f"{key.split('_')[0]} {value:,.2f}" for key, value in outside.items() if key[0] == "p")
        what = "inter-token latency outside slow periods, median"
        table_rows.append(("Client machine", what, f"{outside['median_itl_ms']:,.2f} ms", others))
    return table_rows


def _good(result: dict[str, Any]) -> str:
    good = result["request_goodput"]
    return "" if good is None else f"goodput {good:,.2f} /s"
