"""From a config to an engine that is ready: load, weave, measure, allocate, record. All before the first request."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchweave.compiler.cache.store import open_cache
from torchweave.compiler.runtime.cuda_graphs import Forward, GraphPool
from torchweave.compiler.tuning.table import Table
from torchweave.config import ModelFacts, Plan, resolve
from torchweave.config.options import EngineConfig
from torchweave.distributed.process_groups import World
from torchweave.distributed.symmetric_memory import connect
from torchweave.engine.kv_cache.block_copy import mover_of
from torchweave.engine.kv_cache.block_manager import KVCache
from torchweave.engine.kv_cache.cpu_offload import HostPool
from torchweave.engine.kv_cache.layer_groups import Layout, layout_of, longest_sequence
from torchweave.engine.loop import StepRunner
from torchweave.engine.ranks.leader_runner import Lead
from torchweave.engine.runner import warm_up
from torchweave.engine.runner.memory import GIB, MemoryUse, blocks_that_fit, bytes_per_block, longest_step
from torchweave.engine.runner.model_runner import Runner
from torchweave.engine.sampling.structured_output import Grammars
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.policies import POLICIES
from torchweave.engine.scheduler.scheduler import Batch
from torchweave.engine.startup.compile_model import effective, forward_of, weave_model
from torchweave.engine.startup.device_facts import device_facts
from torchweave.engine.startup.tune import tune_model
from torchweave.models.load import LoadedModel, load, model_facts
from torchweave.models.parallel import Stage
from torchweave.ops.attention.kv_cache_dtype import FP8_DTYPES
from torchweave.ops.attention.op import AttentionBackend, KVLayer, LayerSpec, get_backend
from torchweave.ops.slot_state import SlotState
from torchweave.report import Report
from torchweave.utils.openmp import release_workers

_PROBE_BLOCKS = 2  # blocks of the cache that stands in while memory is measured
_BYTES_PER_GRAPH = 4 << 20  # what a recording takes beside its tensors: nodes and kernel arguments


@dataclass(frozen=True)
class Engine:
    """All parts of an engine, in place.

    Attributes:
        runner: of this rank.
        steps: what the batch manager launches steps on: `runner`, or what also tells them to the other ranks.
        lead: the other ranks; None where there are none, and on a rank that is led.
    """

    plan: Plan
    loaded: LoadedModel
    batch: Batch
    runner: Runner
    report: Report
    steps: StepRunner
    lead: Lead | None = None

    def close(self) -> None:
        """End the other ranks, if there are any; no step is launched any more."""
        if self.lead is not None:
            self.runner.forget_recordings()
            self.lead.close()


def build(
    config: EngineConfig, report: Report, loaded: LoadedModel | None = None, world: World | None = None
) -> Engine:
    """Build the engine of one rank; `open_engine` builds all of them.

    Args:
        loaded: a model that is in memory already; else it is read from where `config.model` says.
        world: the ranks, of which all build at the same moment; None: there is only this one.

    Raises:
        ValueError: the model or an option cannot be; the message says why and what to do.
    """
    _collect_what_was()
    try:
        return _build(config, report, loaded, World.single() if world is None else world)
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)):
            raise
        sentence = _out_of_memory(error)
    raise ValueError(sentence)  # out here: it must not hold on to the failed frames and the memory in them


def tune(config: EngineConfig, report: Report, *, again: bool = False) -> Table:
    """Measure what runs a model best on this GPU and keep it in the compile cache; returns what was measured.

    Args:
        again: also what is known already.

    Raises:
        ValueError: the model or an option cannot be, there is no GPU, or nothing is to be kept.
    """
    asked = replace(config, torch_compile_config=replace(config.torch_compile_config, tune=True))
    plan = planned(asked)
    if not plan.tune:
        why = next(entry.why for entry in plan.entries if entry.name == "torch_compile_config.tune")
        raise ValueError(f"nothing can be tuned here: {why}")
    dtype, trust, device = getattr(torch, plan.dtype), config.trust_remote_code, torch.device(plan.device)
    loaded = load(config.model, dtype, plan.device, config.load_format, trust, report, plan.max_model_len)
    compile_config = effective(plan)
    cache = open_cache(compile_config, report)
    if cache is None:
        raise ValueError("nothing can be kept: the folder of the compile cache cannot be made; name another one")
    return tune_model(
        lambda each: weave_model(loaded.module, each, device, cache, Report(show=False)),
        compile_config, device, cache, report, again=again,
    )  # fmt: skip


def _collect_what_was() -> None:
    """An engine that ended in this process lies in cycles with its memory, and none are collected while the next one is built."""
    if torch.cuda.is_initialized() and torch.cuda.memory_allocated():
        gc.collect()
        torch.cuda.empty_cache()


def _out_of_memory(error: RuntimeError) -> str:
    device = "GPU" if isinstance(error, torch.OutOfMemoryError) else "CPU"
    said = ". ".join(str(error).split(". ")[:3]).rstrip(".")
    return (
        f"There is too little memory on the {device} to build the engine ({' '.join(said.split())}); take a smaller model, "
        "lower num_kv_blocks, max_num_tokens or max_batch_size, or end what else uses the memory."
    )


def planned(config: EngineConfig) -> Plan:
    """The plan of a config, as far as it is known before anything is loaded.

    Raises:
        ValueError: the model or an option cannot be.
    """
    return resolve(config, device_facts(config.device), _model_facts(config, None))


def _build(config: EngineConfig, report: Report, loaded: LoadedModel | None, world: World) -> Engine:
    """`build`, but for what is said when memory runs out."""
    device = config.device if world.size == 1 else world.device
    if config.symmetric_memory:
        connect(world, report)
    plan = resolve(config, device_facts(device, world.rank), _model_facts(config, loaded))
    dtype = getattr(torch, plan.dtype)
    if loaded is None:
        trust, length, shared = config.trust_remote_code, plan.max_model_len, config.enable_expert_parallel
        how = plan.quantization
        loaded = load(config.model, dtype, plan.device, config.load_format, trust, report, length, how, world, shared)
    layers = _kept(loaded.module.attention_layers, plan)
    backend, plan = _attention(plan, layers, dtype)
    layout = _layout(layers, loaded.stage, plan)
    block_bytes = bytes_per_block(list(dict(zip(layout.places, layers, strict=True)).values()), plan.block_size, dtype)
    if not plan.device.startswith("cuda"):  # refused before the model is woven, which takes longest
        blocks_that_fit(plan, block_bytes, None, layout.sights)
    builds = world.tensor_rank == 0 or config.executor != "local"  # ranks of other machines have caches of their own
    warming = warm_up.start(plan, loaded.module, layers, loaded.module.vocab_size, backend, dtype, builds)
    forward, plan = forward_of(loaded.module, plan, report, world, loaded.stage)
    if warming is not None:
        with report.stage("building kernels"):
            warming.wait()

    columns, num_groups = -(-plan.max_model_len // plan.block_size), len(layout.sights)
    state = SlotState(plan.max_batch_size, columns, device=plan.device, num_tables=num_groups)

    def allocate(blocks: int) -> list[KVLayer]:
        return _allocate(backend, layers, layout, blocks, plan, dtype)

    with report.stage("measuring memory"):
        use = _measure(plan, forward, backend, allocate, state, report)
    blocks = world.smallest(blocks_that_fit(plan, block_bytes, use, layout.sights))
    plan = _settle(plan, blocks, use, layout)
    with report.stage("allocating the KV cache"):
        runner = Runner(plan, forward, backend, allocate(blocks), state, report)
    report.event("kv_cache", **_cache_facts(plan, layout, blocks, block_bytes))
    if plan.device.startswith("cuda"):
        _record(runner, plan, report)
    else:
        release_workers()
    batch = _batch(runner, blocks, loaded, layout, plan, report)
    return Engine(plan, loaded, batch, runner, report, runner)


def _batch(runner: Runner, num_blocks: int, loaded: LoadedModel, layout: Layout, plan: Plan, report: Report) -> Batch:
    """The host's side of the engine."""
    config, state = plan.config, runner.state
    limits = Limits(
        max_batch_size=plan.max_batch_size,
        max_num_tokens=plan.max_num_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=loaded.module.vocab_size,
        chunked_context=config.enable_chunked_context,
        equal_progress=config.context_chunking_policy == "equal_progress",
        mixed_step_sizes=plan.mixed_step_sizes,
        batch_wait_timeout_iters=config.batch_wait_timeout_iters,
        batch_wait_max_tokens_ratio=config.batch_wait_max_tokens_ratio,
    )
    kv = KVCache(
        num_blocks,
        plan.block_size,
        plan.max_batch_size,
        state.max_blocks_per_seq,
        sights=layout.sights,
        longest_step=longest_step(plan),
        host=_host_pool(runner, plan, report),
    )
    policy = POLICIES[config.capacity_scheduler_policy]
    reuse = config.enable_prefix_caching
    eos, tokenizer = tuple(loaded.generation.eos_token_ids), loaded.tokenizer
    grammars = None if tokenizer is None else Grammars(tokenizer, limits.vocab_size, eos)
    return Batch(limits, kv, policy, state.updates(), eos, reuse, grammars)


