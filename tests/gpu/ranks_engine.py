"""An engine over two GPUs from start to the death of a rank; prints its observations as one line of JSON.

python -m tests.gpu.ranks_engine FOLDER_OF_THE_COMPILE_CACHE [pipeline_parallel_size | twice]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.distributed.two_ranks import agreed
from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams

PROMPTS = ["12+30=", "907-48=", "sort: pear fig apple", "Once upon a time", "A"] * 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)


def options(cache: str) -> dict[str, Any]:
    sizes = {"max_batch_size": 32, "max_num_tokens": 512, "num_kv_blocks": 400, "dtype": "float32", "device": "cuda"}
    return sizes | {"torch_compile_config": {"debug": True, "compile_cache_dir": cache}}


def answers(llm: LLM) -> list[list[int]]:
    return [list(found.outputs[0].token_ids) for found in llm.generate(PROMPTS, GREEDY)]


def kill_while_it_generates(llm: LLM) -> dict[str, Any]:
    """The caller's error, the seconds until it is raised, and the seconds until the process has exited."""
    process = llm.report.select("rank")[0]["process"]
    stream = llm.stream("Once upon", LONG)
    next(stream)
    begin = time.monotonic()
    os.kill(process, signal.SIGKILL)
    error = ""
    try:
        list(stream)
    except RuntimeError as failure:
        error = str(failure)
    heard = time.monotonic() - begin
    while Path(f"/proc/{process}").exists() and time.monotonic() - begin < 30:
        time.sleep(0.02)
    return {"error": error, "heard": heard, "gone": time.monotonic() - begin}


def main(cache: str, divided: str = "tensor_parallel_size") -> None:
    begin = time.monotonic()
    llm = LLM("demo", **{divided: 2}, **options(cache))
    seen: dict[str, Any] = {
        "built": time.monotonic() - begin,
        "tokens": answers(llm),
        "counts": dict(llm.manager.counts),
    }
    seen["agreed"] = agreed(llm, sum(seen["counts"].values()))
    seen["rank"] = llm.report.select("rank")[0]
    seen["built by the leader"] = [str(event) for name in ("cache", "fallback") for event in llm.report.select(name)]
    seen["killed"] = kill_while_it_generates(llm)
    begin = time.monotonic()
    llm.shutdown()
    seen["shutdown"] = time.monotonic() - begin
    print(json.dumps(seen), flush=True)


def twice(cache: str) -> None:
    """Print whether a second engine of the process gives the tokens of the first."""
    found = []
    for _ in range(2):
        with LLM("demo", tensor_parallel_size=2, **options(cache)) as llm:
            found.append((answers(llm), llm.report.select("symmetric_memory")[0]["used"]))
    print(json.dumps({"same": found[0][0] == found[1][0], "shared": [used for _, used in found]}), flush=True)


def check_life(folder: str, *option: str) -> dict[str, Any]:
    """Run this file over two GPUs: tokens of one GPU, full graphs, joint shutdown within seconds. Returns the observations."""
    with LLM("demo", **options(folder)) as alone:
        expected = answers(alone)
    # A process of its own: one that has lost a rank may hold kernels that never end.
    command = [sys.executable, "-m", "tests.gpu.ranks_engine", folder, *option]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen["tokens"] == expected
    assert set(seen["counts"]) <= {"decode_graph", "mixed_graph"}, seen["counts"]
    assert seen["agreed"]
    assert seen["rank"]["device"] == "cuda:1" and seen["rank"]["loaded"] > 0, seen["rank"]
    killed = seen["killed"]
    assert "killed by SIGKILL" in killed["error"] and max(killed["heard"], killed["gone"]) < 10, killed
    assert seen["shutdown"] < 10
    return seen


if __name__ == "__main__":
    if sys.argv[2:] == ["twice"]:
        twice(sys.argv[1])
    else:
        main(*sys.argv[1:])
