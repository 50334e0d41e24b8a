"""Quality of load-balancing policies over replicas: a simulation, seconds for thousands of requests.

    python bench/serving/routing.py [--replicas 4] [--json FILE]

A replica has the costs of an 8B model on an H100: `STEP` per step, plus costs per prefilled prompt token, per decoding
request, and per token of its context. Prefill is first come, first served, with at most 8,192 tokens per step, 1,024 next to
decoding requests; the last `CACHE` tokens stay cached. Policies: `turn` (round robin), `requests` (fewest requests), `tokens`
and `prefixes` (torchweave.serving.engine_client.load_balancer without and with known prefixes).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from torchweave.bench.result import environment
from torchweave.serving.engine_client.load_balancer import (
    PREFIX_CHUNK,
    Load,
    LoadBalancer,
    PrefixHistory,
    hash_prefixes,
)

STEP, READ, DRAW, CONTEXT = 7.0, 0.035, 0.02, 0.000044  # milliseconds
BATCH, CACHE, BUDGET, BESIDE = 256, 400_000, 8192, 1024
RULES = ("turn", "requests", "tokens", "prefixes")


@dataclass(eq=False)
class Request:
    """A request; times in milliseconds. `then` creates the client's next request from its completion time."""

    prompt: np.ndarray
    length: int
    then: Callable[[float], tuple[float, Request]] | None = None
    arrived: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    left: int = -1  # prompt tokens to prefill; -1: unknown
    read: int = 0
    drawn: int = 0
    expected: int = 0  # prompt tokens to prefill, as the router expects

    def __post_init__(self) -> None:
        self.prefix_hashes = hash_prefixes(self.prompt, "")


class Engine:
    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.cache = PrefixHistory(0)
        self.unread = self.open = 0
        self.busy = False

    def step(self, now: float) -> tuple[float, list[Request]]:
        """Run a step from `now`; returns its end and the finished requests."""
        budget, end, done = BESIDE if self.running else BUDGET, now + STEP, []
        while budget and self.waiting and len(self.running) + len(done) < BATCH:
            request = self.waiting[0]
            if request.left < 0:
                request.left = max(
                    len(request.prompt) - self.cache.num_matching(request.prefix_hashes) * PREFIX_CHUNK, 1
                )
            part = min(budget, request.left)
            budget, request.left, request.read = budget - part, request.left - part, request.read + part
            end += READ * part
            if not request.left:
                done.append(self.waiting.popleft())
                self.cache.add(request.prefix_hashes, CACHE // PREFIX_CHUNK)
        end += sum(DRAW + CONTEXT * (len(each.prompt) + each.drawn) for each in self.running)
        for request in done:
            request.first, self.unread = end, self.unread - request.expected
        self.running += done
        for request in self.running:
            request.drawn += 1
        ended = [request for request in self.running if request.drawn >= request.length]
        self.running = [request for request in self.running if request.drawn < request.length]
        for request in ended:
            request.ended = end
        self.open -= len(ended)
        return end, ended

    def load(self, number: int) -> Load:
        return Load(number, 0, self.open, self.unread, self.open >= BATCH, CACHE)


def simulate(traffic: list[tuple[float, Request]], rule: str, num_replicas: int) -> dict[str, float]:
    """Client-side latencies of timed requests under a policy."""
    engines, turn, order = [Engine() for _ in range(num_replicas)], itertools.count(), itertools.count()
    router = LoadBalancer(prefixes=rule == "prefixes")
    events: list[tuple[float, int, Request | int]] = [(at, next(order), request) for at, request in traffic]
    heapq.heapify(events)
    seen: list[Request] = []
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, Request):
            loads = [engine.load(number) for number, engine in enumerate(engines)]
            number, known = router.choose(what.prompt, "", loads)
            if rule in ("turn", "requests"):
                fewest = min(range(num_replicas), key=lambda each: engines[each].open)
                number = next(turn) % num_replicas if rule == "turn" else fewest
            engine = engines[number]
            what.arrived, what.expected = now, len(what.prompt) - known
            engine.unread, engine.open = engine.unread + what.expected, engine.open + 1
            engine.waiting.append(what)
            seen.append(what)
            if not engine.busy:
                engine.busy = True
                heapq.heappush(events, (now, next(order), number))
            continue
        engine = engines[what]
        if not (engine.waiting or engine.running):
            engine.busy = False
            continue
        end, ended = engine.step(now)
        heapq.heappush(events, (end, next(order), what))
        for request in ended:
            if request.then is not None:
                at, following = request.then(end)
                heapq.heappush(events, (at, next(order), following))
    first = sorted(each.first - each.arrived for each in seen)
    pace = sorted((each.ended - each.first) / max(each.length - 1, 1) for each in seen)
    return {
        "mean_ttft_ms": round(statistics.mean(first), 1),
        "p99_ttft_ms": round(first[int(0.99 * len(first)) - 1], 1),
        "median_tpot_ms": round(statistics.median(pace), 1),
        "prompt_tokens_read": round(sum(each.read for each in seen) / sum(len(each.prompt) for each in seen), 3),
        "seconds": round(max(each.ended for each in seen) / 1e3, 1),
    }