def _cache_facts(plan: Plan, layout: Layout, blocks: int, block_bytes: int) -> dict[str, Any]:
    """What is told of the KV cache."""
    groups = [
        {"window": sight.window, "chunk": sight.chunk, "layers": layout.groups.count(number)}
        for number, sight in enumerate(layout.sights)
    ]
    size = {"blocks": blocks, "block_size": plan.block_size, "bytes": blocks * block_bytes}
    return {**size, "dtype": plan.kv_cache_dtype, "groups": groups}


def _allocate(
    backend: AttentionBackend, layers: Sequence[LayerSpec], layout: Layout, blocks: int, plan: Plan, dtype: torch.dtype
) -> list[KVLayer]:
    """The cache of each layer; layers of different groups that have the same place share its memory."""
    places: dict[int, KVLayer] = {}
    caches = []
    for layer, group, place in zip(layers, layout.groups, layout.places, strict=True):
        if place not in places:
            places[place] = backend.allocate(layer, blocks, plan.block_size, dtype, torch.device(plan.device))
        caches.append(places[place]._replace(k_scale=layer.k_scale, v_scale=layer.v_scale, group=group))
    return caches


def _host_pool(runner: Runner, plan: Plan, report: Report) -> HostPool | None:
    """Host memory behind the KV cache, where it was asked for."""
    if not plan.kv_offload_gb:
        return None
    tensors = {tensor.data_ptr(): tensor for layer in runner.caches for tensor in layer.tensors}
    block_bytes = sum(tensor[0].nbytes for tensor in tensors.values())
    if plan.kv_offload_gb * GIB < block_bytes:
        raise ValueError(
            f"kv_offload_gb={plan.kv_offload_gb} holds no block of the KV cache, which takes {block_bytes} bytes; give more or 0."
        )
    with report.stage("allocating host memory"):
        mover = mover_of(list(tensors.values()), int(plan.kv_offload_gb * GIB))
    report.event("kv_offload", blocks=mover.num_places, bytes=mover.num_places * block_bytes)
    return HostPool(mover, plan.max_batch_size)


