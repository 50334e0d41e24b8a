"""Options of the engine and the server with their defaults: frozen dataclasses whose docstrings are the help texts.

Names follow TensorRT-LLM (`torch_compile_config`, `cuda_graph_config`) and vLLM (`max_model_len`, `gpu_memory_utilization`).
`config.resolve` turns a config into a plan. No other module of the package reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from torchweave.plug_points import ATTENTION_BACKENDS, QUANTIZATION_FORMATS, REASONING_PARSERS, TOOL_PARSERS

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Quantization = (
    Literal["fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int4", "mxfp4", "nvfp4", "nvfp4_w4a4"]
    | Annotated[str, QUANTIZATION_FORMATS]
)
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
AttentionName = Literal["auto", "triton", "torch", "fa3", "cpp"] | Annotated[str, ATTENTION_BACKENDS]
CapacityPolicy = Literal["guaranteed_no_evict", "max_utilization", "static_batch"]
SchedulingPolicy = Literal["fcfs", "priority"]
ChunkingPolicy = Literal["first_come_first_served", "equal_progress"]
DynamicShapes = Literal["backed", "unbacked", "backed_size_oblivious"]
CacheFormat = Literal["binary", "unpacked"]
_ToolCallParser = Literal[
    "auto", "cohere", "cohere_command", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "ernie45",
    "functiongemma", "gemma4", "glm45", "glm47", "gpt_oss", "granite", "granite31", "granite4", "hermes",
    "hunyuan_a13b", "hy_v3", "internlm", "jamba", "kimi_k2", "kimi_k3", "lfm2", "llama3_json", "llama4_pythonic",
    "longcat", "mimo", "minimax", "minimax_m2", "minimax_m3", "mistral", "nemotron_json", "olmo3", "openai",
    "phi4_mini", "phi4_tool_call", "pythonic", "qwen3_coder", "qwen3_xml", "seed_oss", "step3", "step3p5", "xlam",
]  # fmt: skip
_ReasoningParser = Literal[
    "auto", "none", "cohere", "deepseek_r1", "ernie45", "gemma4", "glm45", "gpt_oss", "granite", "kimi_k2", "kimi_k3", "kimi_vl",
    "minimax_m2", "mistral", "qwen3", "seed_oss", "step3",
]  # fmt: skip
ToolCallParser = _ToolCallParser | Annotated[str, TOOL_PARSERS]
ReasoningParser = _ReasoningParser | Annotated[str, REASONING_PARSERS]
PassNumerics = Literal["exact", "tolerance"]
Executor = Literal["local", "torchrun", "ray"]
SpeculativeMethod = Literal["ngram", "draft_model", "eagle3", "mtp"]
DRAFT_HEADS = ("eagle3", "mtp")
"""Methods whose drafter takes the model's hidden states."""
Runner = Literal["auto", "generate", "pooling"]
PoolingType = Literal["last", "mean"]


