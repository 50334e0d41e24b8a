"""Division of recurrent layers over tensor-parallel ranks, by class: each rank has some of the heads or channels and their states.

Projections into the layer are sharded by columns, the one out of it by rows, the convolution and the parameters of a head with
the heads. A layer whose heads do not divide is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchweave.models.weights.shards import HeadSharding, Range, Ranges, even_shard


@dataclass(frozen=True)
class RecurrentShards:
    """A rank's part of a recurrent layer; names are relative to the layer.

    Attributes:
        columns: ranges of the first dimension by parameter, buffer or module, whose weight and bias are divided alike.
        rows: ranges of the inputs by linear, whose outputs are summed over ranks.
        sizes: attributes that the forward reads, and their values on a rank.
        norms: norms over a width that is divided.
        replicated: modules that each rank has whole.
        dims: the divided dimension where it is not the first, by parameter or buffer.
    """

    columns: Mapping[str, Ranges]
    rows: Mapping[str, Range]
    sizes: Mapping[str, int] = field(default_factory=dict)
    norms: Sequence[str] = ()
    replicated: Sequence[str] = ()
    dims: Mapping[str, int] = field(default_factory=dict)


def shard_recurrent_layer(module: nn.Module, rank: int, size: int) -> RecurrentShards | str:
    """The part of rank `rank` of `size`, or why the layer is replicated, as a clause."""
    make = _BY_CLASS.get(type(module).__name__)
    if make is None:
        return "its heads have no division over ranks"
    shards = make(module, rank, size)
    if isinstance(shards, str):
        return shards
    known = (*shards.columns, *shards.rows, *shards.replicated)
    for name, _ in module.named_parameters():
        if not any(name == each or name.startswith(f"{each}.") for each in known):
            return f"its parameter {name} has no known layout"
    return shards


def _indivisible(heads: HeadSharding, what: str, groups: str) -> str:
    """Why heads and the groups that they read cannot be divided, as a clause; empty if they can."""
    if heads.query % heads.size:
        return f"its {heads.query} {what} are not divisible by {heads.size}"
    if heads.kv % heads.size and heads.size % heads.kv:
        return f"its {heads.kv} {groups} are neither a multiple nor a divisor of {heads.size}"
    return ""


def _present(module: nn.Module, columns: Mapping[str, Ranges]) -> dict[str, Ranges]:
    """The entries whose name the module has."""
    return {name: ranges for name, ranges in columns.items() if getattr(module, name, None) is not None}


# -- gated delta rule --------------------------------------------------------------------------------------------------


def _gated_delta_rule(module: Any, rank: int, size: int) -> RecurrentShards | str:
    """Qwen3-Next, Qwen3.5, OLMo-hybrid: the value heads of a key head are on the rank of the key head."""
    heads = HeadSharding(module.num_v_heads, module.num_k_heads, rank, size)
    if why := _indivisible(heads, "value heads", "key heads"):
        return why
    key, value = module.head_k_dim, module.head_v_dim
    keys, values, each = heads.kv_range(key), heads.query_range(value), heads.query_range(1)
    side_by_side = keys, heads.kv_range(key, module.key_dim), heads.query_range(value, 2 * module.key_dim)
    columns = {
        "conv1d": side_by_side,
        "in_proj_qkv": side_by_side,
        "in_proj_qkvz": _by_key_head(heads, 2 * key, value),
        "in_proj_ba": _by_key_head(heads, 0, 1),
        **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
        **dict.fromkeys(("v_proj", "g_proj", "in_proj_z"), (values,)),
        **dict.fromkeys(("a_proj", "b_proj", "in_proj_a", "in_proj_b", "A_log", "dt_bias"), (each,)),
    }
    key_dim, value_dim = heads.num_local_kv * key, heads.num_local_query * value
    return RecurrentShards(
        _present(module, columns),
        dict.fromkeys((name for name in ("out_proj", "o_proj") if hasattr(module, name)), values),
        {
            "num_k_heads": heads.num_local_kv,
            "num_v_heads": heads.num_local_query,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "conv_dim": 2 * key_dim + value_dim,
        },
        replicated=("norm", "o_norm"),  # over one head
    )


def _by_key_head(heads: HeadSharding, key_rows: int, value_rows: int) -> Ranges:
    """Rows of a projection that has, for each key head, its own rows and twice those of its value heads."""
    per_key = heads.query // heads.kv
    unit = key_rows + 2 * per_key * value_rows
    if heads.kv % heads.size == 0:
        return (heads.kv_range(unit),)
    start = heads.first_local_kv * unit
    first = heads.rank * heads.num_local_query - heads.first_local_kv * per_key
    ranges = [(start, start + key_rows)] if key_rows else []
    for begin in (start + key_rows, start + key_rows + per_key * value_rows):
        ranges.append((begin + first * value_rows, begin + (first + heads.num_local_query) * value_rows))
    return tuple(ranges)


def _kimi_delta(module: Any, rank: int, size: int) -> RecurrentShards | str:
    """Kimi-Linear, Bailing-hybrid: as many key heads as value heads, with a decay for each channel."""
    heads = HeadSharding(module.num_heads, module.num_heads, rank, size)
    if why := _indivisible(heads, "heads", "heads"):
        return why
    dim, local = module.head_dim, heads.num_local_query * module.head_dim
    channels, each = (heads.query_range(dim),), (heads.query_range(1),)
    columns = {
        "conv1d": tuple(heads.query_range(dim, part * module.qkv_dim) for part in range(3)),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj"), channels),
        "b_proj": each,
    }
    gate = _present(module.forget_gate, {"f_proj": channels, "f_b_proj": channels, "dt_bias": channels, "A_log": each})
    return RecurrentShards(
        _present(module, columns) | {f"forget_gate.{name}": ranges for name, ranges in gate.items()},
        {"o_proj": heads.query_range(dim)},
        {
            "num_heads": heads.num_local_query,
            "qkv_dim": local,
            "conv_dim": 3 * local,
            "forget_gate.num_heads": heads.num_local_query,
            "forget_gate.qkv_dim": local,
        },
        replicated=("o_norm", "g_a_proj", "forget_gate.f_a_proj"),
        dims={"forget_gate.A_log": 2} if module.forget_gate.A_log.ndim == 4 else {},
    )


# -- SSD ---------------------------------------------------------------------------------------------------------------


def _mamba2(module: Any, rank: int, size: int) -> RecurrentShards | str:
    """Mamba2's mixer: `in_proj` gives `[z | x | B | C | dt]`; groups of B and C are divided like KV heads."""
    heads = HeadSharding(module.num_heads, module.n_groups, rank, size)
    if why := _indivisible(heads, "heads", "groups of B and C"):
        return why
    width, state = module.intermediate_size, module.ssm_state_size
    if width != module.num_heads * module.head_dim:
        return f"its width {width} is not that of {module.num_heads} heads of {module.head_dim}"
    if 1 < module.n_groups < size:
        return f"a norm of one of its {module.n_groups} groups has its inputs on several ranks, but not on all"
    channels, each = (heads.query_range(module.head_dim),), (heads.query_range(1),)
    groups = module.n_groups * state

    def mixed(start: int) -> Ranges:
        """Rows of `[x | B | C]` after `start`."""
        x = heads.query_range(module.head_dim, start)
        return x, heads.kv_range(state, start + width), heads.kv_range(state, start + width + groups)

    projected = *channels, *mixed(width), heads.query_range(1, 2 * (width + groups))
    columns = {
        "in_proj": projected,
        "mup_vector": projected,  # of Falcon-H1: a factor for each output of in_proj
        "conv1d": mixed(0),
        "norm": channels,
        **dict.fromkeys(("A_log", "D", "dt_bias"), each),
    }
    local_width, local_groups = width // size, heads.num_local_kv
    sizes = {
        "num_heads": heads.num_local_query,
        "n_groups": local_groups,
        "intermediate_size": local_width,
        "conv_dim": local_width + 2 * local_groups * state,
        "groups_time_state_size": local_groups * state,
        "norm.n_groups": local_groups,
    }
    has = {name: value for name, value in sizes.items() if _has(module, name)}
    whole_norm = ("norm",) if module.n_groups == 1 and _has(module, "norm.weight") else ()
    return RecurrentShards(
        _present(module, columns), {"out_proj": channels[0]}, has, norms=whole_norm, dims={"mup_vector": 2}
    )


