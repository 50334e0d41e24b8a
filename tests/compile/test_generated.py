"""Generated code is kept with the imports that it uses, and does what it did."""

from __future__ import annotations

import torch

from torchweave.compile.generated import lean

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


def test_imports_that_are_not_used_are_left_out_and_lines_stay_where_they_are() -> None:
    before, after = CODE.replace("{call}", "pass").splitlines(), lean(CODE.replace("{call}", "pass")).splitlines()
    gone = [line for line, now in zip(before, after, strict=True) if line != now]
    assert gone == [before[3], before[4], before[8]], (
        "hooks, maybe_profile and extern_kernels; what has two lines stays"
    )


def test_extern_kernels_that_are_torchs_functions_are_taken_from_torch() -> None:
    code = lean(CODE.replace("{call}", "extern_kernels.mm(args[0], args[1], out=args[2])"))
    assert "select_algorithm" not in code
    scope: dict[str, object] = {}
    exec(next(line for line in code.splitlines() if "extern_kernels =" in line), {"torch": torch}, scope)
    assert scope["extern_kernels"].mm is torch.mm  # type: ignore[attr-defined]


def test_other_extern_kernels_are_imported_from_inductor() -> None:
    imported = "from torch._inductor.select_algorithm import extern_kernels\n"
    for call in ("extern_kernels.bias_addmm(*args)", "extern_kernels.mm(bias_addmm(*args))", "f(extern_kernels)"):
        other = call.replace("mm(bias", "mm(extern_kernels.bias")
        assert imported in lean(CODE.replace("{call}", other))