# -- traffic: (milliseconds, request) ----------------------------------------------------------------------------------


def tokens(chance: np.random.Generator, count: int) -> np.ndarray:
    return chance.integers(0, 30_000, count).astype(np.int32)


def arrivals(chance: np.random.Generator, rate: float, count: int) -> Iterator[float]:
    return iter(np.cumsum(chance.exponential(1000 / rate, count)).tolist())


def mixed(rate: float, count: int = 1500) -> list[tuple[float, Request]]:
    """Prompts of 8 to 30,000 tokens, half of them below 500, without common prefixes."""
    chance = np.random.default_rng(0)
    prompts = np.clip(chance.lognormal(6.2, 1.3, count), 8, 30_000).astype(int)
    lengths = np.clip(chance.lognormal(5, 0.8, count), 1, 1500).astype(int)
    times = arrivals(chance, rate, count)
    return [(at, Request(tokens(chance, p), int(n))) for at, p, n in zip(times, prompts, lengths, strict=True)]


def conversations(users: int, turns: int = 6) -> list[tuple[float, Request]]:
    """Multi-turn chats: clients reply after some seconds with the whole conversation; they start within 20 seconds."""
    chance = np.random.default_rng(0)
    system = tokens(chance, 200)

    def turn(said: np.ndarray, left: int, at: float) -> tuple[float, Request]:
        request = Request(
            np.concatenate([said, tokens(chance, int(chance.integers(50, 800)))]), int(chance.integers(50, 400))
        )
        if left:
            answered = np.concatenate([request.prompt, tokens(chance, request.length)])
            request.then = lambda end: turn(answered, left - 1, end + chance.exponential(3000))
        return at, request

    begun = [np.concatenate([system, tokens(chance, int(chance.integers(200, 2500)))]) for _ in range(users)]
    return [turn(said, turns - 1, chance.uniform(0, 20_000)) for said in begun]


def beginnings(rate: float, kinds: int, count: int = 1500) -> list[tuple[float, Request]]:
    """Prompts with one of several prefixes of 4,000 tokens, chosen by Zipf's law."""
    chance = np.random.default_rng(0)
    texts = [tokens(chance, 4000) for _ in range(kinds)]
    chosen = np.minimum(chance.zipf(1.3, count) - 1, kinds - 1)
    found = []
    for at, kind in zip(arrivals(chance, rate, count), chosen, strict=True):
        prompt = np.concatenate([texts[kind], tokens(chance, int(chance.integers(20, 200)))])
        found.append((at, Request(prompt, int(chance.integers(20, 300)))))
    return found


TRAFFIC: dict[str, Callable[[], list[tuple[float, Request]]]] = {
    "mixed, 40 a second": lambda: mixed(40),
    "mixed, 65 a second": lambda: mixed(65),
    "150 conversations": lambda: conversations(150),
    "400 conversations": lambda: conversations(400),
    "1 beginning, 80 a second": lambda: beginnings(80, 1),
    "200 beginnings, 60 a second": lambda: beginnings(60, 200),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name, make in TRAFFIC.items():
        for rule in RULES:
            results.append({"traffic": name, "rule": rule} | simulate(make(), rule, args.replicas))
            print("  ".join(f"{value!s:>9}" for value in results[-1].values()))
    if args.json is not None:
        found = {
            "scenario": "routing",
            "replicas": args.replicas,
            "environment": environment("cpu"),
            "results": results,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
