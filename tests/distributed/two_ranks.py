"""A script for torchrun: every rank runs it, and those other than 0 work inside the constructor."""

from __future__ import annotations

import os
import time

from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams

OPTIONS = {
    "device": "cpu",
    "cpu_kv_cache_gib": 0.02,
    "tensor_parallel_size": 2,
    "rank_timeout": 60.0,  # a busy machine may keep a thread waiting
    "torch_compile_config": {"enable_fullgraph": False, "debug": True},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def agreed(llm: LLM, steps: int, seconds: float = 60.0) -> bool:
    """Whether both ranks have come to the same after at least so many steps, which they tell when the engine falls idle."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = list(llm.engine.steps.digests)  # type: ignore[attr-defined]
        if found and int(found[0].split()[0]) >= steps:
            return len(found) == 2 and found[0] == found[1]
        time.sleep(0.01)
    return False


if __name__ == "__main__":
    llm = LLM("demo", executor="torchrun", **OPTIONS)
    ids = llm.generate("1+1=", GREEDY)[0].outputs[0].token_ids
    print(f"rank {os.environ['RANK']} drew {list(ids)}, agreed {agreed(llm, 8)}", flush=True)
    llm.shutdown()
