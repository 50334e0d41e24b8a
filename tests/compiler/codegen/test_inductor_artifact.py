"""Stored generated code keeps the imports that it uses and its behavior."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn
from torch._inductor import standalone_compile
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch.compiler._cache import CacheArtifactManager

from torchweave.compiler.codegen.inductor_artifact import deserialize_code, serialize_code, strip_unused_imports
from torchweave.compiler.codegen.pieces import compiled_fx_graph

CODE = """\
# AOT ID: ['0_inference']
import torch
import math
from torch._inductor.hooks import run_intermediate_hooks
from torch._inductor.utils import maybe_profile
from torch._inductor.codegen.memory_planning import _align as align
from torch import device, empty_strided
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.runtime.triton_heuristics import (
    start_graph, end_graph)

async_compile = AsyncCompile()
kernel = '''
from torch._inductor.runtime import triton_helpers
'''

def call(args):
    from torch._inductor.utils import print_performance
    {call}
    return align(3)
"""


def test_unused_imports_are_removed_without_moving_lines() -> None:
    before, after = (
        CODE.replace("{call}", "pass").splitlines(),
        strip_unused_imports(CODE.replace("{call}", "pass")).splitlines(),
    )
    gone = [line for line, now in zip(before, after, strict=True) if line != now]
    assert gone == [before[3], before[4], before[8]], (
        "hooks, maybe_profile and extern_kernels; what has two lines stays"
    )


def test_extern_kernels_of_torch_are_imported_from_torch() -> None:
    code = strip_unused_imports(CODE.replace("{call}", "extern_kernels.mm(args[0], args[1], out=args[2])"))
    assert "select_algorithm" not in code
    scope: dict[str, object] = {}
    exec(next(line for line in code.splitlines() if "extern_kernels =" in line), {"torch": torch}, scope)
    assert scope["extern_kernels"].mm is torch.mm  # type: ignore[attr-defined]


def test_other_extern_kernels_are_imported_from_inductor() -> None:
    imported = "from torch._inductor.select_algorithm import extern_kernels\n"
    for call in ("extern_kernels.bias_addmm(*args)", "extern_kernels.mm(bias_addmm(*args))", "f(extern_kernels)"):
        other = call.replace("mm(bias", "mm(extern_kernels.bias")
        assert imported in strip_unused_imports(CODE.replace("{call}", other))


class Made:
    """Stands for Inductor's compiled graph, which is not run here."""

    source_code, cache_key, _triton_bundle = "import torch\n", "key", None
    fx_kwargs: ClassVar = {"get_decomp_fn": None, "cpp_wrapper": False}

    def prepare_for_serialization(self) -> None: ...

    def after_deserialization(self, constants: object) -> None: ...

    def post_compile(self, inputs: object, constants: object, options: object) -> None: ...


def test_autotuned_configs_are_stored_with_kernels(tmp_path: Path) -> None:
    """Else a start in a folder that Inductor does not know would try each kernel's configurations again."""
    with CacheArtifactManager.with_fresh_cache():
        CacheArtifactManager.record_artifact("autotune", "ab/kernel.best_config", {"XBLOCK": 64})
        made = CacheArtifactManager.serialize()
    assert made is not None
    payload = serialize_code(Made(), made[0])
    with temporary_cache_dir(str(tmp_path)):
        assert deserialize_code(payload).cache_key == "key_lean"
    assert json.loads((tmp_path / "ab" / "kernel.best_config").read_bytes()) == {"XBLOCK": 64}


class Launched:
    """Stands for the kernels of a graph from Inductor's disk cache: they have launchers."""

    def __getstate__(self) -> object:
        raise AssertionError("pickle should not be called with after make_launchers()")


@pytest.mark.parametrize("found", [False, True])
def test_graph_of_inductors_disk_cache_is_stored(found: bool, tmp_path: Path) -> None:
    """Else each rank and each later start would compile a piece again that Inductor's cache knows."""

    def compiled() -> tuple[Any, bytes]:
        module = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Hardtanh()))
        artifact = standalone_compile(module, [torch.ones(3)], dynamic_shapes="from_example_inputs")
        return compiled_fx_graph(artifact), artifact._artifacts[0]  # type: ignore[union-attr]

    with temporary_cache_dir(str(tmp_path)):
        graph, artifacts = compiled()
        if found:
            graph, artifacts = compiled()
        graph._triton_bundle = Launched()
        call = deserialize_code(serialize_code(graph, artifacts)).current_callable
    assert call([torch.tensor([-2.0, 0.5, 3.0])])[0].tolist() == [0, 0.5, 1]
