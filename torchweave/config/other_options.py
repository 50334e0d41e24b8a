"""Options of vLLM and TensorRT-LLM that have no option of their own here: what is done about each, as one table.

Python, the command line, YAML files and `VLLM_*` variables are read by it. A value asks for what happens anyway (`neutral`), for
options of Torchweave (`means`), for something without a meaning here, which is left out with a line of advice (`advice`), or for
another answer, which is refused (`refusal`). An option that Torchweave has under the same name is not in the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_GRAPHS = "cuda_graph_config."
_ANY = object()
Meaning = Mapping[Any, Mapping[str, Any]] | Callable[[Any], "Mapping[str, Any] | None"]


@dataclass(frozen=True)
class OtherOption:
    """What is done about an option.

    Attributes:
        neutral: values that ask for what happens anyway. `None` always does.
        means: value -> options here; a function returns None for a value that it does not know.
        advice: end of the sentence about a further value, which is left out.
        refusal: end of the sentence about a further value, which is refused; before `advice`.
        takes_value: on the command line; False for a switch.
    """

    neutral: tuple[Any, ...] = ()
    means: Meaning = field(default_factory=dict)
    advice: str = ""
    refusal: str = ""
    takes_value: bool = True


@dataclass
class Translation:
    """Options under Torchweave's names, and a sentence about each that was left out."""

    options: dict[str, Any] = field(default_factory=dict)
    advice: list[tuple[str, str]] = field(default_factory=list)


def _switch(advice: str = "", refusal: str = "", means: Meaning | None = None, neutral: Any = False) -> OtherOption:
    return OtherOption((neutral,), {} if means is None else means, advice, refusal, takes_value=False)


def _ignored(*neutral: Any, why: str) -> OtherOption:
    return OtherOption(neutral, advice=why)


def _refused(*neutral: Any, why: str) -> OtherOption:
    return OtherOption(neutral, refusal=why)


def _renamed(name: str, *neutral: Any, advice: str = "") -> OtherOption:
    return OtherOption(neutral, lambda value: {name: value}, advice)


_SILENT = OtherOption((_ANY,))
_SILENT_SWITCH = OtherOption((_ANY,), takes_value=False)
_ONE_SCHEDULER = "steps are composed by max_num_tokens, mixed_step_tokens and context_chunking_policy"
_ALWAYS_AUTOMATIC = "this is decided by measurement or by the model"
_ONE_MACHINE = "ranks over several machines run by executor=ray or executor=torchrun"
_NO_OFFLOAD = "weights stay on the device: quantize them (quantization) or use several GPUs (tensor_parallel_size)"
_OWN_METRICS = "/metrics and /statistics have what is measured"
_OWN_LOADER = "weights are read from safetensors in parallel, straight to the device"
_NO_EMBEDS = "prompts are texts, token ids and images; embeddings are not taken"
_CONTEXT_PARALLEL = "attention is not split over the context; use tensor_parallel_size"
_MOVING_EXPERTS = "experts are not moved while requests run"
_PARTS_OF_STEPS = "steps are not split into micro-batches"
_NO_ADAPTER = "merge the adapter into the checkpoint"


def _attention(value: Any) -> Mapping[str, Any] | None:
    """vLLM's names of attention kernels: the same answers by each, so that an unknown one is left to `auto`."""
    names = {"TRITON_ATTN": "triton", "TRITON_ATTN_VLLM_V1": "triton", "TORCH_SDPA": "torch", "CPU_ATTN": "cpp"}
    name = names.get(str(value).upper().rsplit(".", 1)[-1])
    return None if name is None else {"attention_backend": name}


def _attention_config(value: Any) -> Mapping[str, Any] | None:
    return _attention(value.get("backend")) if isinstance(value, Mapping) and set(value) == {"backend"} else None


def _profiler(value: Any) -> Mapping[str, Any] | None:
    folder = value.get("torch_profiler_dir") if isinstance(value, Mapping) else None
    return {"profile_dir": folder} if folder and value.get("profiler", "torch") == "torch" else None


def _structured_outputs(value: Any) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    parser = value.get("reasoning_parser")
    others = {name: given for name, given in value.items() if name not in ("reasoning_parser", "backend") and given}
    return None if others else {"reasoning_parser": parser} if parser else {}


def _kv_cache_bytes(value: Any) -> Mapping[str, Any]:
    return {"kv_cache_memory_bytes": value}


