"""Load a Hugging Face decoder: build it on the meta device, adapt it, and stream the weights to its device.

resolve -> config -> from_config on the meta device -> adapt (ops, layer specs) -> weights -> buffers -> DecoderStep
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from torchweave.config import ModelFacts
from torchweave.config.model_source import Source, check_no_adapter, reject_draft_head, resolve, resolve_tokenizer
from torchweave.config.options import PoolerConfig, Runner
from torchweave.distributed.process_groups import ProcessGroups
from torchweave.models import experts
from torchweave.models.adapt import ModelLayers, adapt, check_config, vocab_size
from torchweave.models.attention import UnsupportedModel
from torchweave.models.decoder import DecoderStep
from torchweave.models.generation import GenerationDefaults, checkpoint_defaults
from torchweave.models.hooks.positions import POSITIONS_AFTER_PADDING
from torchweave.models.hooks.rope import freeze_rope
from torchweave.models.materialize import WeightLoadSpec, causal_lm_class, is_mapped, load_dummy_weights, load_weights
from torchweave.models.multimodal.image_step import make_step
from torchweave.models.multimodal.support import attention_at_load, image_rejection, image_text_class, takes_images
from torchweave.models.parallel import PipelineStage, TensorParallelPlan, make_pipeline_stage, shard_model
from torchweave.models.pooling import auto_class, resolve_pooling
from torchweave.models.weights import read as weights
from torchweave.models.weights.mtp_tensors import split_mtp_tensors
from torchweave.models.weights.quantized_checkpoint import (
    checkpoint_kv_cache_dtype,
    checkpoint_scheme,
    pop_kv_cache_scales,
    quantization_config,
    resolve_scheme,
)
from torchweave.models.weights.unused import UnusedRule
from torchweave.pooling import Pooling
from torchweave.report import Report
from torchweave.tokenizer import Tokenizer, read_eos_token_id

_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx", "max_target_positions",
)  # fmt: skip
_NO_POOLER = PoolerConfig()
# Exceptions of transformers for invalid config values, checked and unchecked.
_BAD_CONFIG = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class LoadedModel:
    """A decoder that is ready for capture.

    Attributes:
        module: the forward over flattened tokens.
        name: the name given by the user.
        architecture: transformers' class, `LlamaForCausalLM`.
        config: the checkpoint's config, as plain data.
        dtype: dtype of weights and activations.
        device: device of the weights.
        max_model_len: longest sequence in tokens.
        tokenizer: None if the folder has none.
        generation: the checkpoint's sampling defaults and end tokens.
        num_parameters: parameters over all ranks, tied ones counted once.
        weight_bytes: bytes of parameters and buffers on this rank.
        quantization: quantization scheme of the linears (`fp8_per_tensor`); None: unquantized.
        no_images: why a model with a vision tower is served without images, as a clause; empty if it is not.
        process_groups: the ranks that share the model.
        stage: the layers of this rank; None: all.
        tensor_plan: this rank's parts of tensors; None: the whole model.
    """

    module: DecoderStep
    name: str
    architecture: str
    config: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    tokenizer: Tokenizer | None
    generation: GenerationDefaults
    num_parameters: int
    weight_bytes: int
    quantization: str | None = None
    no_images: str = ""
    process_groups: ProcessGroups = field(default_factory=ProcessGroups.single_rank)
    stage: PipelineStage | None = None
    tensor_plan: TensorParallelPlan | None = None

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether layers of any pipeline stage have a recurrent state."""
        return bool(self.module.recurrent_layers) or (self.stage is not None and self.stage.has_recurrent_layers)


