"""Build the engine of one rank: load the model, compile it, measure memory, allocate the KV cache, record CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchweave.compiler.precompile.after_ready import watch_builds
from torchweave.compiler.runtime.cuda_graphs import GraphPool
from torchweave.compiler.runtime.forward import Forward
from torchweave.config import ModelFacts, Plan, resolve
from torchweave.config.options import DRAFT_HEADS, EngineConfig
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.distributed.symmetric_memory import enable_symmetric_memory
from torchweave.engine.control.host import CallRanks
from torchweave.engine.control.rank import Rank
from torchweave.engine.generation_loop import StepRunner
from torchweave.engine.kv_cache.block_manager import BlockManager
from torchweave.engine.kv_cache.image_rows import ImageRows
from torchweave.engine.kv_cache.layer_groups import KVLayout, group_layers, longest_sequence
from torchweave.engine.kv_cache.state_snapshots import StateSnapshots
from torchweave.engine.ranks.control import RankCalls
from torchweave.engine.ranks.leader_runner import Executor
from torchweave.engine.runner import warm_up
from torchweave.engine.runner.encoder_graphs import EncoderGraphs
from torchweave.engine.runner.memory import KVCacheSpec, MemoryUse, blocks_that_fit, longest_step, measure_memory
from torchweave.engine.runner.model_runner import ModelRunner, min_size
from torchweave.engine.runner.parts.base import check_parts
from torchweave.engine.runner.parts.drafts import DraftModel
from torchweave.engine.sampling.logits_processors import load_processors
from torchweave.engine.sampling.structured_output import GrammarManager
from torchweave.engine.scheduler.limits import Limits
from torchweave.engine.scheduler.parts.base import Resources
from torchweave.engine.scheduler.policies import POLICIES
from torchweave.engine.scheduler.scheduler import Scheduler
from torchweave.engine.startup.adapter_slots import make_adapter_slots, report_adapter_slots
from torchweave.engine.startup.compile_model import build_forward
from torchweave.engine.startup.device_facts import device_facts
from torchweave.engine.startup.draft_model import adaptive_drafts, load_draft_model
from torchweave.engine.startup.host_memory import host_pool
from torchweave.engine.startup.image_encoder import compile_image_encoder, large_image_encoding, record_encoder_graphs
from torchweave.models.decoder import DecoderStep
from torchweave.models.generation import with_options
from torchweave.models.load import LoadedModel, load, model_facts, with_tokenizer
from torchweave.models.multimodal.image_encoder import ImageEncoder
from torchweave.models.multimodal.image_step import ImageDecoderStep
from torchweave.models.multimodal.support import image_token_id
from torchweave.models.parallel import PipelineStage
from torchweave.ops.attention.choose import get_backend
from torchweave.ops.attention.kv_cache_dtype import FP8_DTYPES
from torchweave.ops.attention.op import AttentionBackend, LayerSpec
from torchweave.ops.low_rank import AdapterSlots
from torchweave.ops.slot_state import SlotState
from torchweave.report import Report
from torchweave.utils.openmp import release_workers

_IMAGE_STEPS = 2  # the pool of images holds those of so many full steps,
_MIN_IMAGE_ROWS = 16384  # and at least this many tokens


@dataclass(frozen=True)
class Engine:
    """The parts of an engine.

    Attributes:
        runner: of this rank.
        steps: launches the batch manager's steps: `runner`, or a `LeaderRunner` that also sends them to the other ranks.
        call_ranks: runs rank handlers of control calls on all ranks.
        executor: the other ranks; None with a single rank, and on ranks other than the leader.
    """

    plan: Plan
    loaded: LoadedModel
    scheduler: Scheduler
    runner: ModelRunner
    report: Report
    steps: StepRunner
    call_ranks: CallRanks
    executor: Executor | None = None

    def close(self) -> None:
        """End the other ranks; no step may be launched afterwards."""
        if self.executor is not None:
            self.runner.recordings.release()
            self.executor.close()


def build(
    config: EngineConfig, report: Report, loaded: LoadedModel | None = None, process_groups: ProcessGroups | None = None
) -> Engine:
    """Build the engine of one rank; `open_engine` builds those of all ranks.

    Args:
        loaded: a model already in memory; None loads `config.model`.
        process_groups: of the ranks, which all build at the same time; None: a single rank.

    Raises:
        ValueError: the model or an option is not supported; the message says why and what to do.
    """
    _free_previous_engine()
    try:
        return _build(config, report, loaded, ProcessGroups.single_rank() if process_groups is None else process_groups)
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)):
            raise
        sentence = _out_of_memory(error)
    raise ValueError(sentence)  # outside `except`: the error would keep the failed frames and their memory alive


def resolve_plan(config: EngineConfig) -> Plan:
    """Resolve a config to a plan before the model is loaded.

    Raises:
        ValueError: the model or an option is not supported.
    """
    return resolve(
        config, device_facts(config.device, attention_backend=config.attention_backend), _model_facts(config, None)
    )


def _build(config: EngineConfig, report: Report, loaded: LoadedModel | None, process_groups: ProcessGroups) -> Engine:
    if config.symmetric_memory:
        enable_symmetric_memory(process_groups, report)

    loaded, plan = load_model(config, report, loaded, process_groups)
    draft = load_draft_model(plan, loaded, report, process_groups)
    cache_spec, plan = _kv_cache_spec(loaded, plan, draft)
    windows = cache_spec.layout.windows
    if not plan.device.startswith("cuda"):  # fail before compilation, the longest step
        blocks_that_fit(plan, cache_spec.block_bytes, None, windows)

    adapter_slots = make_adapter_slots(plan, loaded)
    shared = cache_spec, report, process_groups, adapter_slots
    forward, draft_model, plan, kernel_builds = _compile(loaded, draft, plan, *shared)
    compile_image_encoder(loaded, plan, report)
    encoder_graphs, plan = record_encoder_graphs(loaded, plan, report)

    state = _slot_state(plan, loaded, len(windows), min_size(forward, draft_model))
    num_snapshots, plan = _num_state_snapshots(loaded, cache_spec, plan, process_groups)
    recurrent_states = _allocate_states(cache_spec, plan, num_snapshots, report)
    with report.stage("measuring memory"):
        encode_image = large_image_encoding(loaded) if plan.device.startswith("cuda") else None
        others = recurrent_states, encode_image, draft_model, adapter_slots
        use = measure_memory(plan, forward, cache_spec, state, report, *others)
    num_blocks = process_groups.all_reduce_min(blocks_that_fit(plan, cache_spec.block_bytes, use, windows))
    plan = _with_num_blocks(plan, num_blocks, use, cache_spec.layout)

    with report.stage("allocating the KV cache"):
        caches = cache_spec.allocate(num_blocks)
        further = recurrent_states, draft_model, cache_spec.both_ways, adapter_slots
        runner = ModelRunner(plan, forward, cache_spec.backend, caches, state, report, *further)
    report.event("kv_cache", **_cache_facts(plan, cache_spec, num_blocks))

    if plan.device.startswith("cuda"):
        _record_graphs(runner, plan, report)
        step_costs = runner.recordings.time_decode() if plan.query_lens else []
        with report.stage("building kernels of resampling"):  # else the first request that needs one waits for it
            kernel_builds.complete.wait()
    else:
        step_costs = []
        release_workers()

    scheduler = _build_scheduler(
        runner, num_blocks, num_snapshots, cache_spec.layout, loaded, report, step_costs, encoder_graphs
    )
    check_parts(scheduler.parts.held, plan.config.plugins)
    watch_builds(report, has_triton=plan.device != "cpu")
    return Engine(
        plan,
        loaded,
        scheduler,
        runner,
        report,
        runner,
        RankCalls(Rank(runner, process_groups.rank, loaded.module.model)),
    )


def _slot_state(plan: Plan, loaded: LoadedModel, num_tables: int, min_rows: int) -> SlotState:
    return SlotState(
        plan.max_batch_size,
        -(-plan.max_model_len // plan.block_size),
        device=plan.device,
        num_tables=num_tables,
        history_len=plan.history_len,
        max_rows=max(plan.max_batch_size, min_rows),
        rope_axes=loaded.module.rope_axes,
        has_adapters=plan.config.enable_lora,
    )


# -- 1. load -----------------------------------------------------------------------------------------------------------


def load_model(
    config: EngineConfig, report: Report, loaded: LoadedModel | None, process_groups: ProcessGroups
) -> tuple[LoadedModel, Plan]:
    """Load this rank's part of the model as the config says, unless it is `loaded` already, and resolve the plan.

    Raises:
        ValueError: the model or an option is not supported.
    """
    load_processors(config)  # those that are refused are refused before weights are read
    device = config.device if process_groups.size == 1 else process_groups.device
    plan = resolve(
        config, device_facts(device, process_groups.rank, config.attention_backend), _model_facts(config, loaded)
    )
    if loaded is None:
        loaded = load(
            config.model,
            getattr(torch, plan.dtype),
            plan.device,
            load_format=config.load_format,
            trust_remote_code=config.trust_remote_code,
            report=report,
            max_model_len=plan.max_model_len,
            quantization=plan.quantization,
            process_groups=process_groups,
            expert_parallel=config.enable_expert_parallel,
            images=config.limit_mm_per_prompt.image > 0,
            revision=config.revision,
            download_dir=config.download_dir,
            runner=config.runner,
            pooler=config.pooler_config,
            plugins=config.plugins,
            overrides=config.hf_overrides,
            ignore_unused_weights=config.ignore_unused_weights,
        )
    loaded = replace(loaded, generation=with_options(loaded.generation, config))
    plan = _with_runner(plan, loaded)
    if config.tokenizer is not None:
        if isinstance(loaded.module, ImageDecoderStep):
            raise ValueError("A model with images has the tokenizer of its processor; leave tokenizer out.")
        loaded = with_tokenizer(loaded, config.tokenizer, config.trust_remote_code, config.download_dir)
    if isinstance(loaded.module, ImageDecoderStep):
        loaded.module.allocate_image_rows(max(_IMAGE_STEPS * plan.max_num_tokens, _MIN_IMAGE_ROWS))
    return loaded, plan


def _with_runner(plan: Plan, loaded: LoadedModel) -> Plan:
    """The plan of a model that generates, or of one that pools: without decode steps, and with prefixes where they are right."""
    config, pooling = plan.config, loaded.module.pooling
    if pooling is None:
        if config.runner == "pooling":
            raise ValueError(
                f"runner=pooling: {loaded.name} is in memory already as a model that generates; load it to pool"
            )
        plan = plan.with_effective("runner", "generate", "the checkpoint's class" if config.runner == "auto" else "")
        return plan.with_effective("pooler_config.normalize", None, "the model generates text")
    if config.speculative_config.method is not None:
        raise ValueError(
            f"speculative_config.method={config.speculative_config.method} has no effect on {loaded.name}, which generates no "
            "text (runner=pooling); remove it"
        )
    why = "the checkpoint's class or modules.json" if config.runner == "auto" else ""
    plan = plan.with_effective("runner", "pooling", why, pooling=pooling.pooling_type)
    plan = plan.with_effective("pooler_config.pooling_type", pooling.pooling_type, "")
    plan = plan.with_effective("pooler_config.normalize", pooling.normalize, "")
    none = "no step decodes"
    plan = plan.with_effective("cuda_graph_config.batch_sizes", (), none, batch_sizes=(), decode_graphs=False)
    if pooling.pooling_type == "mean" and config.enable_prefix_caching:
        why = "the mean reads the hidden states of all tokens"
        plan = plan.with_effective("enable_prefix_caching", False, why)
        plan = plan.with_effective("kv_offload_gb", 0.0, "no block is reused", kv_offload_gb=0.0)
    return plan


def _model_facts(config: EngineConfig, loaded: LoadedModel | None) -> ModelFacts:
    if loaded is None:
        images = config.limit_mm_per_prompt.image > 0
        return model_facts(
            config.model, config.trust_remote_code, images, config.revision, config.download_dir, config.plugins,
            config.hf_overrides,
        )  # fmt: skip
    if config.quantization is not None and loaded.quantization is None:
        raise ValueError(
            f"quantization={config.quantization}: {loaded.name} is in memory already; quantise it as it is loaded"
        )
    dtype = str(loaded.dtype).removeprefix("torch.")
    width = loaded.config.get("hidden_size")
    hidden_size = width if isinstance(width, int) else None
    return ModelFacts(loaded.name, loaded.max_model_len, dtype, loaded.quantization, hidden_size=hidden_size)


def _kv_cache_spec(loaded: LoadedModel, plan: Plan, draft: DecoderStep | None = None) -> tuple[KVCacheSpec, Plan]:
    """The KV cache of this rank, with a draft model's layers behind those of the model, and the plan with the backend in use."""
    layers = _with_cache_dtype(loaded.module.attention_layers, plan)
    if draft is not None:
        layers += _with_cache_dtype(draft.attention_layers, plan)
    dtype = getattr(torch, plan.dtype)
    backend, plan = _choose_attention(plan, [layer for layer in layers if not layer.index_keys], dtype)
    layout = _kv_layout(layers, loaded.stage, plan)
    if not layers and plan.kv_offload_gb:
        plan = plan.with_effective("kv_offload_gb", 0.0, "no layer has a KV cache", kv_offload_gb=0.0)
    if plan.full_mixed_graphs and any(layer.sparse for layer in layers):
        why = "sparse attention takes the tokens of a long step in many parts"
        plan = plan.with_effective("cuda_graph_config.capture_mixed", False, why, full_mixed_graphs=False)
    if any(layer.lookahead for layer in layers) and plan.config.capacity_scheduler_policy == "max_utilization":
        raise ValueError(
            f"capacity_scheduler_policy=max_utilization is not supported for {loaded.name} with images, each of which "
            "needs one step; take guaranteed_no_evict, or set limit_mm_per_prompt.image to 0"
        )
    device = torch.device(plan.device)
    return KVCacheSpec(layers, layout, backend, dtype, plan.block_size, device, loaded.module.recurrent_layers), plan


