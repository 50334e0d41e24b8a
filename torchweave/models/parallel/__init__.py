"""An unmodified model, divided over ranks before its weights are read: each layer of it, or the layers into stages."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from torchweave.distributed.process_groups import World
from torchweave.models import experts
from torchweave.models.adapt import layer_specs
from torchweave.models.attention import UnsupportedModel
from torchweave.models.parallel.apply import apply
from torchweave.models.parallel.linear_roles import kind_of
from torchweave.models.parallel.pipeline_stages import Stage, keep_stage
from torchweave.models.parallel.tp_plan import ParallelPlan, plan_of
from torchweave.ops.attention.op import LayerSpec
from torchweave.report import Report

__all__ = ["ParallelPlan", "Stage", "divide", "keep_stage"]


def divide(
    model: PreTrainedModel, specs: list[LayerSpec], world: World, expert_parallel: bool, report: Report
) -> tuple[ParallelPlan, list[LayerSpec]]:
    """Make this rank's part of a whole model that has no memory yet; returns the plan and the rank's attention layers.

    Raises:
        UnsupportedModel: the model cannot be divided so; one sentence says what stands in the way.
    """
    plan = plan_of(model, specs, world.tensor_rank, world.tensor_parallel_size, world.tensor_group, expert_parallel)
    whole = sum(parameter.numel() for parameter in model.parameters())
    apply(model, plan)
    own = [
        replace(found, k_scale=spec.k_scale, v_scale=spec.v_scale)
        for found, spec in zip(layer_specs(model), specs, strict=True)
    ]
    if [(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in own] != plan.expected(specs):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be divided over {plan.size} ranks: its forward does not take its number of heads "
            "from its weights; use one rank."
        )
    report.event(
        "tensor_parallel",
        ranks=plan.size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        of=whole,
        summed=sorted({kind_of(name) for name in plan.summed}),
        experts="by number" if plan.experts else "by width" if experts.count(model)["op"] else "none",
        repeated_kv_heads=any(heads.kv < heads.size for heads in plan.heads.values()),
    )
    return plan, own
