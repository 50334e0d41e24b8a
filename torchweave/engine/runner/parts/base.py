"""Parts of a step on the device: each runs what the part of the same name in `torchweave.engine.scheduler.parts` carries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchweave.compiler.runtime.forward import BoundaryHandler
from torchweave.config import Plan
from torchweave.engine.runner.step_boundary import StepBoundary
from torchweave.engine.runner.step_buffers import StepBuffers
from torchweave.engine.scheduler.step import Step
from torchweave.ops.attention.op import LayerKVCache
from torchweave.ops.low_rank import AdapterSlots
from torchweave.ops.slot_state import SlotState, StepInputs
from torchweave.utils.registry import Registry

_HERE = "torchweave.engine.runner.parts"
_NAMES = (
    "beams", "adapters", "prompt_logprobs", "states", "images", "drafts", "device_processors", "processors", "logprobs",
    "pooled",
)  # fmt: skip
RUNNER_PARTS: Registry[type[RunnerPart]] = Registry(
    "runner part",
    "torchweave.runner_parts",
    {name: f"{_HERE}.{name}:PART" for name in _NAMES},
    needs=("name", "needed", "before", "after"),
)
"""Classes of parts by name; a step runs them in the order in which it carries them."""


@dataclass(frozen=True)
class Device:
    """What a part may use.

    Attributes:
        buffers: inputs and outputs of steps.
        caches: paged KV cache, by layer.
        recurrent_states: `[rows, ...]` each, rows of slots, then of snapshots.
        stream: of the steps; None on a CPU.
        draft_model: see `torchweave.engine.runner.parts.drafts.DraftModel`.
        both_ways: tokens of some steps see keys after them.
        adapter_slots: memory of low-rank adapters; None: without adapters.
        min_size: least number of tokens and rows of a step.
        boundary: makes the boundary of a forward, see `StepPrograms.boundary`.
        run_model: runs the model, see `StepPrograms.run_model`.
        draft_inputs: further inputs of the model in a step with drafts, see `InStepPart.draft_inputs`.
        parts: those that were made before, by name.
    """

    plan: Plan
    state: SlotState
    buffers: StepBuffers
    caches: Sequence[LayerKVCache]
    recurrent_states: Sequence[Tensor]
    stream: torch.cuda.Stream | None
    draft_model: Any
    both_ways: bool
    adapter_slots: AdapterSlots | None
    min_size: int
    boundary: Callable[..., StepBoundary]
    run_model: Callable[..., Tensor]
    draft_inputs: Callable[[Tensor, Tensor, int], tuple[Tensor, ...]]
    parts: dict[str, RunnerPart] = field(default_factory=dict)

    def on_host(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copies on the host, which are filled when the step ends."""
        if self.stream is None:
            return tuple(tensors)
        return tuple(torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors)

    def upload(self, array: np.ndarray) -> Tensor:
        """A copy on the device."""
        return torch.from_numpy(array).to(self.state.device, non_blocking=True)


@dataclass(frozen=True)
class StepOutput:
    """What a step has computed when the parts follow it.

    Attributes:
        logits: [N, V], first those of the rows (with drafts `query_len` entries a row).
        tokens: int32 [N], the sampled tokens.
        out: int32 [N], what is returned for each, see `StepResult.tokens`.
        further_logits: [n, V] of `RunnerPart.further_logits`, by part.
    """

    step: Step
    logits: Tensor
    tokens: Tensor
    out: Tensor
    further_logits: dict[str, Tensor]


class RunnerPart:
    """One part on the device; each method has a default that does nothing. It runs on the current stream without waiting.

    Attributes:
        name: of the part, on host and device.
        needs_logits: `after` reads logits, which only the last pipeline stage has.
    """

    name: ClassVar[str]
    needs_logits: ClassVar[bool] = True

    @classmethod
    def needed(cls, device: Device) -> bool:
        """Whether a runner holds the part: by default, that of a model that generates tokens."""
        return device.plan.pooling is None

    def __init__(self, device: Device) -> None:
        self.device = device

    def further_logits(self, payload: Any) -> Tensor | None:
        """Index of further tokens of a step with chunks whose logits the part reads, int64 [n]; such a step is not recorded."""
        return None

    def before(self, payload: Any, step: Step) -> None:
        """Run what the step carries before the model, after the updates of the slots."""

    def after(self, payload: Any, output: StepOutput) -> Any:
        """Run it after the step; returns what `collect` takes, None for no result."""
        return None

    def collect(self, pending: Any) -> Any:
        """The part's result, once the step has ended."""
        return pending


class InStepPart(RunnerPart):
    """A part that is within the computation of every step, also of recorded ones.

    Attributes:
        num_inputs: numbers for each token, int32, that a step with chunks uploads for the part.
        sample: fills the tokens of rows, as `torchweave.ops.sampling.sample.sample`, which it replaces; None: nothing.
        reduce: makes the rows of a step of those of all its tokens, `(rows[T, ...], query_start)`; None: the model does.
        keep: makes the logits of what the model returns, `(result, inputs)`; None: the model returns logits.
    """

    num_inputs: int = 0
    sample: Callable[[Tensor, Tensor, SlotState, Tensor], None] | None = None
    reduce: Callable[[Tensor, Tensor], Tensor] | None = None
    keep: Callable[[Any, StepInputs], Tensor] | None = None

    def pack(self, payload: Any, out: np.ndarray) -> None:
        """Write the inputs of a step with chunks into `out`, int32 [num_inputs, tokens] of zeros."""

    def mixed_inputs(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Further inputs of the model in a step with chunks, from `packed`, int32 [num_inputs, T]."""
        return ()

    def decode_inputs(self, slots: Tensor) -> tuple[Tensor, ...]:
        """The same in a decode step of `slots`, int32 [R]."""
        return ()

    def draft_inputs(self, slots: Tensor, query_start: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """The same in a step with drafts, of `tokens` tokens."""
        return ()

    def lookahead(self, tokens: int) -> Tensor | None:
        """`AttentionMetadata.lookahead` of a step with chunks, which `mixed_inputs` fills."""
        return None

    def before_advance(self, slots: Tensor, query_start: Tensor, inputs: StepInputs) -> None:
        """Follow the model in a step with chunks, before the slots advance."""

    def after_advance(
        self, boundary: BoundaryHandler, slots: Tensor, query_start: Tensor, inputs: StepInputs, logits_index: Tensor
    ) -> None:
        """The same after they have; `inputs.ids` may be overwritten."""


def make_parts(device: Device) -> dict[str, RunnerPart]:
    """The parts that a runner holds, by name."""
    plugins = device.plan.config.plugins
    classes = (RUNNER_PARTS.get(name, plugins) for name in RUNNER_PARTS.names(plugins))
    for part in classes:
        if part.needed(device):
            device.parts[part.name] = part(device)
    return device.parts


def check_parts(held: Iterable[str], plugins: Collection[str] | None) -> None:
    """Check that each of the host's parts has one for the device.

    Raises:
        ValueError: an installed package has one without the other.
    """
    if missing := sorted(set(held) - set(RUNNER_PARTS.names(plugins))):
        raise ValueError(
            f"The step part {missing[0]} has no runner part; add an entry point {RUNNER_PARTS.group} for it"
        )
