"""Fill a model on the meta device: from a checkpoint, through transformers' conversion, or with random weights."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from torchweave.config.model_source import Source
from torchweave.models.adapt import install_ops
from torchweave.models.attention import UnsupportedModel
from torchweave.models.experts import experts_modules
from torchweave.models.multimodal.support import attention_at_load, image_text_class, takes_images
from torchweave.models.parallel import TensorParallelPlan
from torchweave.models.parallel.apply import (
    apply,
    register_rank_offsets,
    restore_whole_buffers,
    shard_buffers,
)
from torchweave.models.parallel.pipeline_stages import PipelineStage, own_layers_only, remove_other_stages
from torchweave.models.weights import read as weights
from torchweave.models.weights.formats import Scheme, StoredWeights, WeightQuantizer
from torchweave.models.weights.int_linear import NVFP4_W4A4
from torchweave.models.weights.merge_experts import (
    ExpertMergePlan,
    ExpertMerger,
    check_merges,
    merge_expert_scales,
    plan_expert_merge,
    pop_expert_scales,
)
from torchweave.models.weights.methods.scales import WEIGHT_SCALES, check_scales, pop_scales, shard_scales
from torchweave.models.weights.packed_checkpoint import PACKED_DTYPE, PackedCheckpoint, PackedFormat
from torchweave.models.weights.packed_experts import PackedExpertReader
from torchweave.models.weights.quantize import Quantizer, QuantScheme
from torchweave.models.weights.quantized_checkpoint import check_dtypes, checkpoint_format
from torchweave.models.weights.unused import UnusedRule
from torchweave.ops.quant.fp8 import GROUP
from torchweave.report import Report


def causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model of a text config that transformers' auto mapping lacks (Emu3, Mllama); None if there is none."""
    module_name = type(config).__module__.replace(".configuration_", ".modeling_")
    if not module_name.startswith("transformers.models.") or ".modeling_" not in module_name:
        return None
    classes = (each for each in vars(importlib.import_module(module_name)).values() if isinstance(each, type))
    for each in classes:
        if issubclass(each, PreTrainedModel) and each.config_class is type(config) and "ForCausalLM" in each.__name__:
            return each
    return None


def is_mapped(config: PreTrainedConfig) -> bool:
    """Whether transformers' auto mapping has a causal language model for a config."""
    return type(config) in AutoModelForCausalLM._model_mapping


@dataclass(frozen=True)
class WeightLoadSpec:
    """Source and destination of a model's weights.

    Attributes:
        source: the checkpoint or shape.
        config: an unmodified config, for transformers' own loading.
        dtype, device: of the weights.
        quantization: scheme for quantizing linears at load time; None: no quantization.
        plan: this rank's tensor-parallel part; None: the whole model.
        stage: this rank's layers; None: all.
        whole: tensors of the whole model if there is a stage; see `weights.init_random_weights`.
        auto_class: transformers' auto class of the model.
        plugins: see `EngineConfig.plugins`.
        unused: which tensors of the checkpoint may have no place in the model.
    """

    source: Source
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool = False
    quantization: Scheme | None = None
    plan: TensorParallelPlan | None = None
    stage: PipelineStage | None = None
    whole: Mapping[str, Tensor] | None = None
    auto_class: Any = AutoModelForCausalLM
    plugins: Sequence[str] | None = None
    unused: UnusedRule = field(default_factory=UnusedRule)

    def quantizer(self, model: PreTrainedModel) -> WeightQuantizer | None:
        return None if self.quantization is None else self.quantization.quantizer(model)


def load_dummy_weights(model: PreTrainedModel, load_spec: WeightLoadSpec, report: Report) -> WeightQuantizer | None:
    """Fill the model with random weights; ranks get parts of the same numbers."""
    quantizer = load_spec.quantizer(model)
    shards = load_spec.plan.shards if load_spec.plan is not None else {}
    weights.init_random_weights(model, load_spec.device, report, quantizer, shards, load_spec.whole)
    _restore_buffers(model, load_spec)
    return quantizer


def load_weights(
    model: PreTrainedModel, stored: dict[str, weights.CheckpointTensor], load_spec: WeightLoadSpec, report: Report
) -> tuple[PreTrainedModel, WeightQuantizer | None]:
    """Load a checkpoint into the model, or into a new model if transformers has to convert the tensors."""
    loader = _CheckpointLoader(model, stored, load_spec, report)
    if not weights.needs_conversion(model, stored):
        return model, loader.load(weights.map_tensor_names(model, stored))
    merge_plan = plan_expert_merge(model, stored)
    if merge_plan is not None:
        loader.merge_experts(merge_plan)
        return model, loader.load(merge_plan.renamed)
    if loader.format is not None:
        raise UnsupportedModel(
            f"{loader.folder} needs conversion to the tensors of {type(model).__name__}, which is not supported for quantized "
            "weights; use an unquantized checkpoint (quantization=fp8 or int4 quantizes it at load time)."
        )
    # The mapping of converted names is internal to transformers.
    each = {name: name for name in stored if name.endswith("weight")}
    check_dtypes(model, stored, each | weights.map_tensor_names(model, stored), {})
    return _load_with_transformers(model, load_spec, stored, report)


