"""Attention over a paged KV cache: the ops that models call, the metadata of a step, and the choice of backend.

The model calls `torchweave::attention`, which writes into a tensor that the model allocated. It is a boundary op: the engine
intercepts it and a backend runs it over the cache (torchweave/ops/attention/call.py). Called directly, without an engine, the
tokens are one sequence and no cache is involved; that is its eager reference.

    step = backend.begin(meta)               once per step, before the model runs
    run_attention(step, call, cache)         once per layer, from the boundary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchweave.ops.attention.call import AttentionCall, AttentionStep, LayerKVCache
from torchweave.ops.attention.reference import causal_attention
from torchweave.ops.kernels.cpp import NO_COMPILER, has_compiler
from torchweave.ops.registry import define


@define("torchweave::attention", mutates=("out",), boundary=True)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunk: int = 0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
    given_scale: Tensor | None = None,
) -> None:
    """Causal attention of T tokens, written into `out`; without an engine the T tokens are one sequence.

    The arguments are described in `torchweave.ops.attention.call.AttentionCall`.
    """
    how = (layer, scale, window, softcap, sinks, chunk, cos, sin, q_weight, k_weight, norm_eps, norm_offset, norm_wide)
    causal_attention(AttentionCall(q, k, v, out, *how, given_scale))


@define("torchweave::attention_fp8", mutates=("out", "out_scale"), boundary=True)
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    out_scale: Tensor,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunk: int = 0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> None:
    """`torchweave::attention` into e4m3 with a scale for each 128 channels of a token, written into `out_scale`.

    A separate op, because torch 2.11 cannot call an op that mutates an optional argument.
    """
    how = (layer, scale, window, softcap, sinks, chunk, cos, sin, q_weight, k_weight, norm_eps, norm_offset, norm_wide)
    causal_attention(AttentionCall(q, k, v, out, *how, out_scale=out_scale))


@dataclass(frozen=True)
class LayerSpec:
    """The attention of one layer, as the cache and the backends need to know it.

    Attributes:
        num_kv_heads: KH.
        head_dim: D of queries and keys.
        value_dim: Dv of values.
        num_heads: H, a multiple of KH.
        window: sliding window in tokens; 0 for none.
        chunk: chunk length of chunked local attention; 0 for none.
        softcap: soft cap of the scores; 0 for none.
        sinks: whether logits join the denominator.
        cache_dtype: FP8 in which the cache keeps keys and values; None: the model's own dtype.
        k_scale, v_scale: what a number of such a cache stands for (`torchweave.ops.attention.kv_cache_dtype`).
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_heads: int
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    cache_dtype: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in this layer's cache, in a model of `dtype`."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * (self.cache_dtype or dtype).itemsize


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one step belong. The tensors are device tensors, whose addresses a CUDA graph may hold.

    Rows are the sequences of the step: those with one token (decode) first, then context rows. Padding rows have slot -1
    and sequence length 0. Except when `decode_only`, a padding row is empty (`query_start[i] == query_start[i + 1]`) and
    padded tokens lie behind `query_start[R]`.

    Attributes:
        slots: int32 `[R]`, the row of the block table of each sequence; -1 for a padding row.
        query_start: int32 `[R + 1]`, the first token of each row. Not read when `decode_only`.
        seq_lens: int32 `[R]`, keys that the row's last token of this step sees: cached and new.
        block_table: int32 `[S, max_blocks_per_seq]`.
        slot_mapping: int64 `[T]`, `block * block_size + offset` where each token's key and value go; -1 for a padded
            token, which writes nothing.
        num_rows: R.
        num_tokens: T.
        decode_only: every row has exactly one token, and row i's token is token i.
        max_seq_len: host bound of `seq_lens`, for choosing a kernel; correctness never depends on it.
    """

    slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_rows: int
    num_tokens: int
    decode_only: bool
    max_seq_len: int


class AttentionBackend(Protocol):
    """How attention over the paged cache is carried out.

    Attributes:
        name: as in the configuration.
        supports_mixed_cuda_graphs: mixed steps may be captured whole in a CUDA graph: nothing is read back to the host.
        block_size: tokens in a block of the cache that suit it best.
    """

    name: str
    supports_mixed_cuda_graphs: bool
    block_size: int

    def allocate(
        self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKVCache:
        """The cache of one layer. Called outside of any graph capture, also to size what the kernels share."""
        ...

    def begin(self, meta: AttentionMetadata) -> AttentionStep:
        """Prepare one step. What depends on the rows but not on the layer is computed here, once."""
        ...


BACKENDS = ("triton", "torch", "fa3", "cpp")


def available_backends(device: torch.device | str) -> dict[str, str | None]:
    """For each backend None if it can run on `device`, else why not."""
    return {name: _unavailable_reason(name, torch.device(device)) for name in BACKENDS}


def get_backend(
    name: str, device: torch.device | str, dtype: torch.dtype = torch.float32, layers: Sequence[LayerSpec] = ()
) -> AttentionBackend:
    """The backend `name` (`auto`: triton on a GPU, cpp on a CPU, torch where these cannot run).

    Raises ValueError when it is unknown, cannot run on the device, or cannot do what `layers` ask for.
    """
    device = torch.device(device)
    if name == "auto":
        best = "triton" if device.type == "cuda" else "cpp"
        name = best if _unavailable_reason(best, device) is None else "torch"
    if name not in BACKENDS:
        raise ValueError(f"attention_backend {name!r} is unknown; choose auto, {', '.join(BACKENDS)}")
    reason = _unavailable_reason(name, device)
    if reason is not None:
        raise ValueError(f"attention_backend {name!r} cannot run on {device}: {reason}")
    if name == "torch":
        from torchweave.ops.attention.backends.torch_native import TorchBackend

        return TorchBackend()
    if name == "cpp":
        from torchweave.ops.attention.backends.cpp import CppBackend

        return CppBackend()
    if name == "triton":
        from torchweave.ops.attention.backends.triton import TritonBackend

        return TritonBackend(device)
    from torchweave.ops.attention.backends.fa3 import Fa3Backend, unsupported_reason

    for spec in layers:
        reason = unsupported_reason(spec, dtype)
        if reason is not None:
            raise ValueError(f"attention_backend 'fa3' cannot run this model: {reason}; choose triton")
    return Fa3Backend(device)


def _unavailable_reason(name: str, device: torch.device) -> str | None:
    if name == "torch":
        return None
    if name == "cpp":
        if device.type != "cpu":
            return "it is for a CPU"
        return None if has_compiler() else NO_COMPILER
    if device.type != "cuda":
        return "it needs a CUDA GPU"
    try:
        if name == "triton":
            import triton  # noqa: F401
        else:
            import fa3_fwd_interface  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        extra = "triton" if name == "triton" else "torchweave[fa3]"
        return f"{error}; install {extra}"
    if name == "fa3" and torch.cuda.get_device_capability(device)[0] != 9:
        return "FlashAttention 3 is built for Hopper GPUs (sm_90)"
    return None