@dataclass(frozen=True)
class TorchCompileConfig:
    """Capture, fusion and compilation of the model's graph.

    Attributes:
        enable_fullgraph: capture the model as one graph. Off: run the module eagerly, split at boundary ops while CUDA graphs
            are recorded.
        enable_inductor: compile each distinct piece with Inductor. Off: run pieces as plain FX code.
        enable_piecewise_cuda_graph: record context and mixed steps as piecewise CUDA graphs, by token count.
        capture_num_tokens: token counts (buckets) to record. None: powers of two to 128, 256, 384, steps of 256 from 512 to
            3072, and mixed_step_tokens, up to max_num_tokens; for small models steps of 256 to 4096, of 512 to 8192 and of 1024
            beyond too. vLLM: `cudagraph_capture_sizes`.
        splitting_ops: ops besides the boundary ops at which the graph is split, such as `mylib::mixer` or `aten::silu`. One that
            only writes into its arguments runs outside CUDA graphs, like attention; any other is a piece of its own.
        compile_sizes: token counts for which pieces are also compiled with a static shape and Inductor's autotuning.
        max_padding_ratio: largest ratio of padded to real tokens; a step above it runs unpadded.
        dynamic_shapes: how capture keeps the token count symbolic.
        passes: your own passes as `module:Name`, or by the names of installed ones; they run after the built-in passes.
        disabled_passes: names of passes to skip.
        enabled_passes: names of passes to run without a measured gain, or in spite of `pass_numerics`.
        pass_numerics: `exact` skips passes that add or omit a rounding; `tolerance` runs them, each within its documented
            bound.
        compile_cache: keep captured graphs and compiled pieces on disk and load them at the next start.
        compile_cache_dir: folder of the compile cache. None: `torchweave` in the user's cache folder.
        compile_cache_format: `binary` stores cache entries only; `unpacked` also writes each piece's code next to its entry.
        enable_userbuffers: write all-reduce inputs directly into symmetric memory, which saves the copy before the collective.
        max_num_streams: largest number of CUDA streams for a piece. Above 1, a piece is split where its critical path or a
            measurement promises a gain.
        tune: measure kernel candidates at the first start on a kind of GPU and keep the results in the compile cache. Off:
            use the measurements shipped for that GPU, or a heuristic.
        dump_dir: folder for the graph before and after each pass, the code of each piece, a timeline and an HTML report.
            None: no dump.
        debug: check addresses and shapes at every replay, and lint the graph after every pass.
    """

    enable_fullgraph: bool = True
    enable_inductor: bool = True
    enable_piecewise_cuda_graph: bool = True
    capture_num_tokens: tuple[int, ...] | None = None
    splitting_ops: tuple[str, ...] = ()
    compile_sizes: tuple[int, ...] = ()
    max_padding_ratio: float = 2.0
    dynamic_shapes: DynamicShapes = "backed_size_oblivious"
    passes: tuple[str, ...] = ()
    disabled_passes: tuple[str, ...] = ()
    enabled_passes: tuple[str, ...] = ()
    pass_numerics: PassNumerics = "exact"
    compile_cache: bool = True
    compile_cache_dir: str | None = None
    compile_cache_format: CacheFormat = "binary"
    enable_userbuffers: bool = True
    max_num_streams: int = 1
    tune: bool = False
    dump_dir: str | None = None
    debug: bool = False