def _with_cache_dtype(layers: Sequence[LayerSpec], plan: Plan) -> list[LayerSpec]:
    dtype = FP8_DTYPES.get(plan.kv_cache_dtype)
    return [replace(layer, cache_dtype=None if layer.index_keys else dtype) for layer in layers]


def _choose_attention(plan: Plan, layers: Sequence[LayerSpec], dtype: torch.dtype) -> tuple[AttentionBackend, Plan]:
    """The plan's backend; with `auto`, the device's default if the plan's does not support these layers."""
    try:
        return get_backend(plan.attention_backend, plan.device, dtype, layers), plan
    except ValueError as error:
        if plan.config.attention_backend != "auto":
            raise
        backend = get_backend("auto", plan.device, dtype, layers)
        return backend, plan.with_effective(
            "attention_backend", backend.name, str(error), attention_backend=backend.name
        )


def _kv_layout(layers: Sequence[LayerSpec], stage: PipelineStage | None, plan: Plan) -> KVLayout:
    """Layout of this rank's layers; the layer groups are those of all stages, since the leader allocates blocks for all."""
    if stage is None:
        return group_layers(layers, plan.max_model_len)
    layout = group_layers(_with_cache_dtype(stage.specs, plan), plan.max_model_len)
    return replace(
        layout,
        groups=tuple(stage.local_layers(layout.groups)),
        layer_slots=tuple(stage.local_layers(layout.layer_slots)),
    )


