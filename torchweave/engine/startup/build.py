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
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.distributed.symmetric_memory import enable_symmetric_memory
from torchweave.engine.kv_cache.block_copy import make_block_copier
from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.cpu_offload import HostBlockPool
from torchweave.engine.kv_cache.layer_groups import KVLayout, group_layers, longest_sequence
from torchweave.engine.loop import StepRunner
from torchweave.engine.ranks.leader_runner import Executor
from torchweave.engine.runner import warm_up
from torchweave.engine.runner.memory import GIB, MemoryUse, blocks_that_fit, bytes_per_block, longest_step
from torchweave.engine.runner.model_runner import ModelRunner
from torchweave.engine.sampling.structured_output import GrammarManager
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.policies import POLICIES
from torchweave.engine.scheduler.scheduler import Scheduler
from torchweave.engine.startup.compile_model import build_forward, compile_model, effective_compile_config
from torchweave.engine.startup.device_facts import device_facts
from torchweave.engine.startup.tune import tune_model
from torchweave.models.load import LoadedModel, load, model_facts
from torchweave.models.parallel import PipelineStage
from torchweave.ops.attention.kv_cache_dtype import FP8_DTYPES
from torchweave.ops.attention.op import AttentionBackend, LayerKVCache, LayerSpec, get_backend
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
        executor: the other ranks; None where there are none, and on a rank that is led.
    """

    plan: Plan
    loaded: LoadedModel
    scheduler: Scheduler
    runner: ModelRunner
    report: Report
    steps: StepRunner
    executor: Executor | None = None

    def close(self) -> None:
        """End the other ranks, if there are any; no step is launched any more."""
        if self.executor is not None:
            self.runner.release_graphs()
            self.executor.close()


def build(
    config: EngineConfig, report: Report, loaded: LoadedModel | None = None, process_groups: ProcessGroups | None = None
) -> Engine:
    """Build the engine of one rank; `open_engine` builds all of them.

    Args:
        loaded: a model that is in memory already; else it is read from where `config.model` says.
        process_groups: the ranks, of which all build at the same moment; None: there is only this one.

    Raises:
        ValueError: the model or an option cannot be; the message says why and what to do.
    """
    _free_previous_engine()
    try:
        return _build(config, report, loaded, ProcessGroups.single_rank() if process_groups is None else process_groups)
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)):
            raise
        sentence = _out_of_memory(error)
    raise ValueError(sentence)  # out here: it must not hold on to the failed frames and the memory in them


def tune(config: EngineConfig, report: Report, *, remeasure: bool = False) -> Table:
    """Measure what runs a model best on this GPU and keep it in the compile cache; returns what was measured.

    Args:
        remeasure: also what is known already.

    Raises:
        ValueError: the model or an option cannot be, there is no GPU, or nothing is to be kept.
    """
    tuning_config = replace(config, torch_compile_config=replace(config.torch_compile_config, tune=True))
    plan = resolve_plan(tuning_config)
    if not plan.tune:
        why = next(entry.why for entry in plan.entries if entry.name == "torch_compile_config.tune")
        raise ValueError(f"nothing can be tuned here: {why}")
    dtype, trust_remote_code, device = getattr(torch, plan.dtype), config.trust_remote_code, torch.device(plan.device)
    loaded = load(config.model, dtype, plan.device, config.load_format, trust_remote_code, report, plan.max_model_len)
    compile_config = effective_compile_config(plan)
    cache = open_cache(compile_config, report)
    if cache is None:
        raise ValueError("nothing can be kept: the folder of the compile cache cannot be made; name another one")
    return tune_model(
        lambda each: compile_model(loaded.module, each, device, cache, Report(show=False)),
        compile_config, device, cache, report, remeasure=remeasure,
    )  # fmt: skip


def _free_previous_engine() -> None:
    """An engine that ended in this process lies in cycles with its memory, and none are collected while the next one is built."""
    if torch.cuda.is_initialized() and torch.cuda.memory_allocated():
        gc.collect()
        torch.cuda.empty_cache()


def _out_of_memory(error: RuntimeError) -> str:
    device = "GPU" if isinstance(error, torch.OutOfMemoryError) else "CPU"
    message = ". ".join(str(error).split(". ")[:3]).rstrip(".")
    return (
        f"There is too little memory on the {device} to build the engine ({' '.join(message.split())}); take a smaller model, "
        "lower num_kv_blocks, max_num_tokens or max_batch_size, or end what else uses the memory."
    )


def resolve_plan(config: EngineConfig) -> Plan:
    """The plan of a config, as far as it is known before anything is loaded.

    Raises:
        ValueError: the model or an option cannot be.
    """
    return resolve(config, device_facts(config.device), _model_facts(config, None))


def _build(config: EngineConfig, report: Report, loaded: LoadedModel | None, process_groups: ProcessGroups) -> Engine:
    """`build`, but for what is said when memory runs out."""
    device = config.device if process_groups.size == 1 else process_groups.device
    if config.symmetric_memory:
        enable_symmetric_memory(process_groups, report)
    plan = resolve(config, device_facts(device, process_groups.rank), _model_facts(config, loaded))
    dtype = getattr(torch, plan.dtype)
    if loaded is None:
        trust_remote_code, length, shared = config.trust_remote_code, plan.max_model_len, config.enable_expert_parallel
        quantization = plan.quantization
        loaded = load(
            config.model,
            dtype,
            plan.device,
            config.load_format,
            trust_remote_code,
            report,
            length,
            quantization,
            process_groups,
            shared,
        )
    layers = _with_cache_dtype(loaded.module.attention_layers, plan)
    backend, plan = _choose_attention(plan, layers, dtype)
    layout = _kv_layout(layers, loaded.stage, plan)
    block_bytes = bytes_per_block(
        list(dict(zip(layout.layer_slots, layers, strict=True)).values()), plan.block_size, dtype
    )
    if not plan.device.startswith("cuda"):  # refused before the model is woven, which takes longest
        blocks_that_fit(plan, block_bytes, None, layout.windows)
    builds_kernels = (
        process_groups.tensor_rank == 0 or config.executor != "local"
    )  # ranks of other machines have caches of their own
    kernels_ready = warm_up.start(plan, loaded.module, layers, loaded.module.vocab_size, backend, dtype, builds_kernels)
    forward, plan = build_forward(loaded.module, plan, report, process_groups, loaded.stage)
    if kernels_ready is not None:
        with report.stage("building kernels"):
            kernels_ready.wait()

    columns, num_groups = -(-plan.max_model_len // plan.block_size), len(layout.windows)
    state = SlotState(plan.max_batch_size, columns, device=plan.device, num_tables=num_groups)

    def allocate(blocks: int) -> list[LayerKVCache]:
        return _allocate(backend, layers, layout, blocks, plan, dtype)

    with report.stage("measuring memory"):
        use = _measure(plan, forward, backend, allocate, state, report)
    blocks = process_groups.all_reduce_min(blocks_that_fit(plan, block_bytes, use, layout.windows))
    plan = _settle_num_blocks(plan, blocks, use, layout)
    with report.stage("allocating the KV cache"):
        runner = ModelRunner(plan, forward, backend, allocate(blocks), state, report)
    report.event("kv_cache", **_cache_facts(plan, layout, blocks, block_bytes))
    if plan.device.startswith("cuda"):
        _record_graphs(runner, plan, report)
    else:
        release_workers()
    scheduler = _build_scheduler(runner, blocks, loaded, layout, plan, report)
    return Engine(plan, loaded, scheduler, runner, report, runner)


def _build_scheduler(
    runner: ModelRunner, num_blocks: int, loaded: LoadedModel, layout: KVLayout, plan: Plan, report: Report
) -> Scheduler:
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
    kv = BlockManager(
        num_blocks,
        plan.block_size,
        plan.max_batch_size,
        state.max_blocks_per_seq,
        windows=layout.windows,
        longest_step=longest_step(plan),
        host=_host_pool(runner, plan, report),
    )
    policy = POLICIES[config.capacity_scheduler_policy]
    reuse = config.enable_prefix_caching
    eos, tokenizer = tuple(loaded.generation.eos_token_ids), loaded.tokenizer
    grammars = None if tokenizer is None else GrammarManager(tokenizer, limits.vocab_size, eos)
    return Scheduler(limits, kv, policy, state.updates(), eos, reuse, grammars)


def _cache_facts(plan: Plan, layout: KVLayout, blocks: int, block_bytes: int) -> dict[str, Any]:
    """What is told of the KV cache."""
    groups = [
        {"window": window.window, "chunk": window.chunk, "layers": layout.groups.count(number)}
        for number, window in enumerate(layout.windows)
    ]
    size = {"blocks": blocks, "block_size": plan.block_size, "bytes": blocks * block_bytes}
    return {**size, "dtype": plan.kv_cache_dtype, "groups": groups}


def _allocate(
    backend: AttentionBackend,
    layers: Sequence[LayerSpec],
    layout: KVLayout,
    blocks: int,
    plan: Plan,
    dtype: torch.dtype,
) -> list[LayerKVCache]:
    """The cache of each layer; layers of different groups that have the same place share its memory."""
    layer_slots: dict[int, LayerKVCache] = {}
    caches = []
    for layer, group, layer_slot in zip(layers, layout.groups, layout.layer_slots, strict=True):
        if layer_slot not in layer_slots:
            layer_slots[layer_slot] = backend.allocate(layer, blocks, plan.block_size, dtype, torch.device(plan.device))
        caches.append(layer_slots[layer_slot]._replace(k_scale=layer.k_scale, v_scale=layer.v_scale, group=group))
    return caches


def _host_pool(runner: ModelRunner, plan: Plan, report: Report) -> HostBlockPool | None:
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
        copier = make_block_copier(list(tensors.values()), int(plan.kv_offload_gb * GIB))
    report.event("kv_offload", blocks=copier.num_host_blocks, bytes=copier.num_host_blocks * block_bytes)
    return HostBlockPool(copier, plan.max_batch_size)


def _model_facts(config: EngineConfig, loaded: LoadedModel | None) -> ModelFacts:
    if loaded is None:
        return model_facts(config.model, config.trust_remote_code)
    if config.quantization is not None and loaded.quantization is None:
        raise ValueError(
            f"quantization={config.quantization}: {loaded.name} is in memory already; quantise it as it is loaded"
        )
    dtype = str(loaded.dtype).removeprefix("torch.")
    return ModelFacts(loaded.name, loaded.max_model_len, dtype, loaded.quantization)


def _with_cache_dtype(layers: Sequence[LayerSpec], plan: Plan) -> list[LayerSpec]:
    """The layers with caches as the plan wants them."""
    return [replace(layer, cache_dtype=FP8_DTYPES.get(plan.kv_cache_dtype)) for layer in layers]


def _kv_layout(layers: Sequence[LayerSpec], stage: PipelineStage | None, plan: Plan) -> KVLayout:
    """Where this rank's layers keep keys and values: groups of blocks are those of all layers, since one rank grants them."""
    if stage is None:
        return group_layers(layers, plan.max_model_len)
    whole = group_layers(_with_cache_dtype(stage.specs, plan), plan.max_model_len)
    return replace(
        whole, groups=tuple(stage.local_layers(whole.groups)), layer_slots=tuple(stage.local_layers(whole.layer_slots))
    )


