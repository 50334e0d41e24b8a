"""Build the kernels that steps launch in worker processes while the model is captured.

A placeholder forward replaces the model in real steps: it calls attention, experts and quantised linears as every kind of layer
does, and returns zero logits. Its launches are first recorded, to find the missing kernels, and executed once those are built.
Kernels missed here are built on first use. Linears of few tokens are built with the pieces that call them
(`torchweave.compiler.precompile.precompile`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchweave.compiler.precompile.kernel_jobs import (
    KernelSpec,
    hash_launches_inner_first,
    kernel_specs,
    missing_kernels,
    wait_for_kernels,
)
from torchweave.compiler.precompile.workers import KernelWorkers
from torchweave.compiler.runtime.forward import BoundaryHandler
from torchweave.config import Plan
from torchweave.engine.runner.memory import KVCacheSpec
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.engine.runner.parts.drafts import DraftModel
from torchweave.engine.runner.parts.processors import Resampler
from torchweave.engine.scheduler.parts.processors import LogitsProcessorRows
from torchweave.models.decoder import DecoderStep
from torchweave.models.experts import launch_samples
from torchweave.models.weights.int_linear import distinct_int_linears
from torchweave.models.weights.quantize import distinct_linears
from torchweave.ops.attention.op import LayerSpec
from torchweave.ops.kernels.sampling.layout import MASK, NUM_FIELDS
from torchweave.ops.recurrent.op import RecurrentSpec
from torchweave.ops.slot_state import SlotState
from torchweave.report import Report

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
"""Step sizes that together launch every kernel of steps of any size."""
_LENGTHS = tuple(4**power for power in range(9))
"""Longest sequences of steps that are not recorded: attention splits a context by the longest one."""
_BLOCKS = 2
_KERNEL_WAIT_SECONDS = 15.0  # without a new kernel from the rank that builds them
_log = logging.getLogger("torchweave")


class PlaceholderForward:
    """A forward that launches the kernels of a model with these layers and weights, on zeros.

    Args:
        recurrent: calls of recurrent ops, by the index of their state.
        hidden_size: of the hidden states that are returned behind the logits, of all tokens, or by a draft head of those with
            logits; 0: logits alone.
        traceable: launch nothing after which a torch operation depends on what kernels wrote, as it does in 16-bit experts.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[LayerSpec],
        num_outputs: int,
        dtype: torch.dtype,
        recurrent: Sequence[RecurrentSpec] = (),
        hidden_size: int = 0,
        traceable: bool = False,
    ) -> None:
        self._hidden_size, self._traceable = hidden_size, traceable
        self._module = module
        self._recurrent = recurrent
        unscaled = [replace(layer, k_scale=1.0, v_scale=1.0) for layer in layers]
        self._layers = {layer: index for index, layer in reversed(list(enumerate(unscaled)))}
        self._num_outputs = num_outputs
        self._dtype = dtype
        self._fp8 = [each.detached() for each in distinct_linears(module)]
        self._integer = [each.detached() for each in distinct_int_linears(module)]

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Any:
        ids, _, index, *others = inputs
        tokens, device = ids.shape[0], ids.device
        for quantized in self._fp8:
            # Not by calling the module: torch.fx, tracing in another thread, intercepts calls of every module.
            quantized.forward(torch.zeros(tokens, quantized.in_features, dtype=self._dtype, device=device))
        for linear in self._integer:
            linear.launch_samples(torch.zeros(tokens, linear.in_features, dtype=self._dtype, device=device))
        launch_samples(self._module, tokens, quantized_only=self._traceable)
        for layer, number in self._layers.items():
            if layer.sparse or layer.index_keys:
                continue  # runs in torch
            q, k, v = (
                torch.zeros(tokens, heads, dim, dtype=self._dtype, device=device)
                for heads, dim in (
                    (layer.num_heads, layer.head_dim),
                    (layer.num_kv_heads, layer.head_dim),
                    (layer.num_kv_heads, layer.value_dim),
                )
            )
            out = torch.empty(tokens, layer.num_heads, layer.value_dim, dtype=self._dtype, device=device)
            sinks = torch.zeros(layer.num_heads, dtype=self._dtype, device=device) if layer.sinks else None
            # Attention applies RoPE in models that rotate whole heads, which are most.
            angles = torch.zeros(2, tokens, layer.head_dim, dtype=self._dtype, device=device).unbind()
            arguments = (q, k, v, out, number, 1.0, layer.window, layer.softcap, sinks, layer.chunk, *angles)
            slopes = {"alibi_slopes": torch.zeros(layer.num_heads, device=device)} if layer.alibi else {}
            boundary(torch.ops.torchweave.attention.default, arguments, slopes)
        for state, call in enumerate(self._recurrent):
            boundary(call.op, _with_gates(call.op, call.zeros(tokens, state, device)), {})
        logits = torch.zeros(index.shape[0], self._num_outputs, dtype=self._dtype, device=device)
        if not self._hidden_size:
            return logits
        rows = len(logits) if others else tokens
        return logits, torch.zeros(rows, self._hidden_size, dtype=self._dtype, device=device)


