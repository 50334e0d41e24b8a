"""Build the kernels that steps launch while the model is still being captured, in processes of their own.

A stand-in takes the model's place in real steps: it calls attention, experts and quantised products as every kind of layer does,
and returns logits of nothing. First its launches are only looked at, for what has to be built; when that is done they are carried
out. What it misses is built later, when it is first needed; nothing depends on it. Products of few tokens are built beside the
pieces that call them (`torchweave.compiler.precompile.precompile`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from torchweave.compiler.precompile.kernel_jobs import KernelSpec, kernel_specs, missing_kernels, wait_for_kernels
from torchweave.compiler.precompile.workers import KernelWorkers
from torchweave.compiler.runtime.cuda_graphs import BoundaryHandler
from torchweave.config import Plan
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.engine.runner.resample import Resampler
from torchweave.engine.scheduler.step import LogitsProcessorRows
from torchweave.models.experts import launch_samples
from torchweave.models.weights.quantize import distinct_linears
from torchweave.ops.attention.op import AttentionBackend, LayerSpec
from torchweave.ops.sampling.logits_processors import MASK, NUM_FIELDS
from torchweave.ops.slot_state import SlotState
from torchweave.report import Report

_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
"""Of steps that together launch every kernel that a step of any size launches."""
_LENGTHS = tuple(4**power for power in range(9))
"""Of sequences of steps that are not recorded: in how many parts a context is read depends on the longest."""
_BLOCKS = 2
_KERNEL_WAIT_SECONDS = 15.0  # seconds without a kernel of the rank that builds them
_log = logging.getLogger("torchweave")


class PlaceholderForward:
    """A forward that launches what a model of these layers and weights launches, on zeros."""

    def __init__(self, module: nn.Module, layers: Sequence[LayerSpec], vocab_size: int, dtype: torch.dtype) -> None:
        self._module = module
        unscaled = [replace(layer, k_scale=1.0, v_scale=1.0) for layer in layers]
        self._layers = {layer: index for index, layer in reversed(list(enumerate(unscaled)))}
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._fp8 = [each.detached() for each in distinct_linears(module)]

    def __call__(self, boundary: BoundaryHandler, *inputs: Tensor) -> Tensor:
        ids, _, index = inputs
        tokens, device = ids.shape[0], ids.device
        for quantized in self._fp8:
            # Not by calling the module: whoever traces a graph in another thread catches calls of all modules.
            quantized.forward(torch.zeros(tokens, quantized.in_features, dtype=self._dtype, device=device))
        launch_samples(self._module, tokens)
        for layer, number in self._layers.items():
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
            # Most decoders turn whole heads, which attention does for them.
            angles = torch.zeros(2, tokens, layer.head_dim, dtype=self._dtype, device=device).unbind()
            arguments = (q, k, v, out, number, 1.0, layer.window, layer.softcap, sinks, layer.chunk, *angles)
            boundary(torch.ops.torchweave.attention.default, arguments, {})
        return torch.zeros(index.shape[0], self._vocab_size, dtype=self._dtype, device=device)


def launch_resample(state: SlotState, logits: Tensor) -> None:
    """Launch what a row with changed logits launches, in a state that nothing runs in. logits [1, V]."""
    rows = np.zeros((NUM_FIELDS, 1), np.int32)
    rows[MASK] = -1
    tokens, out = (torch.zeros(1, dtype=torch.int32, device=logits.device) for _ in range(2))
    Resampler(state)(LogitsProcessorRows(rows), logits, tokens, out)


def start(
    plan: Plan,
    module: nn.Module,
    layers: Sequence[LayerSpec],
    vocab_size: int,
    backend: AttentionBackend,
    dtype: torch.dtype,
    builds_kernels: bool = True,
) -> threading.Event | None:
    """Begin on a thread of its own. The event is set when what steps need is there; None on a CPU: there is nothing to build.

    Args:
        builds_kernels: off: another rank of this machine builds the same kernels, and this one waits for them.
    """
    if not plan.device.startswith("cuda"):
        return None
    done = threading.Event()

    def build() -> None:
        try:
            with ExitStack() as stack:
                workers, resample_orders = _build(
                    plan, module, layers, vocab_size, backend, dtype, stack, builds_kernels
                )
                done.set()  # from now on memory is measured and steps are recorded: nothing here touches the GPU
                if workers is not None:
                    workers.begin(resample_orders)
                    _log_failed_builds(workers.finish())
        except Exception:
            _log.exception("Building kernels ahead failed; they are built when they are first needed.")
        finally:
            done.set()

    threading.Thread(target=build, name="torchweave-warm-up", daemon=True).start()
    return done


def _build(
    plan: Plan,
    module: nn.Module,
    layers: Sequence[LayerSpec],
    vocab_size: int,
    backend: AttentionBackend,
    dtype: torch.dtype,
    stack: ExitStack,
    builds_kernels: bool,
) -> tuple[KernelWorkers | None, list[KernelSpec]]:
    """Build what steps launch, and launch it. Returns what redrawn rows launch, and who can build that; the stack ends them."""
    device = torch.device(plan.device)
    state = SlotState(plan.max_batch_size, -(-plan.max_model_len // plan.block_size), device=device)
    caches = [backend.allocate(layer, _BLOCKS, plan.block_size, dtype, device) for layer in layers]

    def steps(forward: PlaceholderForward) -> None:
        runner = ModelRunner(plan, forward, backend, caches, state, Report(show=False))
        runner.start()
        state.write(np.zeros(1, np.int32), np.zeros(1, np.int32))  # as a request that begins
        for tokens in _TOKENS:
            runner.run_dummy_step(min(tokens, plan.max_num_tokens))
            runner.run_dummy_decode_step(min(tokens, plan.max_batch_size))
        for length in _LENGTHS:
            runner.run_dummy_step(1, min(length, plan.max_model_len))

    def resample() -> None:
        with torch.inference_mode():
            launch_resample(state, torch.zeros(1, vocab_size, dtype=dtype, device=device))

    # What is only looked at must steer nothing, but the choice of experts steers operations of torch.
    attention = PlaceholderForward(nn.Module(), layers, vocab_size, dtype)
    needed = missing_kernels(kernel_specs(lambda: steps(attention)))
    resample_orders = (
        [spec for spec in missing_kernels(kernel_specs(resample)) if spec not in needed] if builds_kernels else []
    )
    if not builds_kernels:
        needed = wait_for_kernels(needed, _KERNEL_WAIT_SECONDS)
    workers = stack.enter_context(KernelWorkers()) if needed or resample_orders else None
    if workers is not None:
        workers.begin(needed)
        _log_failed_builds(workers.finish())
    steps(PlaceholderForward(module, layers, vocab_size, dtype))
    torch.cuda.synchronize(device)
    return workers, resample_orders


def _log_failed_builds(failed: Sequence[str]) -> None:
    if failed:
        _log.warning("%d kernels were not built ahead, the first because of: %s", len(failed), failed[0])
