"""Start-up time to the first token in new processes: cold with empty caches, then warm with the first start's caches.

Includes the interpreter and the first token besides the engine's reported stages, so that the parts sum to the user's wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_CHILD = "torchweave.cli.commands.start_once"


def startup(options: Mapping[str, Any], advance: Callable[..., None]) -> dict[str, Any]:
    """Measure a cold and a warm start with engine options by dotted name.

    Returns `cold` and `warm`, each `seconds`, `stages` (name, seconds, within: the enclosing stage or None) and
    `modules_without_bytecode`, and vLLM's `avg_cold_startup_time` and `avg_warm_startup_time`.
    """
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="torchweave-startup-") as folder:
        for kind in ("cold", "warm"):
            result[kind] = _start(options, Path(folder))
            advance(1, f"{kind}: {result[kind]['seconds']:.1f} s")
    for kind in ("cold", "warm"):
        result[f"avg_{kind}_startup_time"] = result[kind]["seconds"]
    return result


def _start(options: Mapping[str, Any], caches: Path) -> dict[str, Any]:
    requested = {**options, "torch_compile_config.compile_cache_dir": str(caches / "torchweave")}
    begin = time.monotonic()
    done = subprocess.run(_command(caches, json.dumps(requested)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError("the engine did not start; see the error above")
    facts = json.loads(done.stdout.splitlines()[-1])
    # time.monotonic is one clock for all processes.
    seconds = facts["first_token_at"] - begin
    stages = [{"name": "interpreter", "seconds": facts["began_at"] - begin, "within": None}, *facts["stages"]]
    listed = sum(stage["seconds"] for stage in stages if stage["within"] is None)
    rest = {"name": "the rest", "seconds": max(seconds - listed, 0.0), "within": None}
    without = facts["modules_without_bytecode"]
    return {"seconds": seconds, "stages": [*stages, rest], "modules_without_bytecode": without}


def _command(caches: Path, options: str) -> Sequence[str]:
    """The child's command line, with compiler caches below `caches`."""
    variables = {
        "TRITON_CACHE_DIR": caches / "triton",
        "TORCHINDUCTOR_CACHE_DIR": caches / "inductor",
        "CUDA_CACHE_PATH": caches / "cuda",
    }
    return ["env", *(f"{name}={path}" for name, path in variables.items()), sys.executable, "-m", _CHILD, options]