def _model_facts(config: EngineConfig, loaded: LoadedModel | None) -> ModelFacts:
    if loaded is None:
        return model_facts(config.model, config.trust_remote_code)
    if config.quantization is not None and loaded.quantization is None:
        raise ValueError(
            f"quantization={config.quantization}: {loaded.name} is in memory already; quantise it as it is loaded"
        )
    dtype = str(loaded.dtype).removeprefix("torch.")
    return ModelFacts(loaded.name, loaded.max_model_len, dtype, loaded.quantization)


def _kept(layers: Sequence[LayerSpec], plan: Plan) -> list[LayerSpec]:
    """The layers with caches as the plan wants them."""
    return [replace(layer, cache_dtype=FP8_DTYPES.get(plan.kv_cache_dtype)) for layer in layers]


def _layout(layers: Sequence[LayerSpec], stage: Stage | None, plan: Plan) -> Layout:
    """Where this rank's layers keep keys and values: groups of blocks are those of all layers, since one rank grants them."""
    if stage is None:
        return layout_of(layers, plan.max_model_len)
    whole = layout_of(_kept(stage.specs, plan), plan.max_model_len)
    return replace(whole, groups=tuple(stage.own(whole.groups)), places=tuple(stage.own(whole.places)))


def _attention(plan: Plan, layers: Sequence[LayerSpec], dtype: torch.dtype) -> tuple[AttentionBackend, Plan]:
    """The plan's backend; where nobody asked for it and it cannot do what these layers need, the device's own."""
    try:
        return get_backend(plan.attention_backend, plan.device, dtype, layers), plan
    except ValueError as error:
        if plan.config.attention_backend != "auto":
            raise
        backend = get_backend("auto", plan.device, dtype, layers)
        return backend, plan.settle("attention_backend", backend.name, str(error), attention_backend=backend.name)


