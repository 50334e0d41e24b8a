"""GPU tests skip themselves, with the reason, where there is no GPU; files that take longest run first."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

# Inductor compiles a program for each instruction set that the processor names, 8 s of CPU time in each process with an empty
# folder of its own; read from the environment also by processes that tests start. Unset, a user's Inductor compiles them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Collected tests and traced models are a million objects that live on. With Python's default of 700 new objects, collections that
# find next to nothing take a tenth of the CPU time of tests that trace a model; the engine's own threshold is as high.
gc.set_threshold(50_000)

# Files of 25 s and more. A process of pytest-xdist takes a file at a time in this order (`--no-loadscope-reorder`, since files
# with most tests are not those that take longest), so that no process ends alone with a long one.
LONGEST_FIRST = (
    "serving/test_ray_serve.py",  # of test-all
    "engine/test_mtp.py",
    "engine/test_speculation.py",
    "engine/ranks/test_pipeline.py",
    "e2e/test_demo.py",
    "verify/test_zoo.py",
    "serving/test_life_cycle.py",
    "compiler/passes/test_models.py",
    "serving/ipc/test_frontends.py",
    "compiler/cache/test_cache.py",
    "models/parallel/test_stages.py",
    "models/test_trace_once.py",
    "ops/moe/test_quantized_experts.py",
    "verify/test_verify.py",
    "engine/test_eagle.py",
    "engine/test_recurrent_models.py",
    "engine/test_recurrent_speculation.py",
    "e2e/test_demo_quantized.py",
    "models/weights/test_packed_checkpoint.py",
    "distributed/test_launchers.py",
    "engine/ranks/test_ranks.py",
    "serving/engine_client/test_replicas.py",
    "compiler/test_foreign_modules.py",
    "compiler/runtime/test_compiled_graph.py",
    "doctor/test_doctor.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder, order = Path(__file__).parent, {file: at for at, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(folder).as_posix(), len(order)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_sessionfinish() -> None:
    """Keep the collections of garbage in which pytest and Python end from looking at all that the tests have left."""
    gc.freeze()
