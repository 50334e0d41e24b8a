"""Triton reads TRITON_INTERPRET when it is imported: interpreted kernels need a process of their own.

TRITON_INTERPRET=1 PYTHONPATH=. python -m tests.ops.interpreted MODULE [argument...]

Without a module the process reads such lists from standard input, as JSON, and forks for each, so that its imports are made once.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_PRELOAD = ("attention.op", "moe.experts", "quant.fp8_linear", "sampling.sample", "slot_state", "rope")
"""Modules of `torchweave.ops` that are imported before a fork."""


def run_interpreted(module: str, *arguments: str) -> None:
    """Run a module of tests in a process of its own, where Triton interprets its kernels on CPU tensors."""
    pytest.importorskip("triton")
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    try:
        server.stdin.write(json.dumps([module, *arguments]) + "\n")
        server.stdin.flush()
        code, said = json.loads(server.stdout.readline())
    except BaseException:  # its answer would be taken for that of the next call
        server.kill()
        _server.cache_clear()
        raise
    assert code == 0, said


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that is forked; it ends with this one, at the end of its standard input."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ops.interpreted"]
    server = subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)  # closes its standard input and waits for its end
    return server


def serve() -> None:
    """Answer each list of a module and its arguments with the exit code and the output of a fork that runs it."""
    for name in _PRELOAD:
        importlib.import_module(f"torchweave.ops.{name}")
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.argv = json.loads(line)
                code = 1
                try:
                    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
                    code = 0
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else int(end.code is not None)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), output.read().decode()]), flush=True)


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


def compute_no_unread_overflows() -> None:
    """The interpreter computes sums and products of integers again in 64 bits, to assert in debug mode that they fit."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def combine_whole_slices() -> None:
    """The interpreter calls a reduction's or a scan's own function (of `tl.sort`, too) for one element after the other; here it
    takes all elements of an index along the axis at once, in the same order."""
    import numpy as np
    from triton.runtime import interpreter

    def slices(operation: Any, inputs: Any) -> Iterator[list[np.ndarray]]:
        """Running results, one array for each input, after each index along the axis."""
        arrays = [np.moveaxis(each.handle.data, operation.axis, 0) for each in inputs]
        types = [each.dtype for each in inputs]
        running = [array[0] for array in arrays]
        yield running
        for index in range(1, len(arrays[0])):
            pairs = zip((*running, *(array[index] for array in arrays)), types * 2, strict=True)
            combined = operation.combine_fn.fn(*(operation.to_tensor(each, dtype) for each, dtype in pairs))
            combined = combined if isinstance(combined, tuple) else (combined,)
            running = [each.handle.data.reshape(array[0].shape) for each, array in zip(combined, arrays, strict=True)]
            yield running

    reduce_elements = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self: Any, input: Any) -> list[Any]:
        if self.axis is None or input[0].handle.data.ndim == 1:
            return reduce_elements(self, input)
        *_, last = slices(self, input)
        arrays = [np.expand_dims(each, self.axis) if self.keep_dims else each for each in last]
        return [self.to_tensor(array, each.dtype) for array, each in zip(arrays, input, strict=True)]

    def generic_scan(self: Any, input: Any) -> list[Any]:
        every = zip(*slices(self, input), strict=True)
        arrays = [np.stack(each, self.axis) for each in every]
        return [self.to_tensor(array, each.dtype) for array, each in zip(arrays, input, strict=True)]

    interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = generic_reduce, generic_scan


if __name__ == "__main__":
    patch_once_a_launch()
    build_types_once()
    compute_no_unread_overflows()
    combine_whole_slices()
    if len(sys.argv) == 1:
        serve()
    else:
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
