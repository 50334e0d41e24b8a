"""Models that pool: base models for embeddings, and sequence classification heads; read from a checkpoint or asked for.

The folder of a sentence-transformers checkpoint has `modules.json`: the transformer, how its rows are pooled, and whether
embeddings are normalized. Other modules (dense layers after the pooling) are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from torchweave.config.model_source import Source, read_json, read_json_list
from torchweave.config.options import PoolerConfig, Runner
from torchweave.models.attention import UnsupportedModel
from torchweave.pooling import Pooling

_HEAD = "ForSequenceClassification"
_POOLING_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}
_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid"}


def resolve_pooling(source: Source, config: PreTrainedConfig, runner: Runner, pooler: PoolerConfig) -> Pooling | None:
    """How the model of a config pools; None for one that generates.

    Args:
        runner: `auto` pools where the checkpoint says so: by its class or by sentence-transformers' `modules.json`.

    Raises:
        ValueError: the checkpoint's way to pool is not supported, or `pooler` contradicts it.
    """
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    modules = None if source.folder is None else _read_modules(source.folder)
    base = name.endswith("Model") and "Head" not in name and modules is None  # GPT2LMHeadModel generates
    classify = name.endswith(_HEAD)
    if runner == "generate" or (runner == "auto" and not (classify or base or modules is not None)):
        _check_unused(pooler)
        return None
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModel(
            f"{source.name} is not causal (is_causal in its config); only causal decoders can be served."
        )
    if classify:
        return _classification(config, pooler)
    stored_type, stored_normalize = _read_pooling(source, modules)
    pooling_type = pooler.pooling_type or stored_type or "last"
    return Pooling(
        "embed",
        int(config.get_text_config().hidden_size),
        pooling_type,
        stored_normalize if pooler.normalize is None else pooler.normalize,
        dimensions=tuple(getattr(config, "matryoshka_dimensions", None) or ()),
    )


def auto_class(pooling: Pooling | None) -> Any:
    """transformers' auto class of a model that generates (None) or pools."""
    if pooling is None:
        return AutoModelForCausalLM
    return AutoModel if pooling.task == "embed" else AutoModelForSequenceClassification


def _check_unused(pooler: PoolerConfig) -> None:
    if pooler != PoolerConfig():
        raise ValueError(
            "pooler_config has no effect on a model that generates text; set runner=pooling, or leave it out."
        )


def _classification(config: PreTrainedConfig, pooler: PoolerConfig) -> Pooling:
    if pooler.pooling_type == "mean" or pooler.normalize is not None:
        raise ValueError(
            "pooler_config is for embeddings; a sequence classification head reads the last token, so leave pooler_config out."
        )
    size, problem = int(config.num_labels or 1), getattr(config, "problem_type", None)
    activation = "softmax" if size > 1 else "sigmoid"
    if problem == "regression":
        activation = "none"
    elif problem == "multi_label_classification":
        activation = "sigmoid"
    stored = getattr(config, "sentence_transformers", None) or {}
    named = stored.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    if named:
        kind = str(named).rpartition(".")[2]
        if kind not in _ACTIVATIONS:
            raise UnsupportedModel(f"The config names the activation {named}, expected Identity or Sigmoid.")
        activation = _ACTIVATIONS[kind]
    labels = getattr(config, "id2label", None) or {}
    pad_token_id = getattr(config.get_text_config(), "pad_token_id", None)
    names = tuple(str(labels.get(index, f"LABEL_{index}")) for index in range(size))
    return Pooling("classify", size, "last", False, activation, names, pad_token_id=pad_token_id)  # type: ignore[arg-type]


def _read_modules(folder: Path) -> list[tuple[str, str]] | None:
    """(kind, folder) of sentence-transformers' modules, as `Pooling` and `1_Pooling`; None without `modules.json`."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = read_json_list(path)
    try:
        return [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} does not list modules with a type and a path; copy or download it again.") from error


def _read_pooling(source: Source, modules: list[tuple[str, str]] | None) -> tuple[Any, bool]:
    """(pooling type or None, whether embeddings are normalized) of a sentence-transformers checkpoint."""
    if modules is None:
        return None, True
    pooling_type, normalize = None, False
    for kind, path in modules:
        if kind == "Normalize":
            normalize = True
        elif kind == "Pooling":
            assert source.folder is not None
            pooling_type = _read_pooling_type(source.folder / path / "config.json")
        elif kind != "Transformer":
            raise UnsupportedModel(
                f"{source.name} has a module {kind} in modules.json, which is not supported; expected Transformer, Pooling and "
                "Normalize."
            )
    return pooling_type, normalize


def _read_pooling_type(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} does not exist, but modules.json names it; copy or download the whole checkpoint.")
    stored = read_json(path)
    modes = [name for name, value in stored.items() if name.startswith("pooling_mode_") and value is True]
    modes = modes or [str(stored.get("pooling_mode", "none"))]
    if len(modes) != 1 or modes[0] not in _POOLING_MODES:
        raise UnsupportedModel(
            f"{path} has {' and '.join(modes)}; pooling by the last token or by the mean is supported."
        )
    return _POOLING_MODES[modes[0]]
