"""Causal attention over a paged KV cache: the op that models call, what a step tells a backend, and the choice of backend.

The model calls `torchweave::attention`, which writes into a tensor that the model allocated. It is a boundary op: the engine
intercepts it and has a backend carry it out over the cache (torchweave/ops/attention/calls.py). Called directly, without an
engine, the tokens are one sequence and no cache is involved; that is its eager reference.

    step = backend.begin(meta)                       once per step, before the model runs
    run_attention(step, caches, *args, **kwargs)         once per layer, from the boundary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchweave.ops.attention.reference import additive_mask, padded_attention
from torchweave.ops.kernels.cpp import NO_COMPILER, has_compiler
from torchweave.ops.quant.fp8 import FP8, GROUP, PER_TOKEN, fp8_quant
from torchweave.ops.registry import define
from torchweave.ops.rope import Rotary


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
    """Write the attention of T tokens into `out`; here the T tokens are one sequence.

    Args:
        q: `[T, H, D]`. Query head h reads key head `h // (H // KH)`.
        k: `[T, KH, D]`.
        v: `[T, KH, Dv]`; Dv may differ from D.
        out: contiguous `[T, H, Dv]`, written whole; of q's dtype, or e4m3: then the result is rounded to q's dtype and
            quantised as `torchweave::fp8_quant` does, with the given scale.
        layer: which KV cache of the engine belongs to this call; not used here.
        scale: factor of the scores.
        window: keys with `q_pos - k_pos < window` are seen; 0 means all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 means as they are.
        sinks: `[H]` logits that join the denominator of the softmax.
        chunk: keys with `k_pos // chunk == q_pos // chunk` are seen (Llama 4); 0 means all.
        cos, sin: `[..., T, R]`: q and k are turned first, as `torchweave::rope` does; None means that they have been.
        q_weight, k_weight, norm_eps, norm_offset, norm_wide: and before that normed, as `torchweave::qk_norm_rope` does.
        given_scale: float32 `[1]`, where out is e4m3.
    """
    rotary = rotary_from_args(cos, sin, q_weight, k_weight, norm_eps, norm_offset, norm_wide)
    if rotary is not None:
        q, k = rotary.apply_rotary(q, k)
    positions = torch.arange(q.shape[0], device=q.device)[None]
    bias = None if not (window or chunk) else additive_mask(positions, positions, window, chunk, q.dtype)
    result = padded_attention(q[None], k[None], v[None], bias, scale=scale, softcap=softcap, sinks=sinks)[0]
    if out.dtype == FP8:
        quantize_into(QuantizedOutput(out, None, given_scale), result.flatten(1, 2))
    else:
        out.unflatten(1, result.shape[1:3]).copy_(result)


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
    """`torchweave::attention` into e4m3, with a scale for each 128 channels of a token.

    An op of its own, since torch 2.11 cannot call one that writes to an argument which may be left out.

    Args:
        out: contiguous `[T, H, Dv]` e4m3, written whole.
        out_scale: float32 `[ceil(H * Dv / 128), T]`, written whole.
    """
    whole = torch.empty(out.shape, dtype=q.dtype, device=q.device)
    how = (layer, scale, window, softcap, sinks, chunk, cos, sin, q_weight, k_weight, norm_eps, norm_offset, norm_wide)
    torch.ops.torchweave.attention(q, k, v, whole, *how)
    quantize_into(QuantizedOutput(out, out_scale, None), whole)


class QuantizedOutput(NamedTuple):
    """Where a quantised result goes: q e4m3 `[T, H, Dv]`, and of its scales one that is written or one that is given."""

    q: Tensor
    out_scale: Tensor | None
    static_scale: Tensor | None


def quantize_into(target: QuantizedOutput, result: Tensor) -> None:
    """Quantise result `[T, H, Dv]` into its place, as `torchweave::fp8_quant` would."""
    assert (target.out_scale is None) != (target.static_scale is None), "a quantised result has one kind of scale"
    group = PER_TOKEN if target.out_scale is None else GROUP
    q, scale = fp8_quant(result.reshape(result.shape[0], -1), group, target.static_scale)
    target.q.flatten(1).copy_(q)
    if target.out_scale is not None:
        target.out_scale.copy_(scale)


def rotary_from_args(cos: Tensor | None, sin: Tensor | None, *norm: Any) -> Rotary | None:
    """What queries and keys still need, from an op's arguments; None when they have been turned."""
    assert (cos is None) == (sin is None), "cos and sin come together"
    return None if cos is None or sin is None else Rotary(cos, sin, *norm)


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


class LayerKVCache(NamedTuple):
    """One layer's cache: `k` is `[num_blocks, block_size, KH, D]`, `v` is `[num_blocks, block_size, KH, Dv]`; FP8 has scales.

    `group` says whose block table leads to it: layers that see equally far back share one.
    """

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    group: int = 0

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v


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


class AttentionVariant(NamedTuple):
    """How the scores of a layer are made and which keys are seen; as in `attention`."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0


class AttentionStep(Protocol):
    """A backend that has looked at the metadata of one step; its `forward` is called once per layer.

    One that can also turn queries and keys, for less than a kernel of its own would take, is a `FusedRopeStep`.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cache: LayerKVCache, variant: AttentionVariant
    ) -> None:
        """Write this step's keys and values into `cache`, then attend into `out`; shapes as `attention`.

        Rows of `out` that belong to padded tokens become zero, and padded tokens write nothing into the cache.
        """
        ...


@runtime_checkable
class FusedRopeStep(Protocol):
    """An `AttentionStep` that takes queries and keys before their rotary embedding, and applies it itself."""

    def forward_with_rope(
        self,
        rotary: Rotary,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cache: LayerKVCache,
        variant: AttentionVariant,
    ) -> None:
        """As `AttentionStep.forward` of what `rotary.apply_rotary(q, k)` gives."""
        ...


@runtime_checkable
class FusedQuantStep(Protocol):
    """An `AttentionStep` that quantises its result itself, where that takes less than a kernel of its own."""

    def forward_quantized(
        self,
        target: QuantizedOutput,
        rotary: Rotary | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: LayerKVCache,
        variant: AttentionVariant,
    ) -> None:
        """As `AttentionStep.forward`, or with `rotary` as `FusedRopeStep.forward_with_rope`, and `quantize_into`."""
        ...


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
            import fa3_fwd_interface  # noqa: F401
    except ImportError as error:
        extra = "triton" if name == "triton" else "torchweave[fa3]"
        return f"{error}; install {extra}"
    if name == "fa3" and torch.cuda.get_device_capability(device)[0] != 9:
        return "FlashAttention 3 is built for Hopper GPUs (sm_90)"
    return None
