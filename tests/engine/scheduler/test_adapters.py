"""Adapters of requests on the host: slots of the device, the queue, cached prefixes, and unloading."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.fake import make
from torchweave.engine.request import InferenceRequest, Response, SamplingParams
from torchweave.engine.scheduler.parts.adapters import AdapterRows, AdaptersPart
from torchweave.engine.scheduler.step import Step


class Bench:
    """A scheduler with adapters, whose steps are followed as a device would follow them."""

    def __init__(self, max_adapters: int = 2, **sizes: Any) -> None:
        self.scheduler, self.runner = make(max_adapters=max_adapters, **sizes)
        part = self.scheduler.parts.held["adapters"]
        assert isinstance(part, AdaptersPart)
        self.part = part
        self.on_device: dict[int, int] = {}
        self.responses: list[Response] = []
        self.num = 0

    def load(self, *names: str) -> None:
        for name in names:
            self.part.add_adapter(name, self.part.new_number(), f"/{name}")

    def ask(self, adapter: str, prompt: list[int] | None = None, max_tokens: int = 4) -> int:
        self.num += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = InferenceRequest(self.num, np.array(prompt or [1, 2, 3]), params, adapter=adapter)
        assert not self.scheduler.rejection_reason(request)
        self.scheduler.add(request, 0)
        return self.num

    def adapter_of(self, request_id: int) -> int:
        return self.scheduler._running.slots.state_of(self.scheduler._running.slots.slot_of[request_id]).adapter

    def step(self) -> Step | None:
        """Run a step; check that each row reads the matrices of its request's adapter."""
        self.responses += self.scheduler.poll_parts()
        step = self.scheduler.schedule()
        if step is None:
            return None
        payload = step.parts.get("adapters")
        if isinstance(payload, AdapterRows):
            self.on_device.update(payload.loads)
        result = self.runner.launch(step)
        slots = self.scheduler._running.slots
        rows: list[int] = []
        for row, slot in enumerate(step.slots.tolist()):
            expected = slots.state_of(slot).adapter
            value = int(self.runner.state.adapter[slot])
            assert (self.on_device[value - 1] if value else 0) == expected
            count = 1 if row < len(step.starts) else len(step.chunks[row - len(step.starts)].tokens)
            rows += [value] * count
        if step.chunks:
            given = (
                payload.tokens.tolist()
                if isinstance(payload, AdapterRows) and payload.tokens is not None
                else [0] * len(rows)
            )
            assert given == rows
        self.responses += list(self.scheduler.update(step, result))
        return step

    def finish(self) -> list[int]:
        """Run all steps; returns the ids of the requests in the order in which they ended."""
        for _ in range(2000):
            if self.step() is None and not self.scheduler.num_active:
                break
        else:
            pytest.fail("requests do not end")
        return [response.id for response in self.responses if response.final]

    @property
    def running(self) -> set[int]:
        return set(self.scheduler._running.slots.slot_of)


def test_rows_read_their_adapter_and_a_further_one_waits_but_lets_others_pass() -> None:
    bench = Bench(max_adapters=2, max_batch_size=8)
    bench.load("a", "b", "c")
    first = [bench.ask(name) for name in ("a", "b", "c", "", "a", "c")]
    bench.step()
    assert bench.running == {first[0], first[1], first[3], first[4]}
    assert bench.part.num_running == {"a": 2, "b": 1, "c": 0}
    ended = bench.finish()
    assert sorted(ended) == first and set(ended[-2:]) == {first[2], first[5]}
    assert bench.part.num_loads == 3 and not any(bench.part.num_running.values())
    assert all(not response.error for response in bench.responses)


def test_the_slot_of_the_adapter_used_longest_ago_is_taken() -> None:
    bench = Bench(max_adapters=2)
    bench.load("a", "b", "c")
    for name, loads in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4), ("c", 5)):
        bench.ask(name)
        bench.finish()
        assert bench.part.num_loads == loads, name


