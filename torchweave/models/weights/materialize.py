"""Fill a model that was built without memory: from a checkpoint, through transformers' conversion, or at random."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from torchweave.models.adapt import install
from torchweave.models.attention import UnsupportedModel
from torchweave.models.parallel import ParallelPlan
from torchweave.models.parallel.apply import apply, place_offsets
from torchweave.models.parallel.pipeline_stages import Stage, leave_out_others
from torchweave.models.resolve import Source
from torchweave.models.weights import read as weights
from torchweave.models.weights.merge_experts import Merger, Merging, check_merges, merging_of
from torchweave.models.weights.quantize import Quantizer, Scheme
from torchweave.models.weights.quantized_checkpoint import (
    check_dtypes,
    check_scales,
    cut_scales,
    stored_scheme,
    take_scales,
)
from torchweave.report import Report


@dataclass(frozen=True)
class Filling:
    """How a model is to be filled.

    Attributes:
        source: where it comes from.
        config: a fresh one, for transformers' own loading.
        dtype, device: of its weights.
        quantization: how its linears are quantised as they arrive; None: they are not.
        plan: this rank's part of it; None: all of it.
        stage: this rank's layers of it; None: all of them.
        whole: where there is a stage, what the whole model has; see `weights.fill_random`.
    """

    source: Source
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool = False
    quantization: Scheme | None = None
    plan: ParallelPlan | None = None
    stage: Stage | None = None
    whole: Mapping[str, Tensor] | None = None

    def quantizer(self, model: PreTrainedModel) -> Quantizer | None:
        return None if self.quantization is None else Quantizer(model, self.quantization)


def fill_dummy(model: PreTrainedModel, how: Filling, report: Report) -> Quantizer | None:
    """Fill the model at random; ranks have parts of the same numbers."""
    quantizer = how.quantizer(model)
    cuts = how.plan.cuts if how.plan is not None else {}
    weights.fill_random(model, how.device, report, placer=quantizer, cuts=cuts, whole=how.whole)
    _buffers(model, how)
    return quantizer


def fill(
    model: PreTrainedModel, stored: dict[str, weights.Stored], how: Filling, report: Report
) -> tuple[PreTrainedModel, Quantizer | None]:
    """The model with a checkpoint's weights: the one given, or a new one where transformers must convert them."""
    folder = how.source.folder
    assert folder is not None
    if not weights.needs_conversion(model, stored):
        return model, _stream(model, stored, weights.rename(model, stored), how, report)
    merging = merging_of(model, stored)
    if merging is not None:
        return model, _merge(model, stored, merging, how, report)
    if stored_scheme(how.source) is not None:
        raise UnsupportedModel(
            f"{folder} has tensors under other names or in other pieces than {type(model).__name__}, which cannot be read in FP8; "
            "use an unquantized checkpoint (quantization=fp8 quantises it as it is loaded)."
        )
    # Which of them become what is known to transformers alone.
    each = {name: name for name in stored if name.endswith("weight")}
    check_dtypes(model, stored, each | weights.rename(model, stored), {})
    return _convert(how, stored, report)


def _stream(
    model: PreTrainedModel,
    stored: dict[str, weights.Stored],
    renamed: dict[str, str],
    how: Filling,
    report: Report,
    merger: Merger | None = None,
) -> Quantizer | None:
    """Fill the model tensor by tensor, those of quantised linears with their scales."""
    folder = how.source.folder
    assert folder is not None
    found = stored_scheme(how.source)
    cuts, pieces = how.plan.cuts if how.plan is not None else {}, merger.pieces if merger is not None else {}
    scales, inputs = take_scales(stored, renamed) if found is not None else ({}, {})
    check_dtypes(model, stored, {**renamed, **pieces}, scales)
    weights.check_names(model, stored, renamed, folder, cuts, pieces)
    check_scales(scales, inputs if found is not None and found.static else {})
    quantizer = how.quantizer(model) if found is None else Quantizer(model, found, cut_scales(scales, cuts), inputs)
    weights.stream(model, stored, renamed, how.device, report, quantizer, cuts, merger)
    _buffers(model, how)
    return quantizer


def _merge(
    model: PreTrainedModel, stored: dict[str, weights.Stored], merging: Merging, how: Filling, report: Report
) -> Quantizer | None:
    """Fill the model from a checkpoint that has experts one by one."""
    cuts = how.plan.cuts if how.plan is not None else {}
    merger = Merger(model, merging, cuts)
    if stored_scheme(how.source) is not None and any(stored[name].dtype.startswith("F8") for name in merger.pieces):
        raise UnsupportedModel(
            f"{how.source.folder} keeps experts in FP8 in other pieces than {type(model).__name__}, which cannot be read; use a "
            "checkpoint whose experts are not quantized."
        )
    report.event("weights_converted", reason="the checkpoint has experts one by one", by="torchweave, as they are read")
    check_merges(model, stored, merging, cuts)
    return _stream(model, stored, merging.renamed, how, report, merger)


def _buffers(model: PreTrainedModel, how: Filling) -> None:
    if how.plan is not None:
        place_offsets(model, how.plan, how.device)
    weights.rebuild_buffers(model, how.device)


def _convert(
    how: Filling, stored: Mapping[str, weights.Stored], report: Report
) -> tuple[PreTrainedModel, Quantizer | None]:
    """The model as transformers loads it, whole and on the CPU at first."""
    report.event(
        "weights_converted", reason="the checkpoint keeps tensors in other pieces than the model", by="transformers"
    )
    folder = how.source.folder
    assert folder is not None
    with report.stage("weights"), quiet_transformers():
        converted, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=how.config,
            dtype=how.dtype,
            attn_implementation="eager",
            output_loading_info=True,
            trust_remote_code=how.trust_remote_code,
        )  # type: ignore[misc]
        if missing := sorted(info["missing_keys"]):
            raise ValueError(weights.lacks(converted, folder, missing, stored))
        converted = converted.eval().requires_grad_(False)
        install(converted)
        if how.plan is not None:
            apply(converted, how.plan)
            converted.tie_weights(recompute_mapping=False)
            place_offsets(converted, how.plan, torch.device("cpu"))
        if how.stage is not None:
            leave_out_others(converted, how.stage)
        quantizer = how.quantizer(converted)
        if quantizer is not None:
            quantizer.apply(converted, how.device)
        converted = converted.to(how.device)
    return converted, quantizer


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and warnings of transformers in here: what matters is in the report."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