@dataclass(frozen=True)
class CudaGraphConfig:
    """CUDA graphs of whole decode steps, and of the image encoder.

    Attributes:
        enable_padding: pad a decode batch to the next recorded size. Off: replay exact sizes only.
        max_batch_size: largest batch size to record. 0: the engine's `max_batch_size`; negative: none.
        batch_sizes: batch sizes to record. None: 1, 2, 4, steps of 8 to 128, of 64 to 384, of 128 above, and the maximum.
        capture_mixed: record mixed steps as whole-step graphs too, if the attention backend supports it.
        max_encoder_graphs: most sizes of images for which the image encoder is recorded. 0: none. vLLM: `cudagraph_mm_encoder`.
    """

    enable_padding: bool = True
    max_batch_size: int = 0
    batch_sizes: tuple[int, ...] | None = None
    capture_mixed: bool = True
    max_encoder_graphs: int = 16


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: propose tokens ahead, and verify them together in one step. Tokens stay the same.

    Attributes:
        method: drafter. `ngram` proposes the tokens that followed the last tokens of a request earlier in its prompt or answer
            (prompt lookup); `draft_model` those that a smaller model generates; `eagle3` those that an EAGLE-3 head predicts from
            the model's hidden states; `mtp` those of the multi-token-prediction layer in the model's own checkpoint. None: no
            speculation.
        model: of `draft_model`: a model with the same tokenizer; of `eagle3`: a head trained for the model. Named as `model` is.
            `ngram` and `mtp` have none.
        num_speculative_tokens: most drafts per request and step. TensorRT-LLM: `max_draft_len`.
        prompt_lookup_max: longest run of last tokens that `ngram` looks for. TensorRT-LLM: `max_matching_ngram_size`.
        prompt_lookup_min: shortest run that `ngram` looks for.
        adaptive: choose the number of drafts of each step, or none, by measured times of steps and by what each request accepted.
            Off: always num_speculative_tokens.
        disable_by_batch_size: most requests in a step with drafts; larger steps take one token per request. None: as many as
            fit into max_num_tokens.
        synthetic_acceptance: for benchmarks: propose for every request and accept each draft with this probability, if those
            before it are accepted. The output is meaningless. None: verify.
    """

    method: SpeculativeMethod | None = None
    model: str | None = None
    num_speculative_tokens: int = 3
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    adaptive: bool = True
    disable_by_batch_size: int | None = None
    synthetic_acceptance: float | None = None


@dataclass(frozen=True)
class MultiModalLimits:
    """Inputs of a prompt beside its text.

    Attributes:
        image: most images of a prompt. 0: serve an image-text model as a text decoder, without its vision tower.
    """

    image: int = 16


@dataclass(frozen=True)
class PoolerConfig:
    """How a model with runner=pooling makes an embedding of a prompt's hidden states.

    Attributes:
        pooling_type: `last` takes the hidden state of the last token, `mean` averages those of all tokens. None: what the
            checkpoint names (sentence-transformers' `1_Pooling`), or last.
        normalize: divide embeddings by their L2 norm. None: what the checkpoint names, or yes.
    """

    pooling_type: PoolingType | None = None
    normalize: bool | None = None


@dataclass(frozen=True)
class EngineConfig:
    """One engine: model, parallelism, memory and scheduling.

    Attributes:
        model: a folder in Hugging Face's layout, a hub id, a built-in model (`demo`) or `shape:NAME`.
        runner: `generate` text, or `pooling`: embeddings of a decoder, or the classes of a `ForSequenceClassification`. auto:
            pooling if the checkpoint is one of sentence-transformers, a base model or a sequence classification model.
        dtype: dtype of weights and activations. auto: the checkpoint's on a GPU, float32 on a CPU.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        load_format: `auto` reads the checkpoint; `dummy` fills random weights, for benchmarks.
        ignore_unused_weights: load a checkpoint without tensors that have no place in the model, and without an adapter beside it.
            Off: refuse it, since the answers would be another model's.
        quantization: quantize linears at load time: `fp8` or `fp8_per_tensor` (one scale per weight), `fp8_per_channel`,
            `fp8_per_block` (128 x 128), `int4` (weights only, a scale per 128 inputs), `nvfp4` (weights only) or `mxfp4` (weights
            of experts only, of linears in a model without experts). `nvfp4_w4a4` rounds activations of an NVFP4 checkpoint to
            FP4 as it declares, to measure accuracy. None: keep the checkpoint's format, whose own name (`awq`, `gptq`,
            `compressed-tensors`) is also taken.
        trust_remote_code: run Python code that is part of the checkpoint.
        tokenizer: folder or hub id of another tokenizer. None: the model's.
        revision: branch, tag or commit of a model on the hub. None: its main branch.
        download_dir: folder for models from the hub. None: Hugging Face's cache.
        hf_overrides: fields of config.json by name that replace the checkpoint's, as if they stood there; those of a nested config
            such as text_config replace its fields.
        generation_config: sampling defaults. `auto`: the checkpoint's generation_config.json; `vllm`: temperature 1 and no
            filter; or a folder with a generation_config.json.
        override_generation_config: sampling defaults that replace these: temperature, top_k, top_p, min_p, repetition_penalty.
        max_model_len: longest request in tokens, prompt and output. None: the model's limit, lowered to the KV cache's
            capacity.
        max_batch_size: most requests per step. None: 512 on a GPU, 32 on a CPU. vLLM: `max_num_seqs`.
        max_num_tokens: token budget per step over all requests. None: 8192 on a GPU, 2048 over pipeline stages and on
            a CPU. vLLM: `max_num_batched_tokens`.
        enable_chunked_context: split prompts over several steps. Off: refuse prompts above max_num_tokens. vLLM:
            `enable_chunked_prefill`.
        block_size: tokens per block of the paged KV cache. None: the attention backend's preference.
        num_kv_blocks: number of KV-cache blocks. None: as many as fit into the remaining memory. vLLM:
            `num_gpu_blocks_override`.
        kv_cache_dtype: dtype of keys and values. auto: the model's dtype, or FP8 if the checkpoint asks for it; `fp8`
            (`fp8_e4m3`) and `fp8_e5m2` hold twice as many tokens as a 16-bit dtype.
        gpu_memory_utilization: fraction of GPU memory for the engine, weights and CUDA graphs included.
        cpu_kv_cache_gib: size of the KV cache on a CPU, in GiB.
        kv_cache_memory_bytes: size of the KV cache of a rank in bytes, on a GPU or a CPU (`2G` is 2 GiB, `2g` 2 billion). None: by
            gpu_memory_utilization or cpu_kv_cache_gib.
        kv_offload_gb: host memory (GiB, pinned on a GPU) that keeps reusable KV blocks evicted from the device. 0: recompute
            them.
        attention_backend: attention implementation. auto: the fastest measured on this kind of device.
        capacity_scheduler_policy: admission of requests. `guaranteed_no_evict` reserves KV blocks up to each request's end;
            `max_utilization` reserves for the next step and pauses the newest request when blocks run out; `static_batch`
            starts and ends a batch together.
        scheduling_policy: order of waiting requests, as in vLLM: `fcfs` by arrival, `priority` by their priorities, lower values
            first. None: by their priorities, higher values first.
        context_chunking_policy: prefill order when prompts exceed a step: the oldest first, or an equal chunk of each.
        mixed_step_tokens: token budget of steps that prefill while other requests decode, which bounds the time between
            tokens; the budget grows with the waiting prompt tokens, over the recorded sizes. None: 256 on a GPU, 0 on a
            CPU; 0: max_num_tokens.
        batch_wait_timeout_iters: most steps that a prefill waits for further prompts while other requests decode.
        batch_wait_max_tokens_ratio: fraction of `max_num_tokens` at which waiting prompts start without waiting for more.
        enable_prefix_caching: share KV blocks between requests with a common prefix, and keep them for later requests.
        num_state_snapshots: recurrent states kept at block borders of prompts, without which models with recurrent layers
            share no prefix. None: max_batch_size, at most 64 and a tenth of the free GPU memory; 0: share none.
        run_ahead: steps to launch before reading back the tokens of an earlier step; each further pipeline stage adds one.
        tensor_parallel_size: ranks that share each layer, each on its own GPU (or CPU process).
        pipeline_parallel_size: pipeline stages, each of `tensor_parallel_size` ranks; stages compute
            different steps at the same time.
        enable_expert_parallel: distribute whole experts over the ranks. Off: shard every expert.
        executor: launcher of the ranks. `local`: this process starts them on this machine; `torchrun`: torchrun started them
            with one script; `ray`: a Ray cluster starts them on one machine or several.
        rank_timeout: seconds without a heartbeat after which a rank counts as hung and all ranks end.
        symmetric_memory: run small and medium all-reduces with Torchweave's kernels over peer GPU memory instead of NCCL.
        enable_lora: serve low-rank adapters (LoRA) in PEFT's format beside the model; see the page on adapters.
        max_loras: adapters that requests of one step may use; requests with further ones wait, and let others pass.
        max_lora_rank: largest rank of an adapter.
        lora_modules: adapters that are loaded at the start, each as `NAME=FOLDER`.
        max_logprobs: most likely tokens whose log-probabilities a request may ask for. -1: the vocabulary.
        seed: seed of requests that have none of their own. None: a random seed.
        profile_dir: folder for the traces of `start_profile`, a file for each rank and profile. None: profiles are refused.
        limit_mm_per_prompt: inputs of a prompt beside its text.
        pooler_config: pooling of embeddings.
        torch_compile_config: capture and compilation.
        cuda_graph_config: CUDA graphs of whole steps.
        speculative_config: speculative decoding.
        logits_processors: your own classes that change logits, as `module:Name`, or by the names of installed ones; see the page on
            plug-ins. `LLM` takes the classes themselves, too.
        plugins: installed packages whose entry points may be loaded, which adds their formats, backends and other plug-ins. None:
            every package's.
    """

    model: str
    runner: Runner = "auto"
    dtype: DType = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    ignore_unused_weights: bool = False
    quantization: Quantization | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    enable_chunked_context: bool = True
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 1.0
    kv_cache_memory_bytes: int | None = None
    kv_offload_gb: float = 0.0
    attention_backend: AttentionName = "auto"
    capacity_scheduler_policy: CapacityPolicy = "guaranteed_no_evict"
    scheduling_policy: SchedulingPolicy | None = None
    context_chunking_policy: ChunkingPolicy = "first_come_first_served"
    mixed_step_tokens: int | None = None
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    enable_prefix_caching: bool = True
    num_state_snapshots: int | None = None
    run_ahead: int = 2
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    executor: Executor = "local"
    rank_timeout: float = 8.0
    symmetric_memory: bool = True
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_modules: tuple[str, ...] = ()
    max_logprobs: int = 100
    seed: int | None = None
    profile_dir: str | None = None
    limit_mm_per_prompt: MultiModalLimits = field(default_factory=MultiModalLimits)
    pooler_config: PoolerConfig = field(default_factory=PoolerConfig)
    torch_compile_config: TorchCompileConfig = field(default_factory=TorchCompileConfig)
    cuda_graph_config: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    logits_processors: tuple[str, ...] = ()
    plugins: tuple[str, ...] | None = None

    @property
    def num_ranks(self) -> int:
        """Processes that run the model: tensor-parallel times pipeline-parallel size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def parallel_sizes_text(self) -> str:
        """The parallel sizes above 1 as `option=value`, for messages."""
        sizes = {name: getattr(self, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        return " with ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tensor_parallel_size=1"


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server and its engine replicas.

    Attributes:
        host: address to listen on; `0.0.0.0` is every IPv4 address of this machine.
        port: TCP port; 0 picks a free port.
        uds: path of a Unix socket to listen at instead of host and port, by one HTTP process.
        ssl_keyfile, ssl_certfile: private key and certificate (with its chain) in PEM files, for HTTPS by one HTTP process.
        ssl_ca_certs: file with the certificates that clients' certificates are checked with.
        ssl_cert_reqs: certificates of clients. 0: none is asked for; 1: checked if there is one; 2: required.
        middleware: your own middleware as `module:Name`, outside all others: an ASGI class, or a coroutine function of a request
            and `call_next`.
        root_path: path under which a proxy serves this server (`/llm`); requests may come with it or without.
        served_model_name: model names that clients may use; responses carry the first. None: the name given at start.
        api_key: accepted keys (`Authorization: Bearer KEY`). Other users of the machine can read command lines: prefer
            api_key_file.
        api_key_file: file with accepted keys, one per line.
        allowed_hosts: further host names (`chat.example.com`; `*`: all) in the `Host` header of requests to a server on a
            loopback address without a key; a web page could reach it under a name of its own.
        allowed_origins: origins (`https://chat.example.com`; `*`: all) whose web pages may send requests (CORS).
        allowed_media_hosts: hosts (`images.example.com`: ports 80 and 443; `images.example.com:8080`) from which the server
            fetches images at `http(s)` URLs in requests; never from private addresses, and no redirect is followed. None: images
            come as data URLs only.
        allowed_local_media_path: folder of images that requests may name by `file://` URLs. None: none.
        media_fetch_timeout: seconds to fetch all images of a request.
        chat_template: file with a Jinja chat template, or the template itself, that replaces the model's own.
        default_chat_template_kwargs: variables of the template (`{"enable_thinking": false}`) for requests that do not set them.
        tool_call_parser: format of the model's tool calls. auto: chosen from the chat template.
        reasoning_parser: format of the model's reasoning, which is returned apart from the answer. auto: chosen from the chat
            template. none: reasoning is part of the answer.
        trust_request_chat_template: render chat templates that requests bring. They are programs: a malicious one can take
            any time.
        unknown_request_fields: what happens to a field of a request that the server does not know. ignore: it is left out, and the
            header x-torchweave-warning, the log and the counter request_warnings say so. refuse: status 400.
        response_store_mib: memory for stored responses of the Responses API, in MiB; the oldest are dropped. 0: store none.
        max_body_bytes: largest request body in bytes; larger bodies get status 413. Also bounds the images that are fetched for a
            request, together.
        max_request_tokens: most tokens per HTTP request, prompts and outputs together. None: the engine's capacity.
        max_request_sequences: most output sequences per HTTP request (prompts times `n`).
        max_request_logprobs: most log-probabilities per HTTP request: of each token of its answers, the token's own and `logprobs`
            further ones, and the same for its prompts.
        max_waiting_requests: most requests queued beyond those in a step; further requests get status 429.
        request_timeout: seconds until a request is cancelled. 0: never.
        drain_timeout: seconds that running requests have to finish at shutdown.
        max_connections_per_address: most open connections of one client address to an HTTP process; further ones are closed.
            None: any number.
        engine_timeout: seconds without an answer after which an engine process, or an HTTP process beside others, counts as hung
            and is killed. 0: never.
        restart_engine: restart an engine that failed. Off: continue with the remaining replicas, and exit with code 1 after
            the last.
        data_parallel_size: engine replicas behind the server, each with its own GPUs (replica i of engines with R ranks
            uses GPUs i * R to i * R + R - 1) or its own CPU process.
        api_server_count: HTTP processes that parse requests and write responses. None: one per four cores, at most four.
        enable_control_routes: serve the routes that pause the engine, reset its prefix cache, profile it and load adapters from
            folders of this machine, for clients that may do so: any client with a key can then stop the server from answering.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    middleware: tuple[str, ...] = ()
    root_path: str = ""
    served_model_name: tuple[str, ...] | None = None
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_media_hosts: tuple[str, ...] = ()
    allowed_local_media_path: str | None = None
    media_fetch_timeout: float = 10.0
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    trust_request_chat_template: bool = False
    unknown_request_fields: Literal["ignore", "refuse"] = "ignore"
    response_store_mib: int = 64
    max_body_bytes: int = 8 << 20
    max_request_tokens: int | None = None
    max_request_sequences: int = 256
    max_request_logprobs: int = 1 << 20
    max_waiting_requests: int = 1024
    request_timeout: float = 0.0
    drain_timeout: float = 30.0
    max_connections_per_address: int | None = None
    engine_timeout: float = 20.0
    restart_engine: bool = False
    data_parallel_size: int = 1
    api_server_count: int | None = None
    enable_control_routes: bool = False


def expand_path(text: str | Path) -> Path:
    """Expand `~` and `~NAME` in a path.

    Raises:
        ValueError: the home folder does not exist.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        # No user of that name, or (in some containers) no user of this uid and no HOME.
        raise ValueError(f"{text}: there is no home folder {Path(text).parts[0]}; write the absolute path") from None


def read_text_file(description: str, path: str | Path) -> str:
    """Read a UTF-8 file; `description` names it in error messages.

    Raises:
        ValueError: the file cannot be read or is not UTF-8.
    """
    try:
        return expand_path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{description} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{description} {path} is not UTF-8 text") from None


def cache_dir(configured: str | None) -> Path:
    """Folder of the compile cache: `configured`, else `torchweave` under XDG_CACHE_HOME or `~/.cache`.

    Raises:
        ValueError: the home folder in `configured` does not exist.
        OSError: no folder is configured and this user has no home folder.
    """
    if configured is not None:
        return expand_path(configured)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "torchweave"
    except RuntimeError:
        raise OSError("this user has no home folder for the compile cache; set compile_cache_dir") from None


def use_passive_openmp() -> None:
    """Let waiting OpenMP threads sleep instead of spin, unless the environment chooses. Holds for libraries that are loaded later.

    A spinning thread takes the processor from the thread that it waits for, where another process keeps one busy.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"


def vllm_variables() -> dict[str, str]:
    """vLLM's variables of the environment, `VLLM_NAME`, with their values."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


def set_hub_token(token: str) -> None:
    """Let this process and its children download models from the hub as the owner of `token`."""
    os.environ["HF_TOKEN"] = token


def api_key_from_environment() -> str:
    """Value of OPENAI_API_KEY, or empty text."""
    return os.environ.get("OPENAI_API_KEY", "")


@dataclass(frozen=True)
class TorchrunEnv:
    """torchrun's environment: rank, world size, rank on this machine, address of rank 0."""

    rank: int
    size: int
    local_rank: int
    address: str


def read_torchrun_env() -> TorchrunEnv | None:
    """Read torchrun's variables; None if torchrun did not start this process."""
    values = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
    if None in values:
        return None
    rank, size, local_rank, address = values
    return TorchrunEnv(int(rank or 0), int(size or 1), int(local_rank or 0), str(address))


def disable_multicast() -> None:
    """Disable multicast objects of torch's symmetric memory in this process; no kernel uses them."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def set_triton_cache_dir(folder: str) -> None:
    """Set Triton's cache folder for this process and its children unless TRITON_CACHE_DIR is set."""
    os.environ.setdefault("TRITON_CACHE_DIR", folder)


@contextmanager
def bytecode_of_commands_in(folder: Path) -> Iterator[None]:
    """Context in which Python commands that this process starts, such as Inductor's workers, find bytecode in `folder`."""
    name = "PYTHONPYCACHEPREFIX"
    before = os.environ.get(name)
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