def _rope(name: str) -> Callable[[Any], Mapping[str, Any]]:
    return lambda value: {"hf_overrides": {name: value}}


def _text_only(value: Any) -> Mapping[str, Any] | None:
    return {"limit_mm_per_prompt.image": 0} if value is True else None


_EXECUTORS: dict[Any, dict[str, Any]] = {
    "mp": {},
    "uni": {},
    "ray": {"executor": "ray"},
    "external_launcher": {"executor": "torchrun"},
}
_TASKS: dict[Any, dict[str, Any]] = {
    "generate": {"runner": "generate"},
    **{task: {"runner": "pooling"} for task in ("embed", "embedding", "classify", "score")},
}
_NO_IMAGE_TEXT = "inputs beside text are images"

ENGINE: dict[str, OtherOption] = {
    # The model and its files
    "task": OtherOption(
        ("auto",), _TASKS, refusal="it is one of auto, generate, embed, embedding, classify, score"
    ),
    "convert": OtherOption(
        ("auto", "none"), {"embed": {"runner": "pooling"}},
        refusal="a checkpoint is served by its own class; leave it out, or set runner=pooling for embeddings",
    ),
    "model_impl": _ignored("auto", "transformers", why="the model is always transformers' own class"),
    "tokenizer_mode": OtherOption(
        ("auto", "hf"), advice="the checkpoint's own fast tokenizer is used", means={"slow": {}},
        refusal="prompts are encoded by the checkpoint's Hugging Face tokenizer, which may give other tokens; leave it out",
    ),
    "skip_tokenizer_init": _switch("SamplingParams(detokenize=False) returns token ids without texts"),
    "tokenizer_revision": _refused(why="the tokenizer has the model's revision; give its folder as tokenizer"),
    "code_revision": _refused(why="the code of a checkpoint has its revision; set revision"),
    "hf_token": OtherOption((True, False, ""), lambda value: {"hf_token": value}),
    "hf_config_path": _refused(why="the config is that of the model's folder; change fields by hf_overrides"),
    "config_format": _refused("auto", "hf", why="the config is config.json; use a checkpoint in Hugging Face's layout"),
    "rope_scaling": OtherOption(({},), _rope("rope_scaling")),
    "rope_theta": OtherOption((), _rope("rope_theta")),
    "ignore_patterns": _ignored((), [], "original/**/*", ["original/**/*"], why="only the files that are read are downloaded"),
    "model_loader_extra_config": _ignored({}, why=_OWN_LOADER),
    "safetensors_load_strategy": _ignored("lazy", "eager", "prefetch", why=_OWN_LOADER),
    "safetensors_prefetch_num_threads": _SILENT,
    "pt_load_map_location": _SILENT,
    "use_tqdm_on_load": _SILENT_SWITCH,
    "max_parallel_loading_workers": _ignored(why=_OWN_LOADER),
    "allow_deprecated_quantization": _SILENT_SWITCH,
    "quantization_config": _refused({}, why="name a scheme by quantization"),
    "quantization_param_path": _refused(why="scales of the KV cache are read from the checkpoint"),
    "calculate_kv_scales": _switch(refusal="scales of an FP8 KV cache are the checkpoint's, else 1; leave it out"),
    "override_attention_dtype": _refused(why="attention has the model's dtype"),
    "disable_sliding_window": _switch(refusal="windows are the model's; set max_model_len to the window instead"),
    "served_model_name": _SILENT,  # of LLM; the server has an option of this name
    "chat_template": _refused(why="give it to LLM.chat, which takes chat_template"),
    "allowed_local_media_path": _ignored("", why="LLM.chat takes images themselves; the option is that of `torchweave serve`"),
    "reasoning_parser": _ignored("", why="LLM returns the whole text; `torchweave serve` splits it"),
    "reasoning_parser_plugin": _refused("", why="a package adds formats by entry points, see docs/how-to/write-a-plugin.md"),
    "reasoning_config": _refused({}, why="the format is chosen by reasoning_parser"),
    "io_processor_plugin": _refused("", why="a model takes prompts and returns what it generates or pools; leave it out"),
    "logits_processor_pattern": _refused(why="processors are classes; name them by logits_processors"),
    "additional_config": _ignored({}, why="it is of plug-ins of vLLM"),
    "structured_outputs_config": OtherOption(
        ({},), _structured_outputs, refusal="llguidance is the only backend; give options of the grammar in each request"
    ),
    **dict.fromkeys(
        ("guided_decoding_backend", "structured_outputs_backend"),
        _ignored("auto", "guidance", "llguidance", why="llguidance is the only backend"),
    ),
    "logprobs_mode": _refused("raw_logprobs", why="log-probabilities are those before temperature and processors; leave it out"),
    "enable_prompt_embeds": _switch(refusal=_NO_EMBEDS),
    "enable_mm_embeds": _switch(refusal=_NO_EMBEDS),
    "enable_return_routed_experts": _switch(refusal="outputs do not name experts"),
    "override_pooler_config": _renamed("pooler_config"),
    # Images
    "allowed_media_domains": _renamed("allowed_media_hosts", [], ()),
    "language_model_only": OtherOption((False,), _text_only, takes_value=False),
    "mm_processor_kwargs": _refused({}, why="images are prepared as the checkpoint's processor says; change its config"),
    "media_io_kwargs": _refused({}, why="images are decoded by Pillow as they are"),
    "interleave_mm_strings": _switch("the chat template decides where images stand"),
    "mm_processor_cache_gb": _ignored(0, 4, why="prepared images are not kept; encoded ones are, in the prefix cache"),
    "mm_processor_cache_type": _SILENT,
    "mm_shm_cache_max_object_size_mb": _SILENT,
    "disable_mm_preprocessor_cache": _SILENT_SWITCH,
    "skip_mm_profiling": _SILENT_SWITCH,
    "mm_encoder_only": _switch(refusal="a server generates or pools text"),
    "mm_encoder_tp_mode": _ignored("weights", "data", why="each rank encodes images whole"),
    "mm_encoder_attn_backend": _ignored(why=_ALWAYS_AUTOMATIC),
    "mm_tensor_ipc": _SILENT,
    "video_pruning_rate": _ignored(0, why="videos are not taken"),
    "disable_chunked_mm_input": _switch("an image is encoded whole, and its tokens are split like others"),
    "limit_mm_per_prompt.video": _ignored(0, why=_NO_IMAGE_TEXT),
    "limit_mm_per_prompt.audio": _ignored(0, why=_NO_IMAGE_TEXT),
    # Memory
    "swap_space": _ignored(0, 4, why="kv_offload_gb keeps evicted blocks of the KV cache in host memory"),
    "cpu_offload_gb": _ignored(0, why=_NO_OFFLOAD),
    "cpu_offload_params": _ignored((), [], why=_NO_OFFLOAD),
    "offload_backend": _ignored("auto", why=_NO_OFFLOAD),
    "offload_group_size": _ignored(0, why=_NO_OFFLOAD),
    "offload_num_in_group": _ignored(1, why=_NO_OFFLOAD),
    "offload_prefetch_step": _ignored(1, why=_NO_OFFLOAD),
    "offload_params": _ignored((), [], why=_NO_OFFLOAD),
    "kv_offloading_size": _renamed("kv_offload_gb", 0),
    "kv_offloading_backend": _ignored("native", why="blocks are kept in host memory by kv_offload_gb"),
    "kv_cache_memory": OtherOption((), _kv_cache_bytes),
    "prefix_caching_hash_algo": _ignored("builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", why="it is SHA-256"),
    "disable_hybrid_kv_cache_manager": _switch("layers with windows always hold blocks of their own"),
    "kv_sharing_fast_prefill": _switch("prompts are read by all layers"),
    "mamba_block_size": _ignored(why="states are kept at block borders (num_state_snapshots)"),
    "mamba_cache_mode": _ignored("none", "align", "all", why="states are kept at block borders (num_state_snapshots)"),
    "mamba_cache_dtype": _refused("auto", why="recurrent states have the dtype that the model's own code gives them"),
    "mamba_ssm_cache_dtype": _refused("auto", "float32", why="recurrent states have the dtype of the model's own code"),
    "enable_sleep_mode": _switch("LLM.pause and resume stop and continue the engine; memory stays taken"),
    # Ranks
    "distributed_executor_backend": OtherOption((), _EXECUTORS, refusal="it is mp, uni, ray or external_launcher"),
    "disable_custom_all_reduce": _switch(means={True: {"symmetric_memory": False}}),
    "ray_workers_use_nsight": _switch("profile_dir and start_profile record each rank"),
    "all2all_backend": _ignored(why="each rank computes its experts of all tokens, then the results are added"),
    "expert_placement_strategy": _ignored("linear", why="experts are distributed in order"),
    "enable_eplb": _switch(_MOVING_EXPERTS),
    "eplb_config": _ignored({}, why=_MOVING_EXPERTS),
    "num_redundant_experts": _ignored(0, why=_MOVING_EXPERTS),
    "enable_ep_weight_filter": _SILENT_SWITCH,
    "moe_backend": _ignored("auto", why=_ALWAYS_AUTOMATIC),
    "linear_backend": _ignored("auto", why=_ALWAYS_AUTOMATIC),
    "enable_dbo": _switch(_PARTS_OF_STEPS),
    "ubatch_size": _ignored(0, why=_PARTS_OF_STEPS),
    "dbo_decode_token_threshold": _SILENT,
    "dbo_prefill_token_threshold": _SILENT,
    "disable_nccl_for_dp_synchronization": _SILENT_SWITCH,
    "enable_elastic_ep": _switch(_MOVING_EXPERTS),
    "prefill_context_parallel_size": _ignored(1, why=_CONTEXT_PARALLEL),
    "decode_context_parallel_size": _ignored(1, why=_CONTEXT_PARALLEL),
    "dcp_kv_cache_interleave_size": _SILENT,
    "cp_kv_cache_interleave_size": _SILENT,
    "dcp_comm_backend": _SILENT,
    "data_parallel_size": _refused(1, why="replicas are those of `torchweave serve`; start an LLM in each of several processes"),
    "data_parallel_size_local": _ignored(1, why="all replicas of a server run on its machine"),
    "data_parallel_backend": _ignored("mp", why="all replicas of a server run on its machine"),
    "data_parallel_address": _ignored(why="all replicas of a server run on its machine"),
    "data_parallel_rpc_port": _SILENT,
    "data_parallel_rank": _refused(why="a server starts all its replicas; set data_parallel_size"),
    "data_parallel_start_rank": _refused(0, why="a server starts all its replicas; set data_parallel_size"),
    "data_parallel_hybrid_lb": _switch(refusal="a server balances its replicas itself"),
    "data_parallel_external_lb": _switch(refusal="start one server for each replica, without the option"),
    "nnodes": _refused(1, why=_ONE_MACHINE),
    "node_rank": _refused(0, why=_ONE_MACHINE),
    "master_addr": _SILENT,
    "master_port": _SILENT,
    "distributed_timeout_seconds": _ignored(why="the option is rank_timeout"),
    "worker_cls": _refused("auto", why="ranks are Torchweave's own; see docs/develop/control-calls.md for calls on each"),
    "worker_extension_cls": _refused("", why="ranks take no methods of another class; see docs/develop/control-calls.md"),
    "weight_transfer_config": _refused({}, why="weights are read once, at the start"),
    "kv_transfer_config": _refused({}, why="KV blocks are not exchanged with other engines"),
    "kv_events_config": _ignored({}, why="no events of blocks are published"),
    "ec_transfer_config": _refused({}, why="encodings are not exchanged with other engines"),
    # Steps
    "async_scheduling": OtherOption((True,), {False: {"run_ahead": 0}}, takes_value=False),
    "disable_async_output_proc": _switch(means={True: {"run_ahead": 0}}),
    "num_scheduler_steps": _ignored(1, why="steps are launched ahead of their tokens (run_ahead)"),
    "multi_step_stream_outputs": _SILENT_SWITCH,
    "num_lookahead_slots": _SILENT,
    "use_v2_block_manager": _SILENT_SWITCH,
    "preemption_mode": _ignored("recompute", why="a paused request is recomputed; kv_offload_gb keeps its blocks"),
    "scheduler_delay_factor": _ignored(0, why="the option is batch_wait_timeout_iters"),
    "scheduler_cls": _ignored(why=_ONE_SCHEDULER),
    "scheduler_reserve_full_isl": _SILENT_SWITCH,
    "stream_interval": _ignored(1, why="a stream has the text of each token"),
    "max_num_partial_prefills": _ignored(1, why=_ONE_SCHEDULER),
    "max_long_partial_prefills": _ignored(1, why=_ONE_SCHEDULER),
    "long_prefill_token_threshold": _ignored(0, why=_ONE_SCHEDULER),
    "prefill_schedule_interval": _ignored(1, why=_ONE_SCHEDULER),
    "disable_cascade_attn": _SILENT_SWITCH,
    "max_seq_len_to_capture": _ignored(8192, why="graphs are recorded by token count: torch_compile_config.capture_num_tokens"),
    "max_context_len_to_capture": _ignored(why="graphs are recorded by token count: torch_compile_config.capture_num_tokens"),
    "cudagraph_capture_sizes": OtherOption(
        ([],), lambda value: {"torch_compile_config.capture_num_tokens": value, f"{_GRAPHS}batch_sizes": value}
    ),
    "max_cudagraph_capture_size": _renamed(f"{_GRAPHS}max_batch_size"),
    "cuda_graph_sizes": _renamed(f"{_GRAPHS}batch_sizes", []),
    "performance_mode": _ignored("balanced", why=_ALWAYS_AUTOMATIC),
    "attention_config": OtherOption(({},), _attention_config, advice=_ALWAYS_AUTOMATIC),
    "kernel_config": _ignored({}, why=_ALWAYS_AUTOMATIC),
    "profiler_config": OtherOption(({},), _profiler, advice="profile_dir is the folder of start_profile's traces"),
    "numa_bind": _switch("processes are not bound; start them by numactl"),
    # Observation
    "disable_log_stats": _SILENT_SWITCH,
    "aggregate_engine_logging": _SILENT_SWITCH,
    "show_hidden_metrics_for_version": _ignored(why=_OWN_METRICS),
    "collect_detailed_traces": _ignored(why=_OWN_METRICS),
    "otlp_traces_endpoint": _ignored(why=_OWN_METRICS),
    "kv_cache_metrics": _switch(_OWN_METRICS),
    "kv_cache_metrics_sample": _SILENT,
    "cudagraph_metrics": _switch(_OWN_METRICS),
    "enable_mfu_metrics": _switch(_OWN_METRICS),
    "enable_mm_processor_stats": _switch(_OWN_METRICS),
    "enable_logging_iteration_details": _switch(_OWN_METRICS),
    "enable_layerwise_nvtx_tracing": _switch("profile_dir and start_profile record each kernel"),
    "enable_log_requests": _switch("requests are counted in /metrics; their texts are not logged"),
    "disable_log_requests": _SILENT_SWITCH,
    # Adapters
    "default_mm_loras": _refused({}, why="requests name their adapter"),
    **dict.fromkeys(
        (
            "max_cpu_loras", "lora_dtype", "lora_extra_vocab_size", "long_lora_scaling_factors",
            "lora_target_modules",
        ),
        _SILENT,
    ),
    **dict.fromkeys(
        (
            "fully_sharded_loras", "enable_lora_bias", "enable_tower_connector_lora", "specialize_active_lora",
            "enable_mixed_moe_lora_format", "enable_moe_shared_loras",
        ),
        _SILENT_SWITCH,
    ),
    "enable_prompt_adapter": _switch(refusal=_NO_ADAPTER),
    "max_prompt_adapters": _SILENT,
    "max_prompt_adapter_token": _SILENT,
}  # fmt: skip
"""vLLM's options of the engine, by name. Those of an adapter mean nothing without one."""

