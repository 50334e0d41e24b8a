"""The batch manager with the constructor of TensorRT-LLM's GptManager: it opens the engine of a model by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torchweave.config.peer_options import engine_config
from torchweave.engine.batch_manager import BatchManager
from torchweave.engine.generation_loop import GetRequests, PollStop, ReturnStats, SendResponse
from torchweave.engine.startup.open import open_engine

_MODEL_TYPES = {"inflightbatching": "", "inflightfusedbatching": "", "v1": "static_batch"}
"""Type without its case -> the policy that it sets; "" for that of `scheduler_policy`."""
_POLICIES = ("guaranteed_no_evict", "max_utilization")


class GptManager(BatchManager):
    """`BatchManager` over an engine of its own, which `shutdown` closes.

    Args:
        model: a folder in Hugging Face's layout, a hub id, or a built-in model (`demo`).
        model_type: `InflightBatching`, `InflightFusedBatching` (the same here), or `V1`: static batches, under any policy.
        max_beam_width: largest `beam_width` of a request, at least 1.
        scheduler_policy: `MAX_UTILIZATION` or `GUARANTEED_NO_EVICT`, in any case.
        max_num_requests: most requests in flight, including waiting ones.
        get_inference_requests, send_response, poll_stop_signal, return_batch_manager_stats: callbacks, see `BatchManager`.
        options: fields of `EngineConfig`, or vLLM's names of them.

    Raises:
        ValueError: an argument or the model is not supported; the message says why and what to do.
    """

    def __init__(
        self,
        model: str,
        model_type: str,
        max_beam_width: int,
        scheduler_policy: str,
        max_num_requests: int,
        get_inference_requests: GetRequests,
        send_response: SendResponse,
        poll_stop_signal: PollStop | None = None,
        return_batch_manager_stats: ReturnStats | None = None,
        **options: Any,
    ) -> None:
        kind = _choose("model_type", model_type, _MODEL_TYPES, "InflightBatching, InflightFusedBatching or V1")
        policy = _choose("scheduler_policy", scheduler_policy, _POLICIES, "MAX_UTILIZATION or GUARANTEED_NO_EVICT")
        for name, value in (("max_beam_width", max_beam_width), ("max_num_requests", max_num_requests)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
        options["capacity_scheduler_policy"] = _MODEL_TYPES[kind] or policy
        config = engine_config({"model": model, **options})
        self.engine = open_engine(config)
        scheduler = self.engine.scheduler
        scheduler.set_limits(replace(scheduler.limits, max_beam_width=max_beam_width))
        super().__init__(
            scheduler,
            self.engine.steps,
            get_inference_requests,
            send_response,
            poll_stop_signal,
            return_batch_manager_stats,
            run_ahead=self.engine.plan.run_ahead,
            max_num_requests=max_num_requests,
            seed=config.seed,
            call_ranks=self.engine.call_ranks,
        )

    def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the loop as `BatchManager.shutdown` does, then the other ranks."""
        super().shutdown(drain, timeout)
        if not self.alive:
            self.engine.close()


def _choose(name: str, value: Any, known: Iterable[str], names: str) -> str:
    if not isinstance(value, str) or value.lower() not in known:
        raise ValueError(f"{name}={value!r} is not known: it is {names}")
    return value.lower()