class _CheckpointLoader:
    """Fills a model from a checkpoint, tensor by tensor.

    Args:
        stored: tensors of the checkpoint; scales and packed weights are taken out of it.

    Attributes:
        format: quantization of the checkpoint; None: unquantized.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stored: dict[str, weights.CheckpointTensor],
        load_spec: WeightLoadSpec,
        report: Report,
    ) -> None:
        folder = load_spec.source.folder
        assert folder is not None
        self.folder = folder
        self.format = checkpoint_format(load_spec.source, load_spec.plugins)
        self._model, self._stored, self._load_spec, self._report = model, stored, load_spec, report
        self._shards = load_spec.plan.shards if load_spec.plan is not None else {}
        self._packed = self._collect_packed()
        self._stored_expert_scales: Mapping[str, weights.CheckpointTensor] = {}
        if isinstance(self.format, QuantScheme):
            self._stored_expert_scales = pop_expert_scales(stored, WEIGHT_SCALES)
        self._expert_merger: ExpertMerger | None = None
        self._packed_experts: PackedExpertReader | None = None
        self._expert_scales: Mapping[str, Tensor] = {}

    def _collect_packed(self) -> StoredWeights | None:
        """The packed weights, taken out of `stored`; None if the format has none."""
        packed_format = self.format
        if packed_format is None:
            return None
        if self._load_spec.quantization == NVFP4_W4A4 and isinstance(packed_format, PackedFormat):
            packed_format = replace(packed_format, scheme=NVFP4_W4A4)
            if experts_modules(self._model):
                raise UnsupportedModel(
                    f"quantization={NVFP4_W4A4.name} is not supported for a model with experts; leave it out to keep 16 bits in "
                    "activations."
                )
        return packed_format.collect(self.folder, self._stored)

    def merge_experts(self, merge_plan: ExpertMergePlan) -> None:
        """Merge the tensors of single experts while they are read."""
        model, shards = self._model, self._shards
        self._report.event(
            "weights_converted", reason="the checkpoint has separate tensors per expert", by="torchweave, while reading"
        )
        check_merges(model, self._stored, merge_plan, shards)
        packed_plan, merge_plan = _split_packed(merge_plan, self._stored)
        if packed_plan.merged:
            if not isinstance(self._packed, PackedCheckpoint):
                raise UnsupportedModel(
                    f"{self.folder} has experts in a form that is read for linears only; use an unquantized checkpoint "
                    "(quantization=fp8 or int4 quantizes it at load time)."
                )
            self._packed_experts = PackedExpertReader(model, self._packed, packed_plan, shards)
        self._expert_merger = ExpertMerger(model, merge_plan, shards)
        self._expert_scales = merge_expert_scales(model, merge_plan, self._stored_expert_scales, shards, GROUP)

    def load(self, renamed: dict[str, str]) -> WeightQuantizer | None:
        """Fill the model; `renamed`: checkpoint name -> model name."""
        pieces = self._expert_merger.pieces if self._expert_merger is not None else {}
        load = self._load_plain if self._packed is None else self._load_packed
        quantizer = load(renamed, pieces)
        _restore_buffers(self._model, self._load_spec)
        return quantizer

    def _check_names(self, renamed: dict[str, str], pieces: Mapping[str, str]) -> None:
        rule, report = self._load_spec.unused, self._report
        weights.check_tensor_names(self._model, self._stored, renamed, self.folder, self._shards, pieces, rule, report)

    def _load_plain(self, renamed: dict[str, str], pieces: Mapping[str, str]) -> WeightQuantizer | None:
        """Fill the model, with scales for linears and experts in FP8."""
        model, stored, shards, quant_scheme = self._model, self._stored, self._shards, self.format
        assert quant_scheme is None or isinstance(quant_scheme, QuantScheme), "packed weights were collected"
        scales, inputs = pop_scales(stored, renamed) if quant_scheme is not None else ({}, {})
        check_dtypes(model, stored, {**renamed, **pieces}, {**scales, **self._expert_scales})
        self._check_names(renamed, pieces)
        check_scales(scales, inputs if quant_scheme is not None and quant_scheme.static else {})
        quantizer = (
            self._load_spec.quantizer(model)
            if quant_scheme is None
            else Quantizer(model, quant_scheme, shard_scales(scales, shards), inputs, self._expert_scales)
        )
        device, report = self._load_spec.device, self._report
        weights.stream_weights(model, stored, renamed, device, report, quantizer, shards, self._expert_merger)
        return quantizer

    def _load_packed(self, renamed: dict[str, str], pieces: Mapping[str, str]) -> WeightQuantizer:
        """Fill the model, with packed weights for linears and experts."""
        model, stored, shards, packed = self._model, self._stored, self._shards, self._packed
        packed_experts = self._packed_experts
        assert packed is not None
        reader = packed.reader(model, stored, renamed, shards)
        renamed = {name: target for name, target in renamed.items() if name in stored}
        plain = {name: target for name, target in renamed.items() if name not in packed.weights}
        check_dtypes(model, stored, {**plain, **pieces}, {})
        whole = {} if packed_experts is None else packed_experts.matrices
        self._check_names(renamed, {**pieces, **whole})
        quantizer = reader.quantizer(model, packed_experts)
        readers = [each for each in (reader, self._expert_merger, packed_experts) if each is not None]
        parts = {**reader.parts, **({} if packed_experts is None else packed_experts.parts)}
        device, report, assembler = self._load_spec.device, self._report, weights.AssemblerGroup(readers)
        weights.stream_weights(model, stored | parts, plain, device, report, quantizer, shards, assembler)
        return quantizer


def _split_packed(
    merge_plan: ExpertMergePlan, stored: Mapping[str, weights.CheckpointTensor]
) -> tuple[ExpertMergePlan, ExpertMergePlan]:
    """The merged parameters that a checkpoint has in packed matrices, and the rest of the plan.

    Raises:
        ValueError: some matrices of a parameter are packed.
    """
    packed, plain = {}, {}
    for target, merge in merge_plan.merged.items():
        in_words = [name for name in merge.pieces if stored[name].dtype == PACKED_DTYPE]
        if in_words and len(in_words) < len(merge.pieces):
            other = next(name for name in merge.pieces if name not in in_words)
            raise ValueError(
                f"This checkpoint has {in_words[0]} packed beside {other} as {stored[other].dtype}, which would be one parameter, "
                f"{target}; quantize all of its experts or none."
            )
        (packed if in_words else plain)[target] = merge
    return ExpertMergePlan(packed, {}), ExpertMergePlan(plain, merge_plan.renamed)


def _restore_buffers(model: PreTrainedModel, load_spec: WeightLoadSpec) -> None:
    plan, stage, computed = load_spec.plan, load_spec.stage, []
    if plan is not None:
        register_rank_offsets(model, plan, load_spec.device)
        computed = restore_whole_buffers(model, plan)
    with contextlib.nullcontext() if stage is None else own_layers_only(model, stage):
        weights.rebuild_buffers(model, load_spec.device)
    if plan is not None:
        shard_buffers(model, plan, computed)


def _load_with_transformers(
    model: PreTrainedModel, load_spec: WeightLoadSpec, stored: Mapping[str, weights.CheckpointTensor], report: Report
) -> tuple[PreTrainedModel, WeightQuantizer | None]:
    """Load the whole model on the CPU with transformers, then shard and quantize it."""
    report.event(
        "weights_converted", reason="the checkpoint splits tensors differently from the model", by="transformers"
    )
    folder = load_spec.source.folder
    assert folder is not None
    with report.stage("weights"), quiet_transformers():
        own = None if is_mapped(load_spec.config) else causal_lm_class(load_spec.config)
        own = image_text_class(load_spec.config) if takes_images(load_spec.config) else own
        converted, info = (own or load_spec.auto_class).from_pretrained(
            folder,
            config=load_spec.config,
            dtype=load_spec.dtype,
            attn_implementation=attention_at_load(load_spec.config),
            output_loading_info=True,
            trust_remote_code=load_spec.trust_remote_code,
        )  # type: ignore[misc]
        if missing := sorted(info["missing_keys"]):
            raise ValueError(weights.missing_tensors_message(converted, folder, missing, stored))
        of_drafters = weights.read_headers(folder).keys() - stored.keys()
        unused = info["unexpected_keys"] - of_drafters
        load_spec.unused.check(converted, folder, unused, weights.loadable_tensors(converted), report)
        converted = converted.eval().requires_grad_(False)
        install_ops(converted, like=model, plugins=load_spec.plugins)
        if load_spec.plan is not None:
            apply(converted, load_spec.plan)
            converted.tie_weights(recompute_mapping=False)
            register_rank_offsets(converted, load_spec.plan, torch.device("cpu"))
        if load_spec.stage is not None:
            remove_other_stages(converted, load_spec.stage)
        quantizer = load_spec.quantizer(converted)
        if quantizer is not None:
            quantizer.apply(converted, load_spec.device)
        converted = converted.to(load_spec.device)
    return converted, quantizer


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and warnings of transformers; the report has its own."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
