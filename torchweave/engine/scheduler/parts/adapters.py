"""Low-rank adapters: which adapter is in which slot of the device, and that of each row.

A request starts when its adapter has an adapter slot, or there is one that no running request uses; others pass it meanwhile, but
not for ever. The adapter used longest ago leaves its slot first. Its matrices stay in host memory until it is unloaded and no
request has it.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import InferenceRequest
from torchweave.engine.scheduler.parts.base import Host, StepPart, StepRows
from torchweave.engine.scheduler.request_state import RequestState
from torchweave.engine.scheduler.step import Payload

_MAX_PASSES = 256
"""Requests with adapters that may start before one that waits for an adapter slot."""


@dataclass(frozen=True)
class AdapterRows(Payload):
    """Adapters of a step.

    Attributes:
        loads: (adapter slot, number of the adapter) of those to copy to the device before the step.
        tokens: int32 [tokens] of a step with chunks, 0 for no adapter, s + 1 for that in adapter slot s; None without chunks.
    """

    loads: tuple[tuple[int, int], ...]
    tokens: np.ndarray | None


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in host memory.

    Attributes:
        number: unlike that of any other, also of an earlier one of the same name.
        path: its folder.
        cache_key: of its prefixes, which nobody can guess.
    """

    name: str
    number: int
    path: str
    cache_key: str


class AdaptersPart(StepPart):
    """Gives adapters to slots.

    Attributes:
        by_name: the adapters that requests may name; read from any thread.
        num_loads: copies to the device so far.
    """

    name = "adapters"

    @classmethod
    def needed(cls, host: Host) -> bool:
        return host.limits.max_adapters > 0

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.by_name: dict[str, LoadedAdapter] = {}
        self.num_loads = 0
        self._numbers = itertools.count(1)
        self._slots: OrderedDict[int, int] = OrderedDict()  # adapter slot by number, the one used longest ago first
        self._num_running: dict[int, int] = {}  # requests by number
        self._of_slot = np.zeros(host.limits.max_batch_size, np.int32)
        self._adapter_of: dict[int, int] = {}  # number by slot of a running request
        self._loads: list[tuple[int, int]] = []
        self._lost: list[RequestState] = []
        self._removed: set[int] = set()
        self._num_starts = 0
        self._passed_since: dict[int, int] = {}  # `_num_starts` when a request was passed first, by its id
        host.waiting.new_filter = self._new_filter

    # -- adapters ------------------------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """A number for an adapter that is being loaded."""
        return next(self._numbers)

    def add_adapter(self, name: str, number: int, path: str) -> None:
        """Let requests name an adapter whose matrices are in the memory of all ranks; one of the same name is replaced."""
        if name in self.by_name:
            self.remove_adapter(name)
        self.by_name[name] = LoadedAdapter(name, number, path, secrets.token_hex(16))

    def remove_adapter(self, name: str) -> None:
        """Take an adapter from later requests; those that have it keep it."""
        self._removed.add(self.by_name.pop(name).number)

    def take_unused(self) -> list[int]:
        """Numbers of removed adapters that no request has any more, whose matrices the ranks may drop."""
        waiting = {state.adapter for state in (*self.host.waiting, *self.host.waiting.held.values())}
        unused = sorted(self._removed - waiting - {number for number, count in self._num_running.items() if count})
        self._removed.difference_update(unused)
        for number in unused:
            self._slots.pop(number, None)
            self._num_running.pop(number, None)
        return unused

    @property
    def num_running(self) -> dict[str, int]:
        """Running requests of each adapter, by its name."""
        return {name: self._num_running.get(adapter.number, 0) for name, adapter in self.by_name.items()}

    # -- a request -----------------------------------------------------------------------------------------------------

    def rejection_reason(self, request: InferenceRequest) -> str:
        if not request.adapter or request.adapter in self.by_name:
            return ""
        names = ", ".join(sorted(self.by_name)) or "none"
        return f"There is no adapter {request.adapter!r}; loaded are: {names}. Load it first."

    def add(self, state: RequestState) -> None:
        if not state.request.adapter:
            return
        adapter = self.by_name.get(state.request.adapter)
        if adapter is None:  # unloaded since the request was checked
            self._lost.append(state)
            self.has_events = True
        else:
            state.adapter, state.adapter_key = adapter.number, adapter.cache_key

    def poll(self) -> Iterable[RequestState]:
        lost, self._lost, self.has_events = self._lost, [], False
        ended = [state for state in lost if self.host.waiting.remove(state.request.id) is not None]
        for state in ended:
            state.reason, state.error = "error", f"The adapter {state.request.adapter!r} was unloaded; load it again."
        return ended

    def _new_filter(self) -> Callable[[RequestState], bool]:
        """Whether requests may start, asked in the order of the queue: each that may is assumed to start."""
        num_free = self.host.limits.max_adapters - sum(count > 0 for count in self._num_running.values())
        starting: set[int] = set()
        others_wait = False

        def may_start(state: RequestState) -> bool:
            nonlocal others_wait
            if not state.request.adapter:
                return True
            number = state.adapter
            if others_wait or not number:
                return False
            if self._num_running.get(number) or number in starting:
                return True
            if len(starting) < num_free:
                starting.add(number)
                return True
            since = self._passed_since.setdefault(state.request.id, self._num_starts)
            others_wait = self._num_starts - since >= _MAX_PASSES
            return False

        return may_start

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        number, value = state.adapter, 0
        if number:
            value = self._slot_of(number) + 1
            self._num_running[number] = self._num_running.get(number, 0) + 1
            self._adapter_of[slot] = number
            self._num_starts += 1
            self._passed_since.pop(state.request.id, None)
            if not self.host.waiting:
                self._passed_since.clear()
        for each in self.host.running.slots_of(slot):
            if self._of_slot[each] != value:
                self._of_slot[each] = value
                self.host.updates.set("adapter", each, value)
        return bool(number)

    def _slot_of(self, number: int) -> int:
        """The adapter slot of an adapter, which is copied there unless it is there already."""
        if number in self._slots:
            self._slots.move_to_end(number)
            return self._slots[number]
        if len(self._slots) < self.host.limits.max_adapters:
            slot = min(set(range(self.host.limits.max_adapters)) - set(self._slots.values()))
        else:
            oldest = next(each for each in self._slots if not self._num_running.get(each))
            slot = self._slots.pop(oldest)
        self._slots[number] = slot
        self._loads.append((slot, number))
        self.num_loads += 1
        return slot

    def release(self, slot: int) -> None:
        number = self._adapter_of.pop(slot)
        self._num_running[number] -= 1

    # -- a step --------------------------------------------------------------------------------------------------------

    def payload(self, rows: StepRows) -> AdapterRows | None:
        loads, self._loads = tuple(self._loads), []
        tokens = None
        if rows.chunks:
            sizes = [len(chunk.tokens) for _, chunk in rows.chunks]
            of_chunks = np.repeat(self._of_slot[[slot for slot, _ in rows.chunks]], sizes)
            tokens = np.concatenate([self._of_slot[rows.decode_rows], of_chunks])
        return AdapterRows(loads, tokens) if loads or tokens is not None else None

    def clear(self) -> None:
        self._loads.clear()
        self._slots.clear()
        self._lost.clear()
        self._of_slot[:] = -1  # updates that did not travel are lost


PART = AdaptersPart