def load(
    name_or_path: str | Path | Mapping[str, Any],
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    trust_remote_code: bool = False,
    report: Report | None = None,
    max_model_len: int | None = None,
    quantization: str | None = None,
    process_groups: ProcessGroups | None = None,
    expert_parallel: bool = False,
    images: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    runner: Runner = "generate",
    pooler: PoolerConfig = _NO_POOLER,
    plugins: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    ignore_unused_weights: bool = False,
) -> LoadedModel:
    """Load a decoder from a folder, a hub id, a built-in name, or (`load_format="dummy"`) a config or `shape:` name.

    Args:
        dtype: `auto` is the checkpoint's on a GPU, float32 on a CPU.
        load_format: `auto` reads the checkpoint's weights; `dummy` fills random weights of the same shapes.
        trust_remote_code: run Python code that is part of the checkpoint.
        max_model_len: longest sequence in tokens; length-dependent RoPE is fixed for it.
        quantization: quantize linears at load time: `fp8`, `fp8_per_channel`, `fp8_per_block` or `int4`; None: the
            checkpoint's format.
        process_groups: the ranks that share the model; this rank loads its part. None: a single rank.
        expert_parallel: distribute whole experts over the ranks instead of sharding each.
        images: load an image-text model with its vision tower, if it is served with images; else its text decoder.
        revision, download_dir, overrides: see `resolve`.
        runner, pooler, plugins: whether the model generates text or pools, how, and who may add formats; see `EngineConfig`.
        ignore_unused_weights: load a checkpoint without the tensors that have no place in the model, and without an adapter.

    Raises:
        ValueError: the model does not exist, is damaged or unsupported.
    """
    report = report if report is not None else Report(show=False)
    device, process_groups = torch.device(device), process_groups or ProcessGroups.single_rank()
    source = _checked_source(resolve(name_or_path, trust_remote_code, revision, download_dir, overrides), load_format)
    whole_config = _read_whole_config(source, trust_remote_code)
    pooling = resolve_pooling(source, whole_config, runner, pooler)
    no_images = _why_no_images(whole_config, images, pooling)
    images = not no_images and _runs_whole(whole_config, images)
    check_no_adapter(source, ignore_unused_weights)
    config = _read_served_config(source, trust_remote_code, no_images, images)
    if no_images:
        report.event("images", served=False, why=no_images)
    resolved_dtype = _choose_dtype(dtype, config, device)
    stored = _read_own_headers(source, config) if load_format == "auto" else None
    with report.stage("build model"):
        quant_scheme = resolve_scheme(source, quantization, plugins)
        model = build_on_meta(config, resolved_dtype, trust_remote_code, pooling)
        layers = adapt(model, report, plugins)
        experts.check_dtype(model, resolved_dtype, device)
    length = _max_model_len(model.config, max_model_len)
    _check_ranks(process_groups, pooling)
    layers = with_cache_scales(layers, stored, report)
    num_columns = vocab_size(model, pools=pooling is not None)  # before the model is divided over ranks
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    plan = stage = whole = None
    if process_groups.tensor_parallel_size > 1:
        plan, layers = shard_model(model, layers, process_groups, expert_parallel, report)
    if process_groups.pipeline_parallel_size > 1:
        whole, names = weights.untied_tensors(model), weights.map_tensor_names(model, stored or ())
        stage, layers = make_pipeline_stage(model, layers, process_groups, report)
        plan = None if plan is None else plan.restricted_to(stage.owns)
        stored = stored and stage.filter_checkpoint(stored, names, weights.map_tensor_names(model, stored))
    served_config = read_config(source, trust_remote_code, images)
    placement = resolved_dtype, device, trust_remote_code, quant_scheme, plan, stage, whole
    unused = UnusedRule(pooling is not None or type(config) is not type(whole_config), ignore_unused_weights)
    spec = WeightLoadSpec(source, served_config, *placement, auto_class(pooling), plugins, unused)
    model = _load_weights(model, stored, spec, report)
    freeze_rope(model, length, report)
    step = make_step(model, layers.attention, num_columns, length, layers.recurrent, pooling)
    return _make_loaded_model(spec, step, num_parameters, no_images, process_groups, report)