def _choose_attention(plan: Plan, layers: Sequence[LayerSpec], dtype: torch.dtype) -> tuple[AttentionBackend, Plan]:
    """The plan's backend; where nobody asked for it and it cannot do what these layers need, the device's own."""
    try:
        return get_backend(plan.attention_backend, plan.device, dtype, layers), plan
    except ValueError as error:
        if plan.config.attention_backend != "auto":
            raise
        backend = get_backend("auto", plan.device, dtype, layers)
        return backend, plan.with_effective(
            "attention_backend", backend.name, str(error), attention_backend=backend.name
        )


def _measure(
    plan: Plan,
    forward: Forward,
    backend: AttentionBackend,
    allocate: Callable[[int], list[LayerKVCache]],
    state: SlotState,
    report: Report,
) -> MemoryUse | None:
    """Run and record the largest steps over a stand-in cache; None on a CPU, where there is nothing to measure."""
    if not plan.device.startswith("cuda"):
        return None
    device = torch.device(plan.device)
    runner = ModelRunner(plan, forward, backend, allocate(_PROBE_BLOCKS), state, Report(show=False))
    runner.run_dummy_step(plan.max_num_tokens)  # kernels are built and libraries allocate what they keep
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.run_dummy_step(plan.max_num_tokens)
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
    runner.release_graphs()  # they hold the runner, which holds them
    del runner, pool
    torch.cuda.empty_cache()
    use = MemoryUse(total=total, in_use=total - free, activations=activations, graphs=graphs)
    report.event("memory", total=total, in_use=use.in_use, activations=activations, graphs_expected=graphs)
    return use


def _settle_num_blocks(plan: Plan, blocks: int, use: MemoryUse | None, layout: KVLayout) -> Plan:
    """Write down how many blocks there are; a request cannot be longer than all of them."""
    why = (
        "" if plan.config.num_kv_blocks is not None else "fills the memory that is left" if use else "cpu_kv_cache_gib"
    )
    plan = plan.with_effective("num_kv_blocks", blocks, why or "as asked")
    longest = longest_sequence(layout.windows, blocks, longest_step(plan), plan.block_size, plan.max_model_len)
    if longest < plan.max_model_len:
        plan = plan.with_effective("max_model_len", longest, "what the KV cache holds", max_model_len=longest)
    return plan


def _record_graphs(runner: ModelRunner, plan: Plan, report: Report) -> None:
    device = torch.device(plan.device)
    free = torch.cuda.mem_get_info(device)[0]
    runner.record_all_graphs(GraphPool(device))
    torch.cuda.synchronize(device)
    report.event("graphs_recorded", bytes=free - torch.cuda.mem_get_info(device)[0])
