"""Every option and its default, once. Frozen; `plan.resolve` turns a config into what is effective, and says why.

Names follow TensorRT-LLM (`torch_compile_config`, `cuda_graph_config`) and vLLM (`max_model_len`, `gpu_memory_utilization`)
where users know them. The only place of the package that reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
AttentionName = Literal["auto", "triton", "torch", "fa3", "cpp"]
CapacityPolicy = Literal["guaranteed_no_evict", "max_utilization", "static_batch"]
ChunkingPolicy = Literal["first_come_first_served", "equal_progress"]
DynamicShapes = Literal["backed", "unbacked", "backed_size_oblivious"]
CacheFormat = Literal["binary", "unpacked"]
ToolCallParser = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"]
PassNumerics = Literal["exact", "tolerance"]
Executor = Literal["local", "torchrun", "ray"]


@dataclass(frozen=True)
class TorchCompileConfig:
    """How the model's graph is captured, fused and built.

    Attributes:
        enable_fullgraph: capture the model as one graph. Off: the module runs as it is, cut at boundary ops while
            CUDA graphs are recorded.
        enable_inductor: build each distinct piece with Inductor. Off: run the pieces as plain FX code.
        enable_piecewise_cuda_graph: record context and mixed steps as CUDA graphs by token count.
        capture_num_tokens: the token counts (buckets) to record; None takes powers of two to 128, 256, 384, then steps of 256
            from 512 to 3072, and mixed_step_tokens, as far as a step can hold them. vLLM calls these `cudagraph_capture_sizes`.
        compile_sizes: token counts for which pieces are built once more with that size fixed, tuned by Inductor.
        max_padding_ratio: a step that would be padded by more than this factor runs unpadded instead.
        dynamic_shapes: how the token count is kept symbolic while the graph is captured.
        passes: passes of your own, as `module:Name`; they run behind the stack's.
        disabled_passes: names of passes that are left out.
        enabled_passes: names of passes that run although no measurement says that they pay, or that they are exact.
        pass_numerics: `exact` leaves out passes that add or omit a rounding; `tolerance` lets them run, each within its
            documented bound.
        compile_cache: keep captured graphs and built pieces on disk, so that the next start loads them.
        compile_cache_dir: where; None means `torchweave` under the user's cache home.
        compile_cache_format: `binary` keeps entries alone; `unpacked` also writes each piece's code beside them, to be read.
        enable_userbuffers: what several GPUs add up is made in memory that all of them see, where collectives read it, and not
            copied there first.
        max_num_streams: CUDA streams that a piece may be spread over. Above 1, a piece is split where the longest path through
            it, or a measurement, promises a gain.
        tune: measure, at the first start on a kind of GPU, what runs the model's products and pieces best there, and keep it
            in the compile cache. Off: take what the package measured for that GPU, or a rule.
        dump_dir: a folder that gets the graph before and after each pass, the code of each piece, a timeline and the report
            as a page; None writes nothing.
        debug: check addresses and shapes at every replay, and lint the graph after every pass.
    """

    enable_fullgraph: bool = True
    enable_inductor: bool = True
    enable_piecewise_cuda_graph: bool = True
    capture_num_tokens: tuple[int, ...] | None = None
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
    """Whole-step graphs of the decode phase.

    Attributes:
        enable_padding: pad a decode batch up to the next recorded size; off, only exact sizes replay.
        max_batch_size: largest batch that is recorded; 0 means the engine's `max_batch_size`; negative: none.
        batch_sizes: sizes to record; None takes 1, 2, 4, then steps of 8 to 128, of 64 beyond, and the maximum.
        capture_mixed: record mixed steps whole too, where the attention backend declares that it can.
    """

    enable_padding: bool = True
    max_batch_size: int = 0
    batch_sizes: tuple[int, ...] | None = None
    capture_mixed: bool = True


@dataclass(frozen=True)
class EngineConfig:
    """One engine: a model, the memory it may use, and how its steps are formed.

    Attributes:
        model: a folder in Hugging Face's layout, a hub id, or the name of a built-in model (`demo`).
        dtype: of weights and activations; auto takes the checkpoint's (float32 on a CPU).
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        load_format: `auto` reads the checkpoint; `dummy` fills random weights of the right shapes, for benchmarks.
        quantization: quantise linears as they are loaded: `fp8` (`fp8_per_tensor`: a scale for each weight), `fp8_per_channel`,
            `fp8_per_block` (128 x 128); None keeps what the checkpoint has, which may be FP8.
        trust_remote_code: run Python code that comes with the checkpoint.
        max_model_len: longest request in tokens, prompt and output; None takes the model's own limit, and no more than the
            KV cache can hold.
        max_batch_size: requests in one step. None: 512 on a GPU, 32 on a CPU. vLLM calls it `max_num_seqs`.
        max_num_tokens: tokens in one step over all requests (the budget). None: 8192 on a GPU, 2048 on a CPU. vLLM calls it
            `max_num_batched_tokens`.
        enable_chunked_context: a prompt may be read in several steps. Off: a prompt longer than the budget is refused. vLLM calls
            it `enable_chunked_prefill`.
        block_size: tokens in one block of the paged KV cache. None: what the attention backend prefers.
        num_kv_blocks: blocks of the KV cache; None sizes it from the memory that is free once all else is in place. vLLM calls it
            `num_gpu_blocks_override`.
        kv_cache_dtype: numbers in which keys and values are kept: auto takes the model's dtype, or FP8 where the checkpoint says
            so; `fp8` (`fp8_e4m3`) and `fp8_e5m2` keep twice as many tokens in the same memory.
        gpu_memory_utilization: part of the GPU's memory that the engine may use, weights and graphs included.
        cpu_kv_cache_gib: memory for the KV cache on a CPU.
        kv_offload_gb: host memory (GiB; pinned on a GPU) for blocks of the KV cache that later requests may use again but the
            device has no more room for; 0: what is lost there is computed again.
        attention_backend: auto takes what measured fastest on this kind of device.
        capacity_scheduler_policy: which requests a step may run. `guaranteed_no_evict`: those that the KV cache can hold to
            their end; `max_utilization`: those that it can hold now, the last one is paused when blocks run out;
            `static_batch`: a batch starts and ends together.
        context_chunking_policy: whose prompt is read where not all fit into a step: the oldest's, or a part of each.
        mixed_step_tokens: while requests generate, prompts are read in steps of so many tokens, so that nobody waits long for the
            next token, and the more prompt tokens wait, in larger ones of the recorded sizes. None: 256 on a GPU, 0 on a CPU;
            0: a step holds what max_num_tokens allows.
        batch_wait_timeout_iters: steps that prompts wait at the most for more of them while others generate.
        batch_wait_max_tokens_ratio: part of `max_num_tokens` that is worth reading without waiting for more.
        enable_prefix_caching: requests that begin alike share KV cache blocks, and blocks are kept for later requests.
        run_ahead: steps that are launched before the tokens of an earlier one are read back.
        tensor_parallel_size: ranks that share each layer of the model, each with a GPU (or a process of a CPU) of its own.
        pipeline_parallel_size: stages that the layers of the model are divided into, each of `tensor_parallel_size` ranks; one
            works while the others wait.
        enable_expert_parallel: over several ranks each has some of a layer's experts whole; off: a part of every expert.
        executor: what starts the ranks. `local`: this process starts the others on this machine; `torchrun`: they are there, and
            all run the same script; `ray`: a Ray cluster starts the others, on this machine or on several.
        rank_timeout: seconds after which a rank that gives no sign of life counts as hung, which ends all of them.
        symmetric_memory: GPUs that see each other's memory exchange small and middle sums by kernels of the project, not NCCL.
        seed: makes requests without a seed of their own reproducible; None draws one.
        torch_compile_config: how the model's graph is built.
        cuda_graph_config: which whole steps are recorded as CUDA graphs.
    """

    model: str
    dtype: DType = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    enable_chunked_context: bool = True
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 1.0
    kv_offload_gb: float = 0.0
    attention_backend: AttentionName = "auto"
    capacity_scheduler_policy: CapacityPolicy = "guaranteed_no_evict"
    context_chunking_policy: ChunkingPolicy = "first_come_first_served"
    mixed_step_tokens: int | None = None
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    enable_prefix_caching: bool = True
    run_ahead: int = 2
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    executor: Executor = "local"
    rank_timeout: float = 8.0
    symmetric_memory: bool = True
    seed: int | None = None
    torch_compile_config: TorchCompileConfig = field(default_factory=TorchCompileConfig)
    cuda_graph_config: CudaGraphConfig = field(default_factory=CudaGraphConfig)

    @property
    def num_ranks(self) -> int:
        """Processes that run the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def parallel_sizes_text(self) -> str:
        """The options that ask for so many ranks, as sentences name them."""
        stages = f" pipeline_parallel_size={self.pipeline_parallel_size}" if self.pipeline_parallel_size > 1 else ""
        tensor = (
            f" tensor_parallel_size={self.tensor_parallel_size}" if self.tensor_parallel_size > 1 or not stages else ""
        )
        return f"{tensor}{' with' if tensor and stages else ''}{stages}".strip()


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server before one engine, or several.

    Attributes:
        host: address to listen on; `0.0.0.0` is every IPv4 address of this machine.
        port: 0 takes one that is free.
        served_model_name: names under which clients ask for the model; the first one is what answers say. None: the name that
            it was started with.
        api_key: keys that clients may give as `Authorization: Bearer KEY`. Arguments of a command can be seen by other users
            of the machine: a file is better.
        api_key_file: a file with such keys, one a line.
        allowed_origins: web pages, by the beginning of their address (`https://chat.example.com`; `*`: all), whose scripts browsers
            let ask this server.
        chat_template: a file with a Jinja template that turns conversations into text, in the place of the model's own.
        tool_call_parser: the form in which the model calls tools; auto goes by its chat template.
        max_body_bytes: longest body of a request; a longer one is answered with 413.
        max_request_tokens: tokens of one HTTP request, prompts and answers together; None: what the engine holds.
        max_request_sequences: answers of one HTTP request (prompts times `n`).
        max_waiting_requests: requests that wait beyond those which a step can hold; more are answered with 429.
        request_timeout: seconds after which a request is stopped; 0: never.
        drain_timeout: seconds that running requests have to finish once the server was told to end.
        restart_engine: start an engine again when it fails; else the server goes on with the replicas that are left, and ends with
            exit code 1 when none is.
        data_parallel_size: replicas: engines of the whole model behind the one server, each with a GPU of its own for each of its
            ranks (of R ranks, replica i takes those from i * R on), or a process of a CPU.
        api_server_count: HTTP processes that read requests and write answers; a small model with many streams keeps more than one
            busy. None: one for each four cores, four at the most.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] | None = None
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: ToolCallParser = "auto"
    max_body_bytes: int = 8 << 20
    max_request_tokens: int | None = None
    max_request_sequences: int = 256
    max_waiting_requests: int = 1024
    request_timeout: float = 0.0
    drain_timeout: float = 30.0
    restart_engine: bool = False
    data_parallel_size: int = 1
    api_server_count: int | None = None


