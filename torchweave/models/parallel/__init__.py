"""Tensor and pipeline parallelism of unmodified models, applied before the weights are read."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from torchweave.distributed.process_groups import TENSOR, ProcessGroups
from torchweave.models import experts
from torchweave.models.adapt import layer_specs
from torchweave.models.attention import UnsupportedModel
from torchweave.models.parallel.apply import apply
from torchweave.models.parallel.linear_roles import name_pattern
from torchweave.models.parallel.pipeline_stages import PipelineStage, make_pipeline_stage
from torchweave.models.parallel.tp_plan import TensorParallelPlan, make_tensor_parallel_plan
from torchweave.ops.attention.op import LayerSpec
from torchweave.report import Report

__all__ = ["PipelineStage", "TensorParallelPlan", "make_pipeline_stage", "shard_model"]


def shard_model(
    model: PreTrainedModel, specs: list[LayerSpec], process_groups: ProcessGroups, expert_parallel: bool, report: Report
) -> tuple[TensorParallelPlan, list[LayerSpec]]:
    """Shard a model on the meta device for this rank; returns the plan and the rank's attention layers.

    Raises:
        UnsupportedModel: the model cannot be sharded over these ranks; the message gives the reason.
    """
    plan = make_tensor_parallel_plan(
        model,
        specs,
        process_groups.tensor_rank,
        process_groups.tensor_parallel_size,
        TENSOR,
        expert_parallel,
    )
    whole = sum(parameter.numel() for parameter in model.parameters())
    apply(model, plan)
    own = [
        replace(local, k_scale=spec.k_scale, v_scale=spec.v_scale)
        for local, spec in zip(layer_specs(model), specs, strict=True)
    ]
    if [(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in own] != plan.local_head_counts(specs):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be sharded over {plan.size} ranks: its forward does not derive its number of heads "
            "from its weights; use one rank."
        )
    report.event(
        "tensor_parallel",
        ranks=plan.size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        of=whole,
        all_reduced=sorted({name_pattern(name) for name in plan.all_reduced}),
        experts="by number" if plan.experts else "by width" if experts.count_experts(model)["op"] else "none",
        repeated_kv_heads=any(heads.kv < heads.size for heads in plan.heads.values()),
    )
    return plan, own