def _has(module: Any, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return hasattr(module.get_submodule(owner), leaf)


# -- convolution, selective scan, lightning attention, RG-LRU -----------------------------------------------------------


def _even(length: int, rank: int, size: int, parts: int = 1) -> Ranges:
    """A rank's ranges of each of `parts` equal stretches; the length is divisible."""
    shard = even_shard((length,), 0, rank, size, parts)
    assert shard is not None
    return shard.ranges


def _short_conv(module: Any, rank: int, size: int) -> RecurrentShards | str:
    """LFM2's short convolution: `in_proj` gives `[B | C | x]`, and channels are independent."""
    width = module.conv.weight.shape[0]
    if width % size:
        return f"its {width} channels are not divisible by {size}"
    channels = _even(width, rank, size)
    return RecurrentShards({"in_proj": _even(3 * width, rank, size, 3), "conv": channels}, {"out_proj": channels[0]})


def _mamba(module: Any, rank: int, size: int) -> RecurrentShards | str:
    """Mamba's mixer, by channels: dt, B and C, which all channels read, are sums over ranks."""
    width = module.intermediate_size
    if width % size:
        return f"its {width} channels are not divisible by {size}"
    channels = _even(width, rank, size)
    return RecurrentShards(
        {
            "in_proj": _even(2 * width, rank, size, 2),  # x, z
            **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), channels),
        },
        dict.fromkeys(("x_proj", "out_proj"), channels[0]),
        {"intermediate_size": width // size},
        replicated=("dt_layernorm", "b_layernorm", "c_layernorm"),
    )


