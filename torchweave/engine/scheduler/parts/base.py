"""Parts of a step on the host: what a step can carry beyond decoding, one part a file.

A part of the same name in `torchweave.engine.runner.parts` runs what it carries on the device. An engine holds the parts that its
model and options need. Of these a step asks the *active* ones, which running requests use, in the order of `STEP_PARTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.image_rows import ImageRows
from torchweave.engine.kv_cache.prefix_index import PrefixHit
from torchweave.engine.request import FinishReason, InferenceRequest
from torchweave.engine.sampling.logits_processors import Processor
from torchweave.engine.sampling.structured_output import GrammarManager
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.request_state import RequestState, WaitingQueue
from torchweave.engine.scheduler.running_set import RunningSet, SlotGroup
from torchweave.engine.scheduler.speculation import AdaptiveDrafts, SpeculationCounts
from torchweave.engine.scheduler.step import Chunk, Payload, Step, StepResult
from torchweave.ops.slot_state import SlotUpdates
from torchweave.utils.registry import Registry

_HERE = "torchweave.engine.scheduler.parts"
_NAMES = (
    "beams", "adapters", "prompt_logprobs", "states", "images", "drafts", "device_processors", "processors", "logprobs",
    "pooled",
)  # fmt: skip
STEP_PARTS: Registry[type[StepPart]] = Registry(
    "step part",
    "torchweave.step_parts",
    {name: f"{_HERE}.{name}:PART" for name in _NAMES},
    needs=("name", "needed", "payload", "take"),
)
"""Classes of parts by name, in the order in which they run on host and device; others come after Torchweave's own."""


@dataclass(frozen=True)
class Resources:
    """What the model and the options bring for parts.

    Attributes:
        grammars: of structured outputs; None if the model has no tokenizer.
        image_rows: the pool of images; None for a model without images.
        adaptive_drafts: selects the number of drafts of each step; None: as many as the limits allow.
        plugins: see `EngineConfig.plugins`.
        logits_processors: classes that the option names.
    """

    grammars: GrammarManager | None = None
    image_rows: ImageRows | None = None
    adaptive_drafts: AdaptiveDrafts | None = None
    plugins: tuple[str, ...] | None = None
    logits_processors: Sequence[Processor] = ()


@dataclass(frozen=True)
class Host:
    """What a part may use.

    Attributes:
        updates: collects updates of device state for the next step.
        waiting: the requests that do not run.
        speculation: drafts so far.
        finish: ends the request in a slot; its final response follows when no step in flight has it.
    """

    limits: Limits
    kv: BlockManager
    running: RunningSet
    updates: SlotUpdates
    waiting: WaitingQueue
    resources: Resources
    speculation: SpeculationCounts
    finish: Callable[[int, FinishReason], None]


@dataclass(frozen=True)
class StepRows:
    """The rows of a step that is being built; `num_computed` of its slots is that after the step.

    Attributes:
        index: of the step.
        slots: int32 [rows], decode rows first.
        emits: bool [rows], see `Step.emits`.
        decode_rows: int32, the decode rows among `slots`.
        chunks: slot and tokens of each prefill row.
        query_len: see `Step.query_len`.
        forks: (parent slot, slot) of each sequence that begins as a copy of another one.
        extra_rows: decode rows beyond one per request.
    """

    index: int
    slots: np.ndarray
    emits: np.ndarray
    decode_rows: np.ndarray
    chunks: Sequence[tuple[int, Chunk]]
    query_len: int
    forks: Sequence[tuple[int, int]]
    extra_rows: int


@dataclass(frozen=True)
class StoredRows:
    """Rows of a completed step whose tokens were stored.

    Attributes:
        slots: int [n], their slots.
        tokens: int32 [n], the last token of each.
        ended: bool [n], requests that end with it.
    """

    step: Step
    result: StepResult
    slots: np.ndarray
    tokens: np.ndarray
    ended: np.ndarray