SERVER: dict[str, OtherOption] = {
    "enable_auto_tool_choice": _SILENT_SWITCH,
    "exclude_tools_when_tool_choice_none": _switch(refusal="the template gets the tools of a request; leave them out there"),
    "tool_parser_plugin": _refused("", why="a package adds formats by entry points, see docs/how-to/write-a-plugin.md"),
    "tool_server": _refused(why="the server runs no tools; clients do"),
    "chat_template_content_format": _ignored("auto", why="the form that the template takes is found by rendering it"),
    "response_role": _refused("assistant", why="answers have the role assistant"),
    "return_tokens_as_token_ids": _switch(refusal="requests ask for it by return_tokens_as_token_ids"),
    "allow_credentials": _switch("requests with a key carry it in a header, which needs no credentials"),
    "allowed_methods": _ignored(["*"], "*", why="allowed origins may use every method"),
    "allowed_headers": _ignored(["*"], "*", why="allowed origins may send every header"),
    "enable_ssl_refresh": _switch("restart the server for a new certificate"),
    "ssl_ciphers": _ignored(why="ciphers are the defaults of Python's ssl module"),
    "enable_request_id_headers": _SILENT_SWITCH,
    "enable_prompt_tokens_details": _SILENT_SWITCH,
    "enable_server_load_tracking": _SILENT_SWITCH,
    "enable_force_include_usage": _switch(refusal="streams report usage where stream_options.include_usage asks for it"),
    "enable_tokenizer_info_endpoint": _SILENT_SWITCH,
    "enable_log_outputs": _switch("texts are not logged"),
    "enable_log_deltas": _SILENT_SWITCH,
    "max_log_len": _SILENT,
    "disable_fastapi_docs": _switch("/docs describes the routes; a proxy may hide it"),
    "disable_frontend_multiprocessing": _SILENT_SWITCH,
    "disable_uvicorn_access_log": _SILENT_SWITCH,
    "disable_access_log_for_endpoints": _SILENT,
    "uvicorn_log_level": _ignored("info", "warning", "error", why="the log has warnings and errors"),
    "log_config_file": _ignored(why="the log is that of Python's logging, with warnings and errors"),
    "log_error_stack": _switch("an unexpected error is logged with its traceback"),
    "h11_max_incomplete_event_size": _SILENT,
    "h11_max_header_count": _SILENT,
    "headless": _switch(refusal=_ONE_MACHINE),
    "grpc": _switch(refusal="the server speaks HTTP"),
    "tokens_only": _switch(refusal="the server takes texts"),
    "enable_offline_docs": _SILENT_SWITCH,
    "disable_log_stats": _SILENT_SWITCH,
    "prompt_adapters": _refused([], why=_NO_ADAPTER),
    "hostname": _renamed("host"),
}  # fmt: skip
"""vLLM's options of the server."""

