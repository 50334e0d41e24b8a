"""Compile the kernels of a launch for an absent GPU, from the arguments of the launch."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Launch:
    """A kernel with the grid and the arguments that it was launched with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    kwargs: dict[str, Any]


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append(Launch(self.kernel, grid, args, kwargs))


@contextmanager
def recorded(module: ModuleType, *names: str) -> Iterator[list[Launch]]:
    """Launches of the named kernels of `module` are recorded and not executed."""
    launches: list[Launch] = []
    kernels = {name: getattr(module, name) for name in names}
    for name, kernel in kernels.items():
        setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


def compile_for_hopper(launch: Launch) -> Any:
    """Triton's compiled kernel of `launch` for sm_90, specialized as Triton would specialize it there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernel = launch.kernel
    parameters = list(inspect.signature(kernel.fn).parameters)
    options = {name: value for name, value in launch.kwargs.items() if name not in parameters}
    values = dict(zip(parameters, launch.args, strict=False)) | {
        name: value for name, value in launch.kwargs.items() if name in parameters
    }
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if special and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    early = products_that_lose_registers(compiled.asm["ttgir"])
    assert not early, f"registers of products in flight are written: {early}"
    return compiled


def spilled_bytes(compiled: Any, folder: Path) -> int:
    """Bytes of registers that the assembler stores to memory; `folder` is a temporary one."""
    from triton import knobs

    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return sum(int(stored) for stored in re.findall(r"(\d+) bytes spill stores", told))


def products_that_lose_registers(ttgir: str) -> list[str]:
    """Products of registers that are in flight when the next iteration writes the registers.

    Triton waits for the first of several products only (github.com/triton-lang/triton/issues/9433); then the kernel must wait
    in assembly before it computes the registers.
    """
    found = re.findall(r"(%\S+) = ttng\.warp_group_dot .* : tensor<[^>]*#ttg\.dot_op", ttgir)
    waits = re.findall(r"ttng\.warp_group_dot_wait (%\S+?),? .*pendings = (\d+)", ttgir)
    pending = {product for product, count in waits if int(count) > 0}
    return [] if "wgmma.wait_group.sync.aligned 0;" in ttgir else [product for product in found if product in pending]