class StepPart:
    """One part of the steps of an engine; each method has a default that does nothing.

    Attributes:
        name: of the part, on host and device.
        has_events: `poll` waits for something.
    """

    name: ClassVar[str]

    @classmethod
    def needed(cls, host: Host) -> bool:
        """Whether an engine holds the part: by default, one that generates tokens."""
        return host.limits.pooling is None

    def __init__(self, host: Host) -> None:
        self.host = host
        self.has_events = False

    # -- a request -----------------------------------------------------------------------------------------------------

    def rejection_reason(self, request: InferenceRequest) -> str:
        """Why a request can never run, in a sentence; empty if it can. From any thread."""
        return ""

    def add(self, state: RequestState) -> None:
        """Prepare a request that arrives."""

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> bool:
        """A request takes `slot`, at first or after a pause, after the cached prefix `hit`; returns whether it uses the part."""
        return False

    def release(self, slot: int) -> None:
        """A request that uses the part leaves `slot`: it has ended or is paused."""

    def answer(self, state: RequestState, fields: dict[str, Any]) -> None:
        """Enter what the part answers into the fields of the request's next `Output`."""

    def poll(self) -> Iterable[RequestState]:
        """Look at what the part waits for; returns waiting requests that end with it."""
        return ()

    # -- before a step -------------------------------------------------------------------------------------------------

    def fit(self, chunks: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
        """Cut or delay prompts: (slot, number of tokens) each, for which the step has room for `room` tokens."""
        return chunks

    def runnable(self, decoding: np.ndarray) -> np.ndarray:
        """The decode slots that may take a token now."""
        return decoding

    def add_rows(self, groups: Sequence[SlotGroup]) -> tuple[np.ndarray, Sequence[tuple[int, int]]] | None:
        """The slots of the decode rows of `groups`, int32, and their `StepRows.forks`."""
        return None

    def query_len(self, decoding: np.ndarray) -> int:
        """Most tokens of a row in a step of the slots `decoding` alone."""
        return 1

    def payload(self, rows: StepRows) -> Payload | None:
        """What the step carries; None for nothing."""
        return None

    # -- after a step --------------------------------------------------------------------------------------------------

    def take(self, step: Step, result: StepResult, rows: np.ndarray) -> np.ndarray:
        """Process a result.

        Args:
            rows: int, rows that emit a token of a request that has not ended.

        Returns:
            Those whose tokens the scheduler stores.
        """
        return rows

    def stored(self, rows: StoredRows) -> None:
        """Follow the tokens of a step, once they are stored and requests that end are finished."""

    def clear(self) -> None:
        """Forget all requests."""


class Parts:
    """The parts that an engine holds.

    Attributes:
        held: by name, in the order in which they run.
        active: those that running requests use.
    """

    def __init__(self, host: Host) -> None:
        plugins = host.resources.plugins
        classes = (STEP_PARTS.get(name, plugins) for name in STEP_PARTS.names(plugins))
        self.held: dict[str, StepPart] = {part.name: part(host) for part in classes if part.needed(host)}
        self.active: tuple[StepPart, ...] = ()
        self._used: dict[int, tuple[str, ...]] = {}  # by slot
        self._num_users = dict.fromkeys(self.held, 0)

    def start(self, slot: int, state: RequestState, hit: PrefixHit) -> None:
        """Start a request in all parts; see `StepPart.start`."""
        used = tuple(name for name, part in self.held.items() if part.start(slot, state, hit))
        if used:
            self._used[slot] = used
            self._count(used, 1)

    def release(self, slot: int) -> None:
        """Release the request of a slot, by its first one."""
        if used := self._used.pop(slot, ()):
            for name in used:
                self.held[name].release(slot)
            self._count(used, -1)

    def _count(self, names: Iterable[str], change: int) -> None:
        for name in names:
            self._num_users[name] += change
        self.active = tuple(part for name, part in self.held.items() if self._num_users[name])

    def answer(self, state: RequestState, slot: int | None = None) -> dict[str, Any]:
        """Fields of the next `Output` of a request, in `slot` if it runs."""
        fields: dict[str, Any] = {}
        for name in self.held if slot is None else self._used.get(slot, ()):
            self.held[name].answer(state, fields)
        return fields

    def payloads(self, rows: StepRows) -> dict[str, Payload]:
        """What a step carries, by the name of the part."""
        carried = ((part.name, part.payload(rows)) for part in self.active)
        return {name: payload for name, payload in carried if payload is not None}

    def clear(self) -> None:
        """Forget all requests."""
        for slot in list(self._used):
            self.release(slot)
        for part in self.held.values():
            part.clear()
