"""Resolve a config to a plan: defaults by device, sizes clamped to a step's capacity, contradictions rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchweave.config.facts import AttentionFacts, DeviceFacts, ModelFacts
from torchweave.config.options import CudaGraphConfig, EngineConfig, TorchCompileConfig
from torchweave.config.plan import Plan, PlanEntry
from torchweave.config.validate import check_config, flatten

# TensorRT-LLM's default `capture_num_tokens`.
DEFAULT_TOKEN_BUCKETS = (*(2**i for i in range(8)), 256, 384, *range(512, 3073, 256))
# tokens * hidden_size**2 of a rank, below which launching a layer may take longer than running it: 1.2 ms of host time against
# 24 * hidden_size**2 operations a token at 500 TFLOPS are 2.6e10; hosts differ by two.
_HOST_BOUND_WORK = 5e10


def default_token_buckets(largest: int, hidden_size: int | None, num_ranks: int = 1) -> tuple[int, ...]:
    """`DEFAULT_TOKEN_BUCKETS`, continued to `largest` as far as plain launches of this model may be slower than its kernels.

    Above 3072: steps of 256 to 4096, of 512 to 8192, of 1024 beyond, and `largest`, so that padding adds an eighth at most.

    Args:
        hidden_size: of the model; None: unknown, so nothing is continued.
        num_ranks: tensor-parallel ranks that share a layer's work.
    """
    most = int(_HOST_BOUND_WORK * num_ranks / hidden_size**2) if hidden_size else 0
    above = (*range(3328, 4097, 256), *range(4608, 8193, 512), *range(9216, largest + 1, 1024), largest)
    return tuple(sorted({*DEFAULT_TOKEN_BUCKETS, *(size for size in above if size <= min(most, largest))}))


def default_batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, steps of 8 to 128, of 64 to 384, of 128 above, and the largest.

    The BLAS multiplies 448 rows no faster than 512: a layer's products take 428 and 297 us (Llama 8B), 155 and 146 (3B), 100 and
    104 (1B) on an H100.
    """
    sizes = {1, 2, 4, *range(8, 129, 8), *range(192, 385, 64), *range(512, largest + 1, 128), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


class _Entries:
    """Plan entries in the order of the config's fields, whatever the order of resolution."""

    def __init__(self, config: EngineConfig) -> None:
        self._requested = dict(flatten(config))
        self._defaults = dict(flatten(EngineConfig(model="")))
        self._entries: dict[str, PlanEntry] = {}

    def note(self, name: str, effective: Any, why: str = "") -> Any:
        requested = self._requested[name]
        if not why:
            why = "default" if requested == self._defaults[name] else "as asked"
        self._entries[name] = PlanEntry(name, requested, effective, why)
        return effective

    def all(self) -> tuple[PlanEntry, ...]:
        for name, requested in self._requested.items():
            if name not in self._entries:
                self.note(name, requested)
        return tuple(self._entries[name] for name in self._requested)


def resolve(config: EngineConfig, device: DeviceFacts, model: ModelFacts, passes: Sequence[str] | None = None) -> Plan:
    """The plan for a model on a device; `passes` are the valid names in `disabled_passes`, None skips that check.

    Raises:
        ValueError: an invalid or contradictory option.
    """
    check_config(config, passes)
    if config.capacity_scheduler_policy == "max_utilization" and not config.enable_chunked_context:
        raise ValueError(
            "capacity_scheduler_policy=max_utilization needs enable_chunked_context: a paused request may need to "
            "recompute more tokens than a step holds; turn it on, or use guaranteed_no_evict"
        )
    if config.enable_lora and not config.torch_compile_config.enable_fullgraph:
        raise ValueError(
            "enable_lora=True needs torch_compile_config.enable_fullgraph, since a pass over the captured graph adds adapters; "
            "turn it on (without enforce_eager), or remove enable_lora"
        )
    entries = _Entries(config)
    if not config.enable_lora:
        entries.note("max_loras", None, "without enable_lora, there are no adapters")
        entries.note("max_lora_rank", None, "without enable_lora, there are no adapters")
    _check_ranks(config, device, model, entries)
    entries.note("device", device.device, "" if config.device == device.device else f"{device.title}")
    dtype = entries.note("dtype", *_dtype(config, device, model))
    quantization = entries.note("quantization", *_quantization(config, device, model))
    kv_cache_dtype = entries.note("kv_cache_dtype", *_kv_cache_dtype(config, device, model, dtype))
    max_model_len = entries.note("max_model_len", *_max_model_len(config, model))
    max_batch_size, max_num_tokens = _step_limits(config, device, entries)
    attention = _attention(config, device, kv_cache_dtype, entries)
    block_size = entries.note("block_size", *_block_size(config, attention))
    mixed_step_tokens = entries.note("mixed_step_tokens", *_mixed_step_tokens(config, device))
    graphs = _compile_fields(
        config, device, model, attention, max_batch_size, max_num_tokens, mixed_step_tokens, entries
    )
    speculation = _speculation(config, device, attention, max_batch_size, max_num_tokens, entries)
    by_bytes = config.kv_cache_memory_bytes is not None
    memory_why = "from kv_cache_memory_bytes" if by_bytes else "from the remaining memory"
    entries.note("num_kv_blocks", config.num_kv_blocks, memory_why if config.num_kv_blocks is None else "")
    unused = "cpu_kv_cache_gib" if device.is_gpu else "gpu_memory_utilization"
    entries.note(unused, None, f"unused on a {'GPU' if device.is_gpu else 'CPU'}")
    return Plan(
        config=config,
        device=device.device,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        kv_offload_gb=entries.note("kv_offload_gb", *_kv_offload(config)),
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        mixed_step_tokens=mixed_step_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        attention_backend=attention.name,
        run_ahead=entries.note("run_ahead", *_run_ahead(config)),
        entries=entries.all(),
        **graphs,
        **speculation,
    )


def _run_ahead(config: EngineConfig) -> tuple[int, str]:
    stages = config.pipeline_parallel_size
    if stages == 1:
        return config.run_ahead, ""
    return max(config.run_ahead, 1) + stages - 1, f"a step more for each further one of {stages} pipeline stages"


def _speculation(
    config: EngineConfig,
    device: DeviceFacts,
    attention: AttentionFacts,
    max_batch_size: int,
    max_num_tokens: int,
    entries: _Entries,
) -> dict[str, Any]:
    """Fields of the plan for speculative decoding."""
    speculative, prefix = config.speculative_config, "speculative_config."
    if speculative.method is None:
        names = "model num_speculative_tokens prompt_lookup_max prompt_lookup_min adaptive disable_by_batch_size"
        for name in names.split():
            entries.note(prefix + name, None, "without a method, there is no speculation")
        return {"query_lens": (), "max_drafting_rows": 0}
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            f"speculative_config.method={speculative.method} is not supported with pipeline_parallel_size="
            f"{config.pipeline_parallel_size}, since only the last stage knows which drafts are right; use "
            "tensor_parallel_size, or remove it"
        )
    if device.is_gpu and not attention.supports_mixed_cuda_graphs:
        raise ValueError(
            f"speculative_config.method={speculative.method} needs an attention backend that finds each row's tokens on the "
            f"GPU, and {attention.name} does not; use attention_backend=triton"
        )
    query_len = speculative.num_speculative_tokens + 1
    if query_len > max_num_tokens:
        raise ValueError(
            f"speculative_config.num_speculative_tokens={speculative.num_speculative_tokens} needs steps of {query_len} tokens, "
            f"but max_num_tokens is {max_num_tokens}; lower one or raise the other"
        )
    rows = min(max_batch_size, max_num_tokens // query_len)
    why = "what max_num_tokens holds" if rows < max_batch_size else "max_batch_size"
    requested = speculative.disable_by_batch_size
    if requested is not None and requested <= rows:
        rows, why = requested, ""
    entries.note(prefix + "disable_by_batch_size", rows, why)
    if speculative.method == "mtp":
        entries.note(prefix + "model", config.model, "its checkpoint has the MTP layer")
    query_lens = _query_lens(query_len) if speculative.adaptive else (query_len,)
    return {"query_lens": query_lens, "max_drafting_rows": rows}


def _query_lens(most: int) -> tuple[int, ...]:
    """Tokens of a row in steps with drafts: the most that are asked for, and fewer: half as many drafts each time."""
    drafts = [most - 1]
    while drafts[-1] > 1:
        drafts.append(drafts[-1] // 2)
    return tuple(number + 1 for number in reversed(drafts))


def _dtype(config: EngineConfig, device: DeviceFacts, model: ModelFacts) -> tuple[str, str]:
    requested = config.dtype
    if requested == "auto":
        if not device.is_gpu:
            return "float32", "on a CPU"
        dtype, why = (model.dtype, "the checkpoint's") if model.dtype else ("bfloat16", "the checkpoint names none")
    else:
        dtype, why = requested, ""
    if dtype == "bfloat16" and device.capability is not None and device.capability < (8, 0):
        if requested == "auto":
            return "float16", f"{device.title} has no bfloat16"
        raise ValueError(f"dtype=bfloat16 needs compute capability 8.0, and {device.title} has none; use dtype=float16")
    return dtype, why


def _quantization(config: EngineConfig, device: DeviceFacts, model: ModelFacts) -> tuple[str | None, str]:
    requested, stored = config.quantization, model.quantization
    if requested is not None and requested == model.quantization_method:
        return stored, "the checkpoint's"
    defaults = {"fp8": "fp8_per_tensor", "int4": "int4_g128"}
    effective = defaults.get(requested or "", requested or stored)
    rounds_activations = (effective, stored) == ("nvfp4_w4a4", "nvfp4")
    if requested and stored and effective != stored and not rounds_activations:
        raise ValueError(
            f"quantization={requested} contradicts {model.name}, which is {stored} already; remove the option"
        )
    if effective and "fp8_per" in effective and device.capability is not None and device.capability < (8, 9):
        raise ValueError(
            f"{effective} needs compute capability 8.9, and {device.title} has none; use an unquantized model"
        )
    if rounds_activations:
        return effective, "the checkpoint's, with activations in FP4"
    return effective, "the checkpoint's" if stored else f"{requested} is {effective}" if requested in defaults else ""


def _kv_cache_dtype(config: EngineConfig, device: DeviceFacts, model: ModelFacts, dtype: str) -> tuple[str, str]:
    requested = config.kv_cache_dtype
    lacks_e4m3 = device.capability is not None and device.capability < (8, 9)
    if requested == "auto":
        if model.kv_cache_dtype is None or lacks_e4m3:
            return dtype, "the model's dtype"
        return model.kv_cache_dtype, "the checkpoint's"
    effective = "fp8_e4m3" if requested == "fp8" else requested
    if effective == "fp8_e4m3" and lacks_e4m3:
        raise ValueError(
            f"kv_cache_dtype={requested} needs compute capability 8.9, and {device.title} has none; use fp8_e5m2 or auto"
        )
    return effective, "fp8 is e4m3" if requested == "fp8" else ""


def _kv_offload(config: EngineConfig) -> tuple[float, str]:
    if config.kv_offload_gb and not config.enable_prefix_caching:
        return 0.0, "without enable_prefix_caching, no block is reused"
    return config.kv_offload_gb, ""


def _max_model_len(config: EngineConfig, model: ModelFacts) -> tuple[int, str]:
    requested = config.max_model_len
    if requested is None:
        return model.max_model_len, "the model's limit"
    longest = model.longest_model_len or model.max_model_len
    if requested > longest:
        raise ValueError(
            f"max_model_len={requested} is above the {longest} tokens that {model.name} supports; lower it"
        )
    return requested, ""


def _step_limits(config: EngineConfig, device: DeviceFacts, entries: _Entries) -> tuple[int, int]:
    """(requests, tokens) per step: every running request needs at least one token of the budget."""
    kind = "a GPU" if device.is_gpu else "a CPU"
    batch, tokens = config.max_batch_size, config.max_num_tokens
    if batch is not None and tokens is not None and tokens < batch:
        raise ValueError(
            f"max_num_tokens={tokens} is below max_batch_size={batch}, but each request of a step needs a token; "
            "raise max_num_tokens or lower max_batch_size"
        )
    batch_why = tokens_why = f"default on {kind}"
    default_batch, default_tokens = (512, 8192) if device.is_gpu else (32, 2048)
    if device.is_gpu and config.pipeline_parallel_size > 1 and config.enable_chunked_context:
        default_tokens, tokens_why = (
            2048,
            "default over pipeline stages, which compute different chunks at the same time",
        )
    if tokens is None:
        tokens = default_tokens
        if batch is not None and batch > tokens:
            tokens, tokens_why = batch, "a token for each request of max_batch_size"
    else:
        tokens_why = ""
    if batch is None:
        batch = default_batch
        if batch > tokens:
            batch, batch_why = tokens, "no more requests than tokens in a step"
    else:
        batch_why = ""
    entries.note("max_batch_size", batch, batch_why)
    entries.note("max_num_tokens", tokens, tokens_why)
    return batch, tokens


def _mixed_step_tokens(config: EngineConfig, device: DeviceFacts) -> tuple[int, str]:
    if not config.enable_chunked_context:
        return 0, "prompts are not split: enable_chunked_context is off"
    if config.mixed_step_tokens is not None:
        return config.mixed_step_tokens, ""
    return (256, "default on a GPU") if device.is_gpu else (0, "default on a CPU, where time grows with each token")


def _attention(config: EngineConfig, device: DeviceFacts, kv_cache_dtype: str, entries: _Entries) -> AttentionFacts:
    available = [facts for facts in device.attention if not facts.refusal]
    if kv_cache_dtype.startswith("fp8"):
        chosen = next((facts for facts in available if config.attention_backend in ("auto", facts.name)), None)
        reading = [facts for facts in available if not facts.fp8_cache_refusal]
        if chosen is not None and chosen.fp8_cache_refusal and reading:
            entries.note("attention_backend", reading[0].name, chosen.fp8_cache_refusal)
            return reading[0]
    others = "; ".join(f"{facts.name}: {facts.refusal}" for facts in device.attention if facts.refusal)
    if config.attention_backend == "auto":
        if not available:
            raise ValueError(f"no attention backend is available on {device.title} ({others or 'none exists'})")
        preferred = device.attention[0]  # the first by preference
        why = f"{preferred.name}: {preferred.refusal}" if preferred.refusal else f"preferred on {device.title}"
        entries.note("attention_backend", available[0].name, why)
        return available[0]
    for facts in device.attention:
        if facts.name == config.attention_backend:
            if facts.refusal:
                names = ", ".join(each.name for each in available) or "none"
                raise ValueError(f"attention_backend={facts.name} is unavailable: {facts.refusal}; available: {names}")
            entries.note("attention_backend", facts.name)
            return facts
    names = ", ".join(facts.name for facts in available) or "none"
    raise ValueError(
        f"attention_backend={config.attention_backend} does not exist on {device.title}; available: {names}"
    )


def _block_size(config: EngineConfig, attention: AttentionFacts) -> tuple[int, str]:
    requested = config.block_size
    if requested is None:
        return attention.block_size, f"preferred by attention backend {attention.name}"
    if attention.block_sizes and requested not in attention.block_sizes:
        allowed = ", ".join(map(str, attention.block_sizes))
        raise ValueError(
            f"attention backend {attention.name} does not support block_size={requested}; use one of {allowed}"
        )
    return requested, ""


def _compile_fields(
    config: EngineConfig,
    device: DeviceFacts,
    model: ModelFacts,
    attention: AttentionFacts,
    max_batch_size: int,
    max_num_tokens: int,
    mixed_step_tokens: int,
    entries: _Entries,
) -> dict[str, Any]:
    """Fields of the plan for compilation and CUDA graphs."""
    compile_config, cuda = config.torch_compile_config, config.cuda_graph_config
    prefix = "torch_compile_config."
    fullgraph = entries.note(prefix + "enable_fullgraph", compile_config.enable_fullgraph)
    inductor, why = compile_config.enable_inductor, ""
    if inductor and not fullgraph:
        inductor, why = False, "needs enable_fullgraph"
    elif inductor and device.inductor_refusal:
        inductor, why = False, device.inductor_refusal
    entries.note(prefix + "enable_inductor", inductor, why)
    if compile_config.splitting_ops and not fullgraph:
        entries.note(prefix + "splitting_ops", (), "needs enable_fullgraph")
    streams, why = compile_config.max_num_streams, ""
    if streams > 1 and not (fullgraph and device.is_gpu):
        streams, why = 1, "streams need a GPU" if fullgraph else "needs enable_fullgraph"
    entries.note(prefix + "max_num_streams", streams, why)
    tune, why = compile_config.tune, ""
    if tune and not (fullgraph and device.is_gpu and compile_config.compile_cache):
        tune = False
        why = "candidates are timed on a GPU" if not device.is_gpu else "needs enable_fullgraph and compile_cache"
    if tune and config.num_ranks > 1:
        tune, why = False, "candidates are timed on one rank"
    entries.note(prefix + "tune", tune, why)
    userbuffers = entries.note(prefix + "enable_userbuffers", *_userbuffers(config, device, fullgraph))

    default_buckets = default_token_buckets(max_num_tokens, model.hidden_size, config.tensor_parallel_size)
    buckets, why = _token_buckets(compile_config, device, max_num_tokens, mixed_step_tokens, default_buckets)
    entries.note(prefix + "capture_num_tokens", buckets, why)
    piecewise = bool(buckets)
    why = "" if piecewise or not compile_config.enable_piecewise_cuda_graph else why
    entries.note(prefix + "enable_piecewise_cuda_graph", piecewise, why)
    sizes = _batch_sizes(cuda, device, max_batch_size, entries)
    mixed, why = cuda.capture_mixed and piecewise and attention.supports_mixed_cuda_graphs, ""
    if cuda.capture_mixed and not mixed:
        why = "no token count is recorded" if not piecewise else f"unsupported by attention backend {attention.name}"
    entries.note("cuda_graph_config.capture_mixed", mixed, why)
    return {
        "fullgraph": fullgraph,
        "max_num_streams": streams,
        "userbuffers": userbuffers,
        "tune": tune,
        "inductor": inductor,
        "compile_sizes": _compile_sizes(compile_config, inductor, max_num_tokens, entries),
        "token_buckets": buckets,
        "piecewise_graphs": piecewise,
        "batch_sizes": sizes,
        "decode_graphs": bool(sizes),
        "full_mixed_graphs": mixed,
        "max_encoder_graphs": _max_encoder_graphs(cuda, device, entries),
    }


def _compile_sizes(config: TorchCompileConfig, inductor: bool, largest: int, entries: _Entries) -> tuple[int, ...]:
    sizes, why = (), "none asked for"
    if config.compile_sizes:
        sizes, why = (
            _clamp_sizes(config.compile_sizes, largest, "max_num_tokens", False) if inductor else ((), "needs Inductor")
        )
    return entries.note("torch_compile_config.compile_sizes", sizes, why)


def _token_buckets(
    config: TorchCompileConfig, device: DeviceFacts, largest: int, mixed_step_tokens: int, default: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    if not device.is_gpu:
        return (), "CUDA graphs need a GPU"
    if not config.enable_piecewise_cuda_graph:
        return (), "enable_piecewise_cuda_graph is off"
    if config.capture_num_tokens is not None:
        return _clamp_sizes(config.capture_num_tokens, largest, "max_num_tokens", False)
    small = (mixed_step_tokens,) if mixed_step_tokens else ()
    return _clamp_sizes((*default, *small), largest, "max_num_tokens", True)


def _max_encoder_graphs(config: CudaGraphConfig, device: DeviceFacts, entries: _Entries) -> int:
    most, why = (config.max_encoder_graphs, "") if device.is_gpu else (0, "CUDA graphs need a GPU")
    return entries.note("cuda_graph_config.max_encoder_graphs", most, why)


def _batch_sizes(config: CudaGraphConfig, device: DeviceFacts, largest: int, entries: _Entries) -> tuple[int, ...]:
    limit, limit_why = largest, "max_batch_size of the engine"
    if config.max_batch_size < 0:
        limit, limit_why = 0, "as asked: no whole-step graphs"
    elif config.max_batch_size:
        limit = min(config.max_batch_size, largest)
        limit_why = "" if limit == config.max_batch_size else limit_why
    if not device.is_gpu:
        limit, limit_why = 0, "CUDA graphs need a GPU"
    entries.note("cuda_graph_config.max_batch_size", limit, limit_why)
    if limit == 0:
        return entries.note("cuda_graph_config.batch_sizes", (), limit_why)
    requested = default_batch_sizes(limit) if config.batch_sizes is None else config.batch_sizes
    sizes, why = _clamp_sizes(requested, limit, "max_batch_size", config.batch_sizes is None)
    return entries.note("cuda_graph_config.batch_sizes", sizes, why)


def _clamp_sizes(requested: Sequence[int], largest: int, limit: str, is_default: bool) -> tuple[tuple[int, ...], str]:
    """The distinct sizes up to `largest`, ascending, and the reason."""
    allowed = tuple(sorted({size for size in requested if size <= largest}))
    dropped = len(set(requested)) - len(allowed)
    why = "default" if is_default else "as asked"
    return allowed, f"{why}, {dropped} above {limit}={largest} left out" if dropped else why


def _check_ranks(config: EngineConfig, device: DeviceFacts, model: ModelFacts, entries: _Entries) -> None:
    """Note the options of several ranks.

    Raises:
        ValueError: too few GPUs or layers, indivisible heads, or an option that does not support several ranks or stages.
    """
    size = config.num_ranks
    if size == 1:
        for name, effective in (("enable_expert_parallel", False), ("executor", None), ("rank_timeout", None)):
            entries.note(name, effective, "there is one rank")
        return
    if config.kv_offload_gb:
        raise ValueError(f"kv_offload_gb={config.kv_offload_gb} is not supported on {size} ranks; remove it")
    if config.executor == "local" and device.is_gpu and size > device.num_gpus:
        raise ValueError(
            f"{config.parallel_sizes_text} needs {size} GPUs, but this machine has {device.num_gpus} from "
            f"{device.device} on; lower it, or use executor=ray for GPUs of several machines"
        )
    _check_heads(config, model)
    _check_stages(config, model)


def _check_heads(config: EngineConfig, model: ModelFacts) -> None:
    """Check before ranks start; the model's own check needs its modules, seconds later."""
    parts = config.tensor_parallel_size
    if model.num_heads is not None and model.num_heads % parts:
        fit = [str(count) for count in range(2, model.num_heads + 1) if model.num_heads % count == 0]
        raise ValueError(
            f"tensor_parallel_size={parts} does not divide the {model.num_heads} attention heads of {model.name}; "
            + (f"choose among {', '.join(fit)}" if fit else "use one rank")
        )


def _check_stages(config: EngineConfig, model: ModelFacts) -> None:
    stages = config.pipeline_parallel_size
    if stages > 1 and not config.torch_compile_config.enable_fullgraph:
        raise ValueError(
            f"pipeline_parallel_size={stages} needs torch_compile_config.enable_fullgraph, since stages are cut from the "
            "captured graph; turn it on, or use tensor_parallel_size"
        )
    if model.num_layers is not None and stages > model.num_layers:
        raise ValueError(
            f"pipeline_parallel_size={stages} is above the {model.num_layers} layers of {model.name}, and each stage needs one; "
            "lower it"
        )


def _userbuffers(config: EngineConfig, device: DeviceFacts, fullgraph: bool) -> tuple[bool, str]:
    """Whether operands of collectives are written into symmetric memory, and why not."""
    if config.tensor_parallel_size == 1:
        return False, "a single rank has no collectives"
    if not device.is_gpu:
        return False, "CPUs have no symmetric memory"
    if not fullgraph:
        return False, "needs enable_fullgraph"
    return config.torch_compile_config.enable_userbuffers, ""