def _with_gates(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a recurrent op as the pass `delta_gates` leaves them, in models whose gates are of its form."""
    if op is not torch.ops.torchweave.gated_delta.default or args[3].ndim > 2:
        return args
    q, k, v, g, beta, *others = args[:8]
    gate = torch.zeros(beta.shape[1], dtype=beta.dtype, device=beta.device)
    return (q, k, v, g.to(beta.dtype), beta, *others, gate, gate)


def launch_resample(state: SlotState, logits: Tensor) -> None:
    """Launch the kernels of a resampled row, in a state without running requests. logits [1, V]."""
    rows = np.zeros((NUM_FIELDS, 1), np.int32)
    rows[MASK] = -1
    tokens, out = (torch.zeros(1, dtype=torch.int32, device=logits.device) for _ in range(2))
    Resampler(state)(LogitsProcessorRows(rows), logits, tokens, out)


@dataclass(frozen=True)
class KernelBuilds:
    """Kernels that are built on a thread.

    Attributes:
        of_steps: set once the kernels of steps are built and launched.
        complete: set once those of resampled rows are built, too, which takes no GPU.
    """

    of_steps: threading.Event = field(default_factory=threading.Event)
    complete: threading.Event = field(default_factory=threading.Event)


def start(
    plan: Plan,
    module: DecoderStep,
    cache_spec: KVCacheSpec,
    builds_kernels: bool = True,
    draft: DecoderStep | None = None,
) -> KernelBuilds:
    """Start to build on a thread; on a CPU there are no kernels.

    Args:
        builds_kernels: False waits for another rank of this machine, which builds the same kernels.
        draft: a draft model, whose layers are the last of the cache.
    """
    builds = KernelBuilds()
    if not plan.device.startswith("cuda"):
        builds.of_steps.set()
        builds.complete.set()
        return builds

    def build() -> None:
        try:
            with ExitStack() as stack:
                workers, resample_kernels = _build(plan, module, cache_spec, builds_kernels, stack, draft)
                builds.of_steps.set()  # memory is measured and graphs are recorded now: this thread no longer uses the GPU
                if workers is not None:
                    workers.begin(resample_kernels)
                    _log_failed_builds(workers.finish())
        except Exception:
            _log.exception("Building kernels ahead of time failed; they are built on first use.")
        finally:
            builds.of_steps.set()
            builds.complete.set()

    threading.Thread(target=build, name="torchweave-warm-up", daemon=True).start()
    return builds


def _build(
    plan: Plan,
    module: DecoderStep,
    cache_spec: KVCacheSpec,
    builds_kernels: bool,
    stack: ExitStack,
    draft: DecoderStep | None,
) -> tuple[KernelWorkers | None, list[KernelSpec]]:
    """Build and launch the kernels of steps. Returns the workers, which `stack` ends, and the missing kernels of resampling."""
    device, layers, dtype = cache_spec.device, cache_spec.layers, cache_spec.dtype
    width = -(-plan.max_model_len // plan.block_size)
    state = SlotState(plan.max_batch_size, width, device=device, history_len=plan.history_len)
    # One cache a layer, all in group 0: the layout of the real cache changes no kernel.
    caches = [cache_spec.backend.allocate(layer, _BLOCKS, plan.block_size, dtype, device) for layer in layers]
    recurrent = list({call.key: call for call in cache_spec.recurrent}.values())
    recurrent_states = [torch.zeros(1, *call.shape, dtype=call.dtype, device=device) for call in recurrent]

    hidden_size = 0 if draft is None else draft.input_hidden_size

    def placeholders(traceable: bool) -> tuple[PlaceholderForward, DraftModel | None]:
        forward = PlaceholderForward(module, layers, module.num_outputs, dtype, recurrent, hidden_size, traceable)
        if draft is None:
            return forward, None
        first, vocab_size = len(layers) - len(draft.attention_layers), draft.vocab_size
        drafts = PlaceholderForward(draft, layers[first:], vocab_size, dtype, (), hidden_size, traceable)
        return forward, DraftModel(drafts, first, module.vocab_size, is_head=hidden_size > 0)

    def steps(forward: PlaceholderForward, draft_model: DraftModel | None) -> None:
        quiet, both_ways = Report(show=False), cache_spec.both_ways
        runner = ModelRunner(
            plan, forward, cache_spec.backend, caches, state, quiet, recurrent_states, draft_model, both_ways
        )
        runner.start()
        state.write(np.zeros(1, np.int32), np.zeros(1, np.int32))  # as a new request does
        for tokens in _TOKENS:
            runner.run_dummy_step(min(tokens, plan.max_num_tokens))
            runner.run_dummy_decode_step(min(tokens, plan.max_batch_size))
            for query_len in plan.query_lens:
                runner.run_dummy_draft_step(min(tokens, plan.max_drafting_rows), query_len)
        for length in _LENGTHS:
            runner.run_dummy_step(1, min(length, plan.max_model_len))

    def resample() -> None:
        with torch.inference_mode():
            launch_resample(state, torch.zeros(1, module.vocab_size, dtype=dtype, device=device))

    hash_launches_inner_first()
    traced, executed = placeholders(traceable=True), placeholders(traceable=False)  # before passes move weights
    needed = missing_kernels(kernel_specs(lambda: steps(*traced)))
    resample_kernels: list[KernelSpec] = []
    if builds_kernels:
        resample_kernels = [spec for spec in missing_kernels(kernel_specs(resample)) if spec not in needed]
    else:
        needed = wait_for_kernels(needed, _KERNEL_WAIT_SECONDS)
    workers = stack.enter_context(KernelWorkers()) if needed or resample_kernels else None
    if workers is not None:
        workers.begin(needed)
        _log_failed_builds(workers.finish())
    steps(*executed)
    torch.cuda.synchronize(device)
    return workers, resample_kernels


def _log_failed_builds(failed: Sequence[str]) -> None:
    if failed:
        _log.warning("%d kernels could not be built ahead of time; the first error: %s", len(failed), failed[0])