def expand_path(text: str | Path) -> Path:
    """A path, with `~` and `~NAME` at its beginning as home folders.

    Raises:
        ValueError: there is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        # There is no user of that name; or none of this process's number, as in some containers, and HOME is not set.
        raise ValueError(f"{text}: there is no home folder {Path(text).parts[0]}; write the whole path") from None


def read_text_file(what: str, path: str | Path) -> str:
    """The text of a file; `what` it is, as a sentence names it.

    Raises:
        ValueError: it cannot be read, or is no text.
    """
    try:
        return expand_path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path} is not UTF-8 text") from None


def cache_dir(configured: str | None) -> Path:
    """The folder of the compile cache: `configured`, else `torchweave` under XDG_CACHE_HOME or `~/.cache`.

    Raises:
        ValueError: `configured` is in a home folder that is none.
        OSError: nothing is configured, and this user has no home folder.
    """
    if configured is not None:
        return expand_path(configured)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "torchweave"
    except RuntimeError:
        raise OSError("this user has no home folder to keep it in; name a folder as compile_cache_dir") from None


def api_key_from_environment() -> str:
    """OPENAI_API_KEY, which clients of an OpenAI server send; empty where it is not set."""
    return os.environ.get("OPENAI_API_KEY", "")


@dataclass(frozen=True)
class TorchrunEnv:
    """What torchrun told this process: its rank, how many there are, its number on this machine, and where rank 0 is."""

    rank: int
    size: int
    local_rank: int
    address: str


def read_torchrun_env() -> TorchrunEnv | None:
    """None where torchrun did not start this process."""
    known = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
    if None in known:
        return None
    rank, size, local_rank, address = known
    return TorchrunEnv(int(rank or 0), int(size or 1), int(local_rank or 0), str(address))


def disable_multicast() -> None:
    """torch's symmetric memory asks for no multicast objects from now on in this process; the kernels use none."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def set_triton_cache_dir(folder: str) -> None:
    """Name the folder of Triton's cache for this process and those that it starts, unless the environment names it."""
    os.environ.setdefault("TRITON_CACHE_DIR", folder)
