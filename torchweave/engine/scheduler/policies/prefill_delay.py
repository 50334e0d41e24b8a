"""Whether a step should do without prompts for now, so that later ones are read together and fill a step better.

Source: `batch_wait_timeout_iters` and `batch_wait_max_tokens_ratio` of TensorRT-LLM.
"""

from __future__ import annotations

from torchweave.engine.scheduler.policies.base import Snapshot


def should_delay_prefill(snapshot: Snapshot, delayed_steps: int, timeout_iters: int, max_tokens_ratio: float) -> bool:
    """True while prompts wait: some request generates, the tokens to read are few, and not too many steps went by.

    Args:
        delayed_steps: steps since the first of these prompts could have been read.
        timeout_iters: steps that they wait at the most; 0 never waits.
        max_tokens_ratio: part of the step's tokens that is worth reading at once.
    """
    if not len(snapshot.decode) or delayed_steps >= timeout_iters:
        return False
    tokens = sum(request.remaining_tokens for request in (*snapshot.prefill, *snapshot.waiting))
    return snapshot.decode.num_tokens + tokens < max_tokens_ratio * snapshot.max_num_tokens