def _measure(
    plan: Plan,
    forward: Forward,
    backend: AttentionBackend,
    allocate: Callable[[int], list[KVLayer]],
    state: SlotState,
    report: Report,
) -> MemoryUse | None:
    """Run and record the largest steps over a stand-in cache; None on a CPU, where there is nothing to measure."""
    if not plan.device.startswith("cuda"):
        return None
    device = torch.device(plan.device)
    runner = Runner(plan, forward, backend, allocate(_PROBE_BLOCKS), state, Report(show=False))
    runner.run_padding(plan.max_num_tokens)  # kernels are built and libraries allocate what they keep
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.run_padding(plan.max_num_tokens)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    pool = GraphPool(device)
    recorded = 0
    if plan.token_buckets:
        recorded += runner.record_mixed(max(plan.token_buckets), pool).bytes
    if plan.batch_sizes:
        recorded += runner.record_decode(max(plan.batch_sizes), pool).bytes
    torch.cuda.synchronize(device)
    graphs = max(free - torch.cuda.mem_get_info(device)[0], recorded)
    graphs += (len(plan.token_buckets) + len(plan.batch_sizes)) * _BYTES_PER_GRAPH
    runner.forget_recordings()  # they hold the runner, which holds them
    del runner, pool
    torch.cuda.empty_cache()
    use = MemoryUse(total=total, in_use=total - free, activations=activations, graphs=graphs)
    report.event("memory", total=total, in_use=use.in_use, activations=activations, graphs_expected=graphs)
    return use


def _settle(plan: Plan, blocks: int, use: MemoryUse | None, layout: Layout) -> Plan:
    """Write down how many blocks there are; a request cannot be longer than all of them."""
    why = (
        "" if plan.config.num_kv_blocks is not None else "fills the memory that is left" if use else "cpu_kv_cache_gib"
    )
    plan = plan.settle("num_kv_blocks", blocks, why or "as asked")
    longest = longest_sequence(layout.sights, blocks, longest_step(plan), plan.block_size, plan.max_model_len)
    if longest < plan.max_model_len:
        plan = plan.settle("max_model_len", longest, "what the KV cache holds", max_model_len=longest)
    return plan


def _record(runner: Runner, plan: Plan, report: Report) -> None:
    device = torch.device(plan.device)
    free = torch.cuda.mem_get_info(device)[0]
    runner.record_all(GraphPool(device))
    torch.cuda.synchronize(device)
    report.event("graphs_recorded", bytes=free - torch.cuda.mem_get_info(device)[0])
