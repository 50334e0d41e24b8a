"""Low-rank adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.

The tensors' names say which linears an adapter changes, whatever form `target_modules` has (names, ends of names, a regular
expression, `all-linear`) and whichever layers `layers_to_transform` selects: PEFT resolves both before it saves. Their shapes and
the config's ranks must agree. What the files ask for beyond that is refused by name: an adapter without it would answer otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchweave.config.model_source import read_json
from torchweave.config.options import expand_path
from torchweave.models.weights.shards import TensorShard

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_COPY = re.compile(r"(?P<name>.+)\.base_layer(?P<leaf>\.weight|\.bias)")
_MATRIX = re.compile(r"(?P<name>.+)\.lora_(?P<which>[AB])\.weight")
_WITHOUT_EFFECT = frozenset(
    {
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
        "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora", "layers_to_transform",
        "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "eva_config", "qalora_group_size",
        "ensure_weight_tying", "runtime_config",
    }
)  # fmt: skip
"""Fields of the config that change nothing beyond what is read here."""
_WHY = {
    "use_dora": "DoRA scales the rows of the merged weight, which is not of low rank",
    "lora_bias": "only products without a bias are added",
    "bias": "biases are the model's, and shared by all requests",
    "modules_to_save": "whole modules beside the model's are not held",
    "trainable_token_indices": "embeddings are shared by all requests",
    "target_parameters": "adapters of experts' weights are not served",
    "alora_invocation_tokens": "an adapter applies to all tokens of a request",
    "layer_replication": "the layers are the model's",
}
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's weights as they are."""


@dataclass(frozen=True)
class LowRankPair:
    """What an adapter adds to a linear: a `[r, K]`, and b `[N, r]` times the adapter's scale, float32."""

    a: Tensor
    b: Tensor

    def part(self, shard: TensorShard | None, transposed: bool) -> LowRankPair:
        """The part of a rank that has this shard of the linear's weight, which is `[K, N]` if `transposed`."""
        if shard is None or shard.zero:
            return self
        rank = self.a.shape[0]
        if (shard.dim == 0) != transposed:
            return LowRankPair(
                self.a, TensorShard((shard.full[shard.dim], rank), 0, shard.ranges, shard.pad).extract(self.b)
            )
        return LowRankPair(
            TensorShard((rank, shard.full[shard.dim]), 1, shard.ranges, shard.pad).extract(self.a), self.b
        )


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read.

    Attributes:
        pairs: by the name of the linear, as the model's class names it.
        copies: of the model's own tensors, by name: PEFT saves those of a head that an adapter changes.
    """

    pairs: dict[str, LowRankPair]
    copies: dict[str, Tensor]


def read_adapter(folder: str, max_rank: int) -> PeftAdapter:
    """Read an adapter.

    Args:
        folder: with the adapter's files.
        max_rank: largest rank of a matrix.

    Raises:
        ValueError: the folder has no such files, they are damaged, or ask for what is not supported.
    """
    path = expand_path(folder)
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"{folder} is no folder of an adapter: it lacks {CONFIG}; give the folder that PEFT has saved."
        )
    if not (path / TENSORS).is_file():
        why = (
            "; its weights are in a file of pickles: save it as safetensors" if [*path.glob("adapter_model.*")] else ""
        )
        raise ValueError(f"The adapter {folder} lacks {TENSORS}{why}.")
    config = read_json(path / CONFIG)
    _check_config(folder, config)
    matrices, copies = _read_tensors(folder, path / TENSORS)
    pairs = {}
    for name, pair in matrices.items():
        if missing := {"A", "B"} - pair.keys():
            raise ValueError(f"The adapter {folder} has no tensor lora_{missing.pop()} for {name}; save it again.")
        pairs[name] = _scaled(folder, config, name, pair["A"], pair["B"], max_rank)
    return PeftAdapter(pairs, copies)


def _check_config(folder: str, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"The adapter {folder} is of the type {config.get('peft_type')!r}; only LORA is supported.")
    for name, value in config.items():
        if name in _WITHOUT_EFFECT or not value or (name == "bias" and value == "none"):
            continue
        if name == "init_lora_weights":
            if value not in _INITS:
                raise ValueError(
                    f"The adapter {folder} has init_lora_weights={value!r}, which may change the model's own weights; convert it "
                    "to a plain adapter (save_pretrained with path_initial_model_for_weight_conversion)."
                )
        else:
            raise ValueError(
                f"The adapter {folder} has {name}={value!r}, which is not supported: {_WHY.get(name, 'the field is not known')}."
            )
    for name in ("r", "lora_alpha"):
        if not isinstance(config.get(name), (int, float)) or config[name] <= 0:
            raise ValueError(f"The adapter {folder} has {name}={config.get(name)!r}: expected a number above 0.")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise ValueError(
                f"The adapter {folder} has {name}={config[name]!r}: expected numbers by the names of modules."
            )


def _read_tensors(folder: str, file: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The matrices by name of the linear, then A or B; and copies of the model's tensors."""
    matrices: dict[str, dict[str, Tensor]] = {}
    copies: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                name = stored.removeprefix(_PREFIX) if stored.startswith(_PREFIX) else ""
                match = _MATRIX.fullmatch(name)
                if (copy := _COPY.fullmatch(name)) is not None:
                    copies[copy["name"] + copy["leaf"]] = tensors.get_tensor(stored)
                    continue
                if match is None:
                    raise ValueError(
                        f"The adapter {folder} has the tensor {stored}, for which there is no place: only matrices of linears "
                        "(lora_A.weight, lora_B.weight) are supported."
                    )
                matrices.setdefault(match["name"], {})[match["which"]] = tensors.get_tensor(stored)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or cut short ({error}); copy or download it again.") from error
    if not matrices:
        raise ValueError(f"The adapter {folder} has no matrices; save it again.")
    return matrices, copies


def _scaled(folder: str, config: Mapping[str, Any], name: str, a: Tensor, b: Tensor, max_rank: int) -> LowRankPair:
    """The pair of a linear, with PEFT's scale: alpha / r, with rsLoRA alpha / sqrt(r)."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"The adapter {folder} has matrices of shapes {[*a.shape]} and {[*b.shape]} for {name}; save it again."
        )
    rank = _by_pattern(config.get("rank_pattern"), name, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
    if a.shape[0] != rank:
        raise ValueError(
            f"The adapter {folder} has rank {a.shape[0]} for {name}, but its config says {rank}; save it again."
        )
    if rank > max_rank:
        raise ValueError(
            f"The adapter {folder} has rank {rank} for {name}, above max_lora_rank={max_rank}; raise the option."
        )
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    return LowRankPair(a.float(), b.float() * scale)


def _by_pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The number of the first pattern that is the name or, after a dot, its end, as PEFT reads them."""
    for pattern, number in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return number
    return default