def _num_state_snapshots(
    loaded: LoadedModel, cache_spec: KVCacheSpec, plan: Plan, process_groups: ProcessGroups
) -> tuple[int, Plan]:
    """Snapshots of recurrent states that all ranks have memory for, and the plan with their number in use."""
    name, config = "num_state_snapshots", plan.config
    if not loaded.has_recurrent_layers:
        return 0, plan.with_effective(name, None, "no layer has a recurrent state")
    if not config.enable_prefix_caching:
        return 0, plan.with_effective(name, None, "no prefix is reused")
    count, why = config.num_state_snapshots, ""
    if count is None:
        count = process_groups.all_reduce_min(cache_spec.default_num_snapshots(plan.max_batch_size))
        why = "one for each request of a step, as memory allows"
    if not count:
        reason = "layers with a recurrent state share a prefix at snapshots, and num_state_snapshots is 0"
        plan = plan.with_effective("enable_prefix_caching", False, reason)
        plan = plan.with_effective("kv_offload_gb", 0.0, "no block is reused", kv_offload_gb=0.0)
    return count, plan.with_effective(name, count, why)


# -- 2. compile --------------------------------------------------------------------------------------------------------


def _compile(
    loaded: LoadedModel,
    draft: DecoderStep | None,
    plan: Plan,
    cache_spec: KVCacheSpec,
    report: Report,
    process_groups: ProcessGroups,
    adapter_slots: AdapterSlots | None,
) -> tuple[Forward, DraftModel | None, Plan, warm_up.KernelBuilds]:
    """Compile the model and a draft model, and meanwhile build the kernels that steps launch."""
    # One rank builds the kernels of a machine; ranks on other machines have caches of their own.
    builds_kernels = process_groups.tensor_rank == 0 or plan.config.executor != "local"
    kernel_builds = warm_up.start(plan, loaded.module, cache_spec, builds_kernels, draft)
    forward, plan = build_forward(loaded.module, plan, report, process_groups, loaded.stage, adapter_slots)
    report_adapter_slots(adapter_slots, report)
    draft_model = None
    if draft is not None:
        with report.stage("compiling the draft model"):  # events of compilation are about the model
            draft_forward, draft_plan = build_forward(draft, plan, Report(show=False), process_groups)
        if plan.fullgraph and not draft_plan.fullgraph:
            report.event("fallback", what="the draft model runs without the compiler", why="it will not trace")
        module = loaded.module
        token_id = image_token_id(module.model.config) if isinstance(module, ImageDecoderStep) else None
        place = len(module.attention_layers), module.vocab_size
        draft_model = DraftModel(draft_forward, *place, is_head=draft.input_hidden_size > 0, image_token_id=token_id)
    if plan.device.startswith("cuda"):
        with report.stage("building kernels"):
            kernel_builds.of_steps.wait()
    return forward, draft_model, plan, kernel_builds