def test_an_adapter_waits_only_so_long() -> None:
    bench = Bench(max_adapters=1, max_batch_size=2)
    bench.load("a", "b")
    bench.ask("a", max_tokens=3)
    blocked = bench.ask("b")
    for _ in range(400):
        if blocked in {response.id for response in bench.responses if response.final}:
            break
        bench.ask("a", max_tokens=3)
        bench.step()
    else:
        pytest.fail("requests of one adapter kept the slot for ever")


def test_prefixes_are_shared_by_requests_of_one_adapter_alone() -> None:
    bench = Bench(max_adapters=2)
    bench.load("a", "b")
    prompt = list(range(1, 40))

    def reused(adapter: str) -> int:
        before = bench.scheduler.kv.reused_total
        bench.ask(adapter, prompt)
        bench.finish()
        return bench.scheduler.kv.reused_total - before

    assert [reused(name) for name in ("", "a", "b")] == [0, 0, 0]
    assert all(reused(name) for name in ("", "a", "b"))
    bench.part.remove_adapter("a")
    bench.load("a")
    assert not reused("a"), "another adapter under the same name"


def test_unloading_lets_requests_end_and_refuses_later_ones() -> None:
    bench = Bench(max_adapters=1)
    bench.load("a", "b")
    running, waiting = bench.ask("a"), bench.ask("b")
    bench.step()
    number = bench.adapter_of(running)
    for name in ("a", "b"):
        bench.part.remove_adapter(name)
    assert bench.part.take_unused() == []
    why = bench.scheduler.rejection_reason(InferenceRequest(9, np.array([1]), adapter="a"))
    assert why == "There is no adapter 'a'; loaded are: none. Load it first."
    assert bench.finish() == [running, waiting] and not any(response.error for response in bench.responses)
    assert number in bench.part.take_unused() and not bench.part.take_unused()


def test_an_adapter_that_is_unloaded_before_its_request_arrives_ends_it() -> None:
    bench = Bench()
    bench.load("a")
    request = InferenceRequest(7, np.array([1]), SamplingParams(max_tokens=2), adapter="a")
    assert not bench.scheduler.rejection_reason(request)
    bench.part.remove_adapter("a")
    bench.scheduler.add(request, 0)
    other = bench.ask("")
    assert sorted(bench.finish()) == [other, 7]
    assert (
        next(each.error for each in bench.responses if each.id == 7) == "The adapter 'a' was unloaded; load it again."
    )


def test_without_adapters_a_request_with_one_is_refused() -> None:
    scheduler, _ = make()
    why = scheduler.rejection_reason(InferenceRequest(1, np.array([1]), adapter="a"))
    assert why == "The request has the adapter 'a', but adapters are off; start the engine with enable_lora."


@pytest.mark.parametrize("seed", range(3))
def test_random_loads_requests_and_cancellations_never_meet_a_wrong_adapter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bench = Bench(
        max_adapters=int(rng.integers(1, 4)),
        max_batch_size=6,
        policy=str(rng.choice(["guaranteed_no_evict", "max_utilization"])),
    )
    names = list("abcde")
    bench.load(*names)
    for _ in range(500):
        kind = rng.random()
        if kind < 0.35 and bench.scheduler.num_active < 12:
            name = str(rng.choice(["", *bench.part.by_name]))
            bench.ask(name, rng.integers(1, 90, rng.integers(1, 20)).tolist(), int(rng.integers(1, 9)))
        elif kind < 0.4 and bench.scheduler.request_ids:
            bench.responses += bench.scheduler.cancel(int(rng.choice(bench.scheduler.request_ids)))
        elif kind < 0.45:
            name = str(rng.choice(names))
            if name in bench.part.by_name:
                bench.part.remove_adapter(name)
                for number in bench.part.take_unused():
                    assert number not in {bench.adapter_of(each) for each in bench.running}
            else:
                bench.load(name)
        else:
            bench.step()
    bench.finish()
    assert not any(response.error for response in bench.responses)
    assert len({response.id for response in bench.responses if response.final}) == bench.num