def _lightning(module: Any, rank: int, size: int) -> RecurrentShards | str:
    """MiniMax's lightning attention: `qkv_proj` gives query, key and value of a head, then of the next."""
    heads = HeadSharding(module.num_attention_heads, module.num_attention_heads, rank, size)
    if why := _indivisible(heads, "heads", "heads"):
        return why
    channels = heads.query_range(module.head_dim)
    return RecurrentShards(
        {
            "qkv_proj": (heads.query_range(3 * module.head_dim),),
            "slope_rate": (heads.query_range(1),),
            **dict.fromkeys(("output_gate", "norm"), (channels,)),
        },
        {"out_proj": channels},
        {"num_attention_heads": heads.num_local_query},
        norms=("norm",),
    )


def _rg_lru(module: Any, rank: int, size: int) -> RecurrentShards | str:
    """RecurrentGemma's block: the gates of the RG-LRU are matrices for each head."""
    gates: Any = module.rg_lru
    heads = HeadSharding(gates.num_attention_heads, gates.num_attention_heads, rank, size)
    if why := _indivisible(heads, "heads", "heads"):
        return why
    channels, each = heads.query_range(gates.block_width), (heads.query_range(1),)
    by_head = ("input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias")
    return RecurrentShards(
        {
            **dict.fromkeys(("linear_x", "linear_y", "conv_1d", "rg_lru.recurrent_param"), (channels,)),
            **dict.fromkeys((f"rg_lru.{name}" for name in by_head), each),
        },
        {"linear_out": channels},
        {"rg_lru.num_attention_heads": heads.num_local_query},
    )


_BY_CLASS: dict[str, Callable[[Any, int, int], RecurrentShards | str]] = {
    "Qwen3NextGatedDeltaNet": _gated_delta_rule,
    "Qwen3_5GatedDeltaNet": _gated_delta_rule,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta_rule,
    "OlmoHybridGatedDeltaNet": _gated_delta_rule,
    "KimiLinearDeltaAttention": _kimi_delta,
    "BailingHybridDeltaAttention": _kimi_delta,
    "Mamba2Mixer": _mamba2,
    "BambaMixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "Zamba2MambaMixer": _mamba2,
    "Lfm2ShortConv": _short_conv,
    "Lfm2MoeShortConv": _short_conv,
    "Lfm3ShortConv": _short_conv,
    "MambaMixer": _mamba,
    "FalconMambaMixer": _mamba,
    "JambaMambaMixer": _mamba,
    "MiniMaxLightningAttention": _lightning,
    "RecurrentGemmaRecurrentBlock": _rg_lru,
}
"""(layer, rank, number of ranks) -> this rank's part, or why the layer is replicated; by class of transformers."""
