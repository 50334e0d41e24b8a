"""C++ functions over tensors, built at run time by Inductor's C++ code cache."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from importlib import resources

NO_COMPILER = "no C++ compiler (g++ or clang++) was found"


def has_compiler() -> bool:
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


@functools.cache
def attention(head_dim: int, value_dim: int, group: int, cache: int) -> Callable[..., None]:
    """`kernel` of attention_cpu.cpp for layers of these sizes, cached on disk. `group` query heads share a key head; `cache` is
    CACHE in the C++ source: 0 float, 1 e4m3, 2 e5m2."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    sizes = {"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "GROUP": group, "CACHE": cache}
    source = "".join(f"constexpr long {name} = {size};\n" for name, size in sizes.items())
    source += resources.files("torchweave.ops.kernels").joinpath("attention_cpu.cpp").read_text(encoding="utf-8")

    class CodeCache(CppPythonBindingsCodeCache):
        @classmethod
        def _get_uncompiled_header(cls, device: str) -> None:
            """None: one kernel builds sooner without, and each process would run the preprocessor to look the header up."""

    return CodeCache.load_pybinding(_ATTENTION_ARGUMENTS, source)


_ATTENTION_ARGUMENTS = (
    *["const float*"] * 3, "float*", *["void*"] * 2, *["const float*"] * 2, *["const int32_t*"] * 2, "const int64_t*",
    "const int32_t*", *["int64_t"] * 15, *["float"] * 4,
)  # fmt: skip