# -- 3. measure memory, 4. allocate the KV cache -----------------------------------------------------------------------


def _with_num_blocks(plan: Plan, num_blocks: int, use: MemoryUse | None, layout: KVLayout) -> Plan:
    """Enter the number of blocks into the plan, and the longest request that they can hold."""
    source = "fills the memory that is left" if use else "cpu_kv_cache_gib"
    why = source if plan.config.num_kv_blocks is None else "as asked"
    plan = plan.with_effective("num_kv_blocks", num_blocks, why)
    longest = longest_sequence(layout.windows, num_blocks, longest_step(plan), plan.block_size, plan.max_model_len)
    if longest < plan.max_model_len:
        plan = plan.with_effective("max_model_len", longest, "what the KV cache holds", max_model_len=longest)
    return plan


def _allocate_states(cache_spec: KVCacheSpec, plan: Plan, num_snapshots: int, report: Report) -> list[Tensor]:
    """Recurrent states of the slots and snapshots, and their event."""
    states = cache_spec.allocate_recurrent_states(plan.max_batch_size, num_snapshots)
    if states:
        num_bytes = sum(tensor.nbytes for tensor in states)
        per_request = num_bytes // (plan.max_batch_size + num_snapshots)
        report.event("recurrent_states", bytes=num_bytes, bytes_per_request=per_request, snapshots=num_snapshots)
    return states


