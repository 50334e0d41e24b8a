"""Triton reads TRITON_INTERPRET when it is imported: interpreted kernels need a process of their own.

TRITON_INTERPRET=1 PYTHONPATH=. python -m tests.ops.interpreted MODULE [argument...]
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def run_interpreted(module: str, *arguments: str) -> None:
    """Run a module of tests in a process of its own, where Triton interprets its kernels on CPU tensors."""
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ops.interpreted", module, *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def patch_once_a_launch() -> None:
    """The interpreter patches the language again in every function that a kernel calls; the launch's own patch suffices."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    every_module = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    active: list[Any] = []

    class Launch:
        def __init__(self) -> None:
            active.append(patch(every_module))

        def restore(self) -> None:
            active.pop().restore()

    interpreter._patch_lang = lambda _: interpreter._LangPatchScope() if active else Launch()


def build_types_once() -> None:
    """The interpreter builds the type of a result, and what follows from a type, anew in each operation; equal ones are kept."""
    import triton.language as tl
    from triton.runtime import interpreter

    block_init, tensor_init, numpy_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[tuple, dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    dtypes: dict[str, Any] = {}

    def init_block(self: tl.block_type, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            block_init(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def init_tensor(self: tl.tensor, handle: Any, type: Any) -> None:  # an operation names the argument
        if type.name not in shapes:
            tensor_init(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    def to_numpy(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = numpy_dtype(dtype)
        return dtypes[dtype.name]

    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = init_block, init_tensor, to_numpy


if __name__ == "__main__":
    patch_once_a_launch()
    build_types_once()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