TENSORRT_LLM: dict[str, OtherOption] = {
    "backend": _ignored("pytorch", why="the model is always transformers' own class"),
    "kv_cache_config.free_gpu_memory_fraction": _renamed("gpu_memory_utilization"),
    "kv_cache_config.mem_fraction": _renamed("gpu_memory_utilization"),
    "kv_cache_config.max_gpu_total_bytes": OtherOption((0,), _kv_cache_bytes),
    "kv_cache_config.host_cache_size": OtherOption((0,), lambda value: {"kv_offload_gb": value / 2**30}),
    "kv_cache_config.enable_partial_reuse": _SILENT,
    "kv_cache_config.copy_on_partial_reuse": _SILENT,
    "kv_cache_config.event_buffer_max_size": _SILENT,
    "kv_cache_config.onboard_blocks": _SILENT,
    "kv_cache_config.use_uvm": _SILENT,
    "moe_expert_parallel_size": OtherOption((1, -1), lambda value: {"enable_expert_parallel": True}),
    "moe_tensor_parallel_size": _SILENT,
    "moe_cluster_parallel_size": _SILENT,
    "moe_config.backend": _ignored("AUTO", why=_ALWAYS_AUTOMATIC),
    "attn_backend": OtherOption(("TRTLLM",), _attention, advice=_ALWAYS_AUTOMATIC),
    "enable_attention_dp": _switch("attention is sharded over ranks"),
    "disable_overlap_scheduler": _switch(means={True: {"run_ahead": 0}}),
    "sampler_type": _SILENT,
    "use_torch_sampler": _SILENT,
    "enable_autotuner": _SILENT,
    "allreduce_strategy": _ignored("AUTO", why=_ALWAYS_AUTOMATIC),
    "print_iter_log": _switch(_OWN_METRICS),
    "enable_iter_perf_stats": _SILENT_SWITCH,
    "enable_iter_req_stats": _SILENT_SWITCH,
    "return_perf_metrics": _SILENT_SWITCH,
    "num_postprocess_workers": _ignored(0, why="the option is api_server_count"),
    "gpus_per_node": _SILENT,
    "checkpoint_format": _refused("HF", why="checkpoints have Hugging Face's layout"),
    "context_parallel_size": _ignored(1, why=_CONTEXT_PARALLEL),
    "max_beam_width": _SILENT,
    "use_cuda_graph": OtherOption((True,), {False: {f"{_GRAPHS}max_batch_size": -1}}),
    "cuda_graph_padding_enabled": _renamed(f"{_GRAPHS}enable_padding"),
    "cuda_graph_batch_sizes": _renamed(f"{_GRAPHS}batch_sizes", []),
    "cuda_graph_max_batch_size": _renamed(f"{_GRAPHS}max_batch_size"),
    "max_input_len": _ignored(1024, why="the option is max_model_len, prompt and answer together"),
    "fail_fast_on_attention_window_too_large": _SILENT,
    "iter_stats_max_iterations": _SILENT,
    "request_stats_max_iterations": _SILENT,
    "batch_wait_timeout_ms": _ignored(0, why="the option is batch_wait_timeout_iters"),
    "enable_layerwise_nvtx_marker": _switch("profile_dir and start_profile record each kernel"),
    "cache_transceiver_config.backend": _refused(why="KV blocks are not exchanged with other engines"),
}
"""TensorRT-LLM's options, by their path in its YAML file."""