def _load_weights(
    model: PreTrainedModel, stored: dict[str, weights.CheckpointTensor] | None, spec: WeightLoadSpec, report: Report
) -> PreTrainedModel:
    """The model with its weights, random ones without a checkpoint; reports what is quantized."""
    if stored is None:
        quantizer = load_dummy_weights(model, spec, report)
    else:
        model, quantizer = load_weights(model, stored, spec, report)
    if quantizer is not None:
        quantizer.report_summary(model, report)
    return model


def _read_own_headers(source: Source, config: PreTrainedConfig) -> dict[str, weights.CheckpointTensor]:
    """The tensors of a checkpoint, without those of MTP layers, which are a drafter's (`torchweave.models.drafters.mtp`)."""
    assert source.folder is not None, "_checked_source"
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    return split_mtp_tensors(weights.read_headers(source.folder), num_layers)[0]


def _checked_source(source: Source, load_format: str) -> Source:
    """The source, if `load_format` can read it."""
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format is {load_format!r}: expected auto or dummy.")
    if source.folder is None and load_format != "dummy":
        raise ValueError(f"{source.name!r} is a shape without weights: use it with load_format=dummy.")
    return source


def with_tokenizer(
    loaded: LoadedModel, name: str, trust_remote_code: bool = False, download_dir: str | None = None
) -> LoadedModel:
    """The model with another tokenizer, a folder, a hub id or a built-in model's, and its end token.

    Raises:
        ValueError: there is no tokenizer, or it has more tokens than the model.
    """
    folder = resolve_tokenizer(name, trust_remote_code, download_dir)
    tokenizer = Tokenizer.from_folder(folder, trust_remote_code)
    if tokenizer is None:
        raise ValueError(f"tokenizer={name!r} has no tokenizer.json or other tokenizer files; give another folder.")
    if len(tokenizer) > loaded.module.vocab_size:
        raise ValueError(
            f"tokenizer={name!r} has {len(tokenizer)} tokens, but the model has {loaded.module.vocab_size}; give one made for it."
        )
    end = read_eos_token_id(folder)
    ends = tuple(dict.fromkeys((*loaded.generation.eos_token_ids, *(() if end is None else (end,)))))
    return replace(loaded, tokenizer=tokenizer, generation=replace(loaded.generation, eos_token_ids=ends))


def _check_ranks(process_groups: ProcessGroups, pooling: Pooling | None) -> None:
    """Reject models that several ranks do not support."""
    if pooling is not None and process_groups.size > 1:
        raise UnsupportedModel(
            "A model that pools (embeddings, classification) runs on a single rank; set tensor_parallel_size and "
            "pipeline_parallel_size to 1."
        )