def _cache_facts(plan: Plan, cache_spec: KVCacheSpec, num_blocks: int) -> dict[str, Any]:
    """Fields of the report's `kv_cache` event."""
    layout = cache_spec.layout
    groups = [
        {"window": window.window, "chunk": window.chunk, "layers": layout.groups.count(number)}
        for number, window in enumerate(layout.windows)
    ]
    size = {"blocks": num_blocks, "block_size": plan.block_size, "bytes": num_blocks * cache_spec.block_bytes}
    return {**size, "dtype": plan.kv_cache_dtype, "groups": groups}


# -- 5. record CUDA graphs, and the host's part ------------------------------------------------------------------------


def _record_graphs(runner: ModelRunner, plan: Plan, report: Report) -> None:
    device = torch.device(plan.device)
    free = torch.cuda.mem_get_info(device)[0]
    runner.recordings.record_all(GraphPool(device))
    torch.cuda.synchronize(device)
    report.event("graphs_recorded", bytes=free - torch.cuda.mem_get_info(device)[0])


def _build_scheduler(
    runner: ModelRunner,
    num_blocks: int,
    num_snapshots: int,
    layout: KVLayout,
    loaded: LoadedModel,
    report: Report,
    step_costs: Sequence[tuple[int, int, float]],
    encoder_graphs: EncoderGraphs | None,
) -> Scheduler:
    plan, state = runner.plan, runner.state
    config = plan.config
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
        has_recurrent_states=loaded.has_recurrent_layers,
        query_len=plan.query_len,
        max_drafting_rows=plan.max_drafting_rows,
        drafts_by_model=config.speculative_config.method in ("draft_model", *DRAFT_HEADS),
        token_shift=int(config.speculative_config.method in DRAFT_HEADS),
        run_ahead=plan.run_ahead,
        num_micro_batches=config.pipeline_parallel_size,
        max_adapters=config.max_loras * config.enable_lora,
        max_logprobs=config.max_logprobs,
        pooling=loaded.module.pooling,
        priority_order={None: 1, "priority": -1, "fcfs": 0}[config.scheduling_policy],
        no_images="" if isinstance(loaded.module, ImageDecoderStep) else loaded.no_images or Limits.no_images,
    )
    kv = BlockManager(
        num_blocks,
        plan.block_size,
        plan.max_batch_size,
        state.max_blocks_per_seq,
        windows=layout.windows,
        longest_step=longest_step(plan),
        host=host_pool(runner, report),
        snapshots=StateSnapshots(plan.max_batch_size, num_snapshots, plan.block_size) if num_snapshots else None,
    )
    reuse = config.enable_prefix_caching and bool(num_snapshots or not loaded.has_recurrent_layers)
    reuse = reuse and plan.pooling != "mean"
    eos, tokenizer = tuple(loaded.generation.eos_token_ids), loaded.tokenizer
    grammars = None if tokenizer is None else GrammarManager(tokenizer, limits.vocab_size, eos)
    image_rows = None
    if isinstance(loaded.module, ImageDecoderStep):
        encoder = ImageEncoder(loaded.module, encoder_graphs)
        max_span = plan.max_num_tokens - plan.max_batch_size  # beside a decode row of each request
        image_rows = ImageRows(encoder, plan.max_batch_size, config.limit_mm_per_prompt.image, max_span)
        report.event("images", served=True, rows=encoder.num_rows, bytes=loaded.module.image_rows.nbytes)
    drafts = adaptive_drafts(plan, step_costs, report)
    resources = Resources(grammars, image_rows, drafts, config.plugins, load_processors(config))
    policy = POLICIES[config.capacity_scheduler_policy]
    return Scheduler(limits, kv, policy, state.updates(), eos, reuse, resources)


# -- memory of the process ---------------------------------------------------------------------------------------------


def _free_previous_engine() -> None:
    """Free an engine closed earlier in this process: its reference cycles hold GPU memory, and collection pauses during a build."""
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