ALL: dict[str, OtherOption] = ENGINE | SERVER | TENSORRT_LLM
SHORT = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size", "-q": "quantization",
    "-asc": "api_server_count", "-ep": "enable_expert_parallel", "-sc": "speculative_config", "-ac": "attention_config",
    "-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size", "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local", "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend", "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
}  # fmt: skip
"""vLLM's short forms on the command line."""
_QUANTIZATION = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "gptq_bitblas": "gptq", "modelopt_fp4": "modelopt", "fbgemm_fp8": "fp8",
    "auto": None, "none": None,
}  # fmt: skip
_SAME_WEIGHTS = ("safetensors", "hf", "pt", "npcache", "fastsafetensors", "runai_streamer")
_VALUES: dict[str, dict[Any, Any]] = {
    "quantization": _QUANTIZATION,
    "load_format": dict.fromkeys(_SAME_WEIGHTS, "auto"),
    "max_model_len": {"auto": None, -1: None},
    "dtype": {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"},
    "reasoning_parser": {"": "auto"},
    "tool_call_parser": {"": "auto"},
}
"""Other values of Torchweave's own options."""
_SIZES = frozenset(
    {
        "max_model_len", "max_batch_size", "max_num_tokens", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens",
        "max_seq_len",
    }
)  # fmt: skip
_LOWER_CASE = frozenset(
    {
        "capacity_scheduler_policy", "context_chunking_policy", "speculative_config.method", "pooler_config.pooling_type",
    }
)  # fmt: skip
_DECIMAL, _BINARY = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}, {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def translate(given: Mapping[str, Any], known: Iterable[str]) -> Translation:
    """Options by Torchweave's names from those of a program for vLLM or TensorRT-LLM.

    Args:
        given: values by (dotted) name; unknown names stay, for the caller to refuse.
        known: names of Torchweave's options, which the table does not change.

    Raises:
        ValueError: a value would give another answer than it does there, or an option is given twice.
    """
    names, result = frozenset(known) | {"hf_token"}, Translation()
    sections = {name.partition(".")[0] for name in names}
    for name, value in _with_parts(given, sections):
        if name in names or name in sections or name not in ALL:
            _add(result, name, own_value(name, value), names, name)
            continue
        option = ALL[name]
        if value is None or _is_one_of(value, option.neutral):
            continue
        meant = _meaning(option.means, value)
        if meant is not None:
            for own, converted in meant.items():
                _add(result, own, converted, names, name)
        elif option.refusal:
            raise ValueError(f"{name}={_shown(value)} is not supported: {option.refusal}")
        else:
            result.advice.append((f"{name}={_shown(value)}", f"has no effect; {option.advice}"))
    return result


def _with_parts(given: Mapping[str, Any], sections: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The options, with those within a section that are in the table by their dotted names."""
    for name, value in given.items():
        if name in sections and isinstance(value, Mapping):
            parts = {key: item for key, item in value.items() if f"{name}.{key}" in ALL}
            yield name, {key: own_value(f"{name}.{key}", item) for key, item in value.items() if key not in parts}
            yield from ((f"{name}.{key}", item) for key, item in parts.items())
        else:
            yield name, value


def _add(result: Translation, own: str, value: Any, known: frozenset[str], given_as: str) -> None:
    if own != given_as and own not in known:
        result.advice.append((f"{given_as}={_shown(value)}", "has no effect; it is an option of `torchweave serve`"))
    elif isinstance(value, Mapping) and isinstance(result.options.get(own), Mapping):
        result.options[own] = {**result.options[own], **value}
    elif own in result.options and own != given_as:
        raise ValueError(f"{own} is given twice, once as {given_as}; give one of them")
    else:
        result.options[own] = value


def own_value(name: str, value: Any) -> Any:
    """A value of one of Torchweave's options from another spelling of it: `4k`, `auto`, `awq_marlin`."""
    if (
        name in _SIZES
        and isinstance(value, str)
        and (size := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", value.strip()))
    ):
        unit = _DECIMAL.get(size[2]) or _BINARY[size[2]]
        if "." not in size[1] or size[2] in _DECIMAL:
            return round(float(size[1]) * unit)
    if name == "limit_mm_per_prompt.image" and isinstance(value, Mapping):
        return value.get("count", value)
    if name == "dtype" and value is not None:
        value = str(value).removeprefix("torch.")
    if name in _LOWER_CASE and isinstance(value, str):
        value = value.lower()
    values = _VALUES.get(name, {})
    return values[value] if isinstance(value, (str, int)) and value in values else value


def _meaning(means: Meaning, value: Any) -> Mapping[str, Any] | None:
    if not isinstance(means, Mapping):
        return means(value)
    return means.get(value) if isinstance(value, (str, int, float, bool)) else None


VARIABLES: dict[str, tuple[str, str]] = {
    "VLLM_API_KEY": ("api_key", ""),
    "VLLM_ATTENTION_BACKEND": ("attention_backend", ""),
    "VLLM_CPU_KVCACHE_SPACE": ("cpu_kv_cache_gib", ""),
    "VLLM_TORCH_PROFILER_DIR": ("profile_dir", ""),
    "VLLM_PLUGINS": ("", "the option is plugins, and packages register under other names"),
    "VLLM_CACHE_ROOT": ("", "the option is torch_compile_config.compile_cache_dir"),
    "VLLM_LOGGING_LEVEL": ("", "the log has warnings and errors"),
    "VLLM_LOGGING_CONFIG_PATH": ("", "the log is that of Python's logging"),
    "VLLM_CONFIGURE_LOGGING": ("", "the log is that of Python's logging"),
    "VLLM_HOST_IP": ("", "the option is host"),
    "VLLM_PORT": ("", "the option is port"),
    "VLLM_WORKER_MULTIPROC_METHOD": ("", "ranks are always new processes"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("", "LLM runs in this process, a server's engine in one of its own"),
    "VLLM_USE_V1": ("", "there is one engine"),
    "VLLM_USE_V2_MODEL_RUNNER": ("", "there is one engine"),
    "VLLM_SERVER_DEV_MODE": ("", "the option is enable_control_routes"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": ("", "lengths beyond the model's are refused; stretch RoPE by hf_overrides"),
    "VLLM_BATCH_INVARIANT": ("", "kernels are chosen by the size of the batch"),
    "VLLM_CPU_OMP_THREADS_BIND": ("", "threads are bound by the system; use taskset or numactl"),
    "VLLM_USE_MODELSCOPE": ("", "models come from the Hugging Face hub; give a folder"),
    "VLLM_TARGET_DEVICE": ("", "the option is device"),
}
"""vLLM's variables of the environment: the option that takes the value, or why there is none."""
_SILENT_VARIABLES = frozenset(
    {"VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_USAGE_SOURCE", "VLLM_LOG_STATS_INTERVAL"}
)


def read_variables(variables: Mapping[str, str], given: Iterable[str], known: Iterable[str]) -> Translation:
    """Options from vLLM's variables, unless they are `given`, with a sentence about each; see `translate` for `known`."""
    taken, names, result = set(given), frozenset(known), Translation()
    for variable, text in sorted(variables.items()):
        own, why = VARIABLES.get(variable, ("", "it is vLLM's"))
        if variable in _SILENT_VARIABLES or not text or own in taken or (own and own not in names):
            continue
        means = ALL["attention_config"].means if own == "attention_backend" else None
        meant = means({"backend": text}) if callable(means) else {own: text} if own else None
        if not meant:
            result.advice.append((variable, f"has no effect; {why if not own else _ALWAYS_AUTOMATIC}"))
        else:
            result.options |= meant
            result.advice.append((variable, f"is read as the option {own}"))
    return result


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is neutral; True is not 1."""
    return any(
        each is _ANY or (each == value and isinstance(each, bool) == isinstance(value, bool)) for each in neutral
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def parse(text: str) -> Any:
    """The value of a text from the command line or the environment: JSON, else the text itself."""
    if text.lower() in ("true", "false", "null", "none"):
        text = {"none": "null"}.get(text.lower(), text.lower())
    try:
        return json.loads(text)
    except ValueError:
        return text
