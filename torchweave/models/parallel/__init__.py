"""Tensor and pipeline parallelism of unmodified models, applied before the weights are read."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from torchweave.distributed.process_groups import ProcessGroups
from torchweave.models import experts
from torchweave.models.adapt import ModelLayers, model_layers
from torchweave.models.attention import UnsupportedModel
from torchweave.models.parallel.apply import apply
from torchweave.models.parallel.linear_roles import name_pattern
from torchweave.models.parallel.pipeline_stages import PipelineStage, make_pipeline_stage
from torchweave.models.parallel.tp_plan import TensorParallelPlan, TensorParallelPlanner
from torchweave.report import Report

__all__ = ["PipelineStage", "TensorParallelPlan", "make_pipeline_stage", "shard_model"]


def shard_model(
    model: PreTrainedModel, layers: ModelLayers, process_groups: ProcessGroups, expert_parallel: bool, report: Report
) -> tuple[TensorParallelPlan, ModelLayers]:
    """Shard a model on the meta device for this rank; returns the plan and the rank's layers with state.

    Raises:
        UnsupportedModel: the model cannot be sharded over these ranks; the message gives the reason.
    """
    specs = layers.attention
    planner = TensorParallelPlanner(model, process_groups.tensor_rank, process_groups.tensor_parallel_size)
    plan = planner.plan(specs, expert_parallel)
    whole = sum(parameter.numel() for parameter in model.parameters())
    apply(model, plan)
    local = model_layers(model)
    own = [
        replace(each, k_scale=spec.k_scale, v_scale=spec.v_scale)
        for each, spec in zip(local.attention, specs, strict=True)
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
        recurrent_layers=len(plan.divided),
        state_bytes=sum(spec.num_bytes for spec in local.recurrent),
        of_state_bytes=sum(spec.num_bytes for spec in layers.recurrent),
    )
    for layer, why in plan.replicated.items():
        why = f"each of the {plan.size} ranks has all of {layer}, its weights and its recurrent states: {why}"
        report.event("warning", what="tensor parallelism", why=why)
    return plan, ModelLayers(own, local.recurrent)