def model_facts(
    name_or_path: str | Path | Mapping[str, Any],
    trust_remote_code: bool = False,
    images: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    plugins: Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelFacts:
    """Properties of a model that the plan depends on, from its config; arguments as in `load`.

    Raises:
        ValueError: the model does not exist or its config is invalid or unsupported.
    """
    source = resolve(name_or_path, trust_remote_code, revision, download_dir, overrides)
    config = read_config(source, trust_remote_code, images)
    check_config(config)
    stored, quant_scheme = _stored_dtype(config), checkpoint_scheme(source, plugins)
    heads, length = _global_value(config, "num_attention_heads"), _max_model_len(config, None)
    width = _global_value(config.get_text_config(), "hidden_size")
    return ModelFacts(
        source.name,
        length,
        None if stored is None else str(stored).removeprefix("torch."),
        None if quant_scheme is None else quant_scheme.name,
        checkpoint_kv_cache_dtype(source),
        getattr(config.get_text_config(), "num_hidden_layers", None),
        heads if isinstance(heads, int) else None,
        _longest_model_len(config, length),
        width if isinstance(width, int) else None,
        (quantization_config(source) or {}).get("quant_method"),
    )


def read_config(source: Source, trust_remote_code: bool = False, images: bool = False) -> PreTrainedConfig:
    """Read the config of a source; ValueError for an invalid config or an unknown architecture.

    Args:
        images: the whole config of an image-text model that is served with images; else its text part.
    """
    config = _read_whole_config(source, trust_remote_code)
    return config if _runs_whole(config, images) else _text_part(config)


def _runs_whole(config: PreTrainedConfig, images: bool) -> bool:
    """Whether an image-text model is loaded whole: for images, or because transformers has no class for its text part alone."""
    if not takes_images(config) or image_rejection(config):
        return False
    return images or not _has_class(config.get_text_config())


def _has_class(text: PreTrainedConfig) -> bool:
    """Whether transformers has a decoder class of a text part."""
    return is_mapped(text) or causal_lm_class(text) is not None


def _read_whole_config(source: Source, trust_remote_code: bool) -> PreTrainedConfig:
    raw = source.raw_config()
    if source.folder is not None:
        reject_draft_head(source.name, source.folder)
    model_type = raw.get("model_type")
    if model_type is None and source.folder is not None and not trust_remote_code:
        raise ValueError(
            f"The config of {source.name!r} has no model_type: expected one, such as llama; copy config.json again."
        )
    if not isinstance(model_type, str | None):
        raise ValueError(f"The config of {source.name!r} has model_type={model_type!r}: expected a name; correct it.")
    has_code = trust_remote_code and source.folder is not None and bool(raw.get("auto_map"))
    if source.folder is None:
        raw = dict(raw)
        raw.pop("model_type", None)
    else:
        raw = {}
    known = model_type in transformers.CONFIG_MAPPING
    if not known and not (trust_remote_code and source.folder is not None):
        raise ValueError(
            f"{source.name!r} has the architecture {model_type!r}, which transformers {transformers.__version__} does not "
            "support; see docs/reference/models.md for supported architectures, update transformers, or use trust_remote_code if "
            "the folder contains its own code."
        )
    try:
        if source.folder is None:
            config = AutoConfig.for_model(str(model_type), **raw)
        else:
            config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
            if source.overrides:
                kind = type(config) if not known else transformers.CONFIG_MAPPING[str(model_type)]
                config = kind.from_dict(source.raw_config())
    except (*_BAD_CONFIG, OSError) as error:
        why = " ".join(str(error).split())[:200]
        if has_code:
            raise _code_fault(source.name, error) from error
        raise ValueError(f"The config of {source.name!r} is not a valid {model_type} config: {why}") from error
    except (Exception, SystemExit) as error:
        if not has_code:
            raise
        raise _code_fault(source.name, error) from error
    return config


def _code_fault(name: str, error: BaseException) -> ValueError:
    """The error of a checkpoint whose own Python code fails, whatever it raises."""
    if isinstance(error, FileNotFoundError) or "does not appear to have a file named" in str(error):
        cure = "a file of the code is missing: copy or download the checkpoint again"
    elif isinstance(error, ImportError | AttributeError):
        cure = f"install what it imports, or the version of transformers that it was written for (here: {transformers.__version__})"
    else:
        cure = "correct it, or copy or download it again"
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ValueError(f"The Python code of {name!r} cannot be used ({why}); {cure}.")


def _why_no_images(config: PreTrainedConfig, images: bool, pooling: Pooling | None) -> str:
    """Why a model with a vision tower is loaded without it, as a clause; empty if it is not."""
    if not takes_images(config):
        return ""
    if not _runs_whole(config, images) and not images:
        return "limit_mm_per_prompt.image is 0"
    if pooling is not None:
        return "a model that pools takes no images"
    return image_rejection(config)


def _read_served_config(source: Source, trust_remote_code: bool, no_images: str, images: bool) -> PreTrainedConfig:
    """Read a config that the engine serves; a model without a text decoder is refused with the reason for `no_images`."""
    try:
        config = read_config(source, trust_remote_code, images)
    except UnsupportedModel as error:
        raise UnsupportedModel(
            f"{error} It is not served with images: {no_images}." if no_images else str(error)
        ) from error
    check_config(config)
    return config


def _text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text decoder's config of a multimodal model; only the text part is served."""
    try:
        text = config.get_text_config()
    except ValueError as error:
        if hasattr(config, "audio_encoder"):  # Musicgen
            why = "generates codes of audio, several a step; only decoders of text tokens can be served"
        else:
            why = "has several models of text; only a single decoder can be served"
        raise UnsupportedModel(f"{config.model_type} {why}.") from error
    if text is config or not any(hasattr(config, name) for name in ("vision_config", "audio_config")):
        return config
    if getattr(config, "tie_word_embeddings", False):
        text.tie_word_embeddings = True  # the full model owns the head, so its config decides on tying
    if not _has_class(text):
        raise UnsupportedModel(
            f"{config.model_type} takes images or audio, and transformers has no decoder class for its text part."
        )
    return text


def build_on_meta(
    config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False, pooling: Pooling | None = None
) -> PreTrainedModel:
    """Build the `ForCausalLM` of a config, its image-text model, or (`pooling`) its base or classification model, on meta."""
    name = config.model_type
    own = None if is_mapped(config) or trust_remote_code else causal_lm_class(config)
    if takes_images(config):
        own = image_text_class(config)
    if not is_mapped(config) and own is None and not trust_remote_code:
        raise UnsupportedModel(
            f"{name} has no causal language model in transformers {transformers.__version__}; only decoders can be served."
        )
    if pooling is not None and own is not None:
        raise UnsupportedModel(
            f"{name} is not served for embeddings or classification: transformers maps it to no such class."
        )
    if hasattr(config, "quantization_config"):
        # Linears are replaced by quantized ones when their weights arrive.
        del config.quantization_config  # type: ignore[attr-defined]
    try:
        with torch.device("meta"):
            if own is not None:
                model = own._from_config(config, dtype=dtype, attn_implementation=attention_at_load(config))
            else:
                model = auto_class(pooling).from_config(
                    config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
                )
    except (Exception, SystemExit) as error:
        if trust_remote_code and not is_mapped(config):
            raise _code_fault(name, error) from error
        fault = _build_fault(name, error)
        if fault is error:
            raise
        raise fault from error
    if pooling is not None and pooling.task == "classify" and not hasattr(model, "score"):
        raise UnsupportedModel(
            f"{type(model).__name__} has no linear head named score over its last token, which is needed."
        )
    return model.eval().requires_grad_(False)


def _build_fault(name: str, error: BaseException) -> BaseException:
    """The error of a model of transformers that cannot be built from a config; one that is no fault of the config as it is."""
    if isinstance(error, RuntimeError | NotImplementedError):
        return UnsupportedModel(f"{name} cannot be built on the meta device: {str(error).splitlines()[0]}")
    if not isinstance(error, (*_BAD_CONFIG, ImportError, AssertionError)):
        return error
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ValueError(f"transformers cannot build a {name} model from this config ({why}); check config.json.")


def _choose_dtype(dtype: torch.dtype | str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        stored = _stored_dtype(config)
        return stored if stored in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16
    resolved_dtype = getattr(torch, dtype, None)
    if resolved_dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"dtype is {dtype!r}: expected auto, float32, bfloat16 or float16.")
    return resolved_dtype


def _stored_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """The checkpoint's dtype in a config; None if not set."""
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return getattr(torch, stored, None) if isinstance(stored, str) else stored


def _global_value(config: Any, name: str) -> Any:
    """A value that holds for all layers; None if it is not set or differs by layer, for which transformers raises RuntimeError."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _max_model_len(config: Any, requested: int | None) -> int:
    config = config.get_text_config()
    limit = next((int(value) for key in _LENGTH_KEYS if (value := _global_value(config, key))), None)
    if limit is not None:
        limit = min(limit, _global_value(config, "keep_window_size") or limit)
    if limit is not None and config.model_type in POSITIONS_AFTER_PADDING:
        limit -= config.pad_token_id + 1
    if limit is not None and _rope(config).get("rope_type") == "yarn":
        # Published configs often keep the unscaled length and document only the scaling.
        limit = max(limit, _scaled_length(_rope(config).get("original_max_position_embeddings", limit), config))
    if requested is None:
        return limit if limit is not None else 4096
    if requested < 1:
        raise ValueError(f"max_model_len is {requested}: expected at least 1.")
    longest = limit if limit is None else _longest_model_len(config, limit)
    if longest is not None and requested > longest:
        raise ValueError(f"max_model_len is {requested}, but the model supports {longest} tokens; lower it.")
    return requested


def _longest_model_len(config: Any, limit: int) -> int:
    """The largest valid max_model_len: dynamic RoPE stretches beyond `limit`, at a cost to shorter sequences."""
    config = config.get_text_config()
    return _scaled_length(limit, config) if _rope(config).get("rope_type") == "dynamic" else limit


def _rope(config: Any) -> dict[str, Any]:
    """RoPE parameters of all layers; empty if they differ by layer type."""
    return getattr(config, "rope_parameters", None) or {}


def _scaled_length(tokens: int, config: Any) -> int:
    return int(tokens * max(1.0, _rope(config).get("factor") or 1.0))


def with_cache_scales(
    layers: ModelLayers, stored: dict[str, weights.CheckpointTensor] | None, report: Report
) -> ModelLayers:
    """Move the checkpoint's KV-cache scales from `stored` to the layers' specs."""
    scales = pop_kv_cache_scales(stored) if stored is not None else {}
    if scales and layers.recurrent:
        raise UnsupportedModel(
            "The checkpoint has KV-cache scales by layer, which are not supported in models with recurrent layers; use one without "
            "them."
        )
    if scales:
        report.event("kv_cache_scales", layers=len(scales), largest=max(map(max, scales.values())))
    each = ((spec, scales.get(layer, (1.0, 1.0))) for layer, spec in enumerate(layers.attention))
    specs = [replace(spec, k_scale=k_scale, v_scale=v_scale) for spec, (k_scale, v_scale) in each]
    return replace(layers, attention=specs)


def _make_loaded_model(
    load_spec: WeightLoadSpec,
    step: DecoderStep,
    num_parameters: int,
    no_images: str,
    process_groups: ProcessGroups,
    report: Report,
) -> LoadedModel:
    model = step.model
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    loaded = LoadedModel(
        module=step.eval().requires_grad_(False),
        name=load_spec.source.name,
        architecture=type(model).__name__,
        config=model.config.to_dict(),
        dtype=load_spec.dtype,
        device=load_spec.device,
        max_model_len=step.max_model_len,
        tokenizer=Tokenizer.from_folder(load_spec.source.folder, load_spec.trust_remote_code),
        generation=checkpoint_defaults(load_spec.source.folder, model.config),
        num_parameters=num_parameters,
        weight_bytes=num_bytes,
        quantization=None if load_spec.quantization is None else load_spec.quantization.name,
        no_images=no_images,
        process_groups=process_groups,
        stage=load_spec.stage,
        tensor_plan=load_spec.plan,
    )
    report.event(
        "model_loaded",
        name=loaded.name,
        architecture=loaded.architecture,
        parameters=num_parameters,
        bytes=num_bytes,
        dtype=str(load_spec.dtype).removeprefix("torch."),
        quantization=loaded.quantization,
        device=str(load_spec.device),
        max_model_len=step.max_model_len,
        tokenizer=loaded.tokenizer is not None,
    )
    return loaded
