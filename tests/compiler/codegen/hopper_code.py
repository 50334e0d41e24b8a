"""Write Triton code by Inductor for an absent Hopper GPU: `python -m tests.compiler.codegen.hopper_code` prints it as JSON.

It needs a process of its own, since torch keeps what it finds out about devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchweave.compiler.codegen.row_reductions import MAX_ROW, keep_rows_in_registers

HOPPER = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


@contextmanager
def hopper() -> Iterator[None]:
    """Let Inductor find a Hopper GPU; no kernel is compiled or run."""
    from torch._dynamo.device_interface import CudaInterface

    def properties(*_: Any) -> SimpleNamespace:
        return HOPPER

    with ExitStack() as stack:
        for name, value in (
            ("torch.cuda.get_device_capability", lambda *_: (9, 0)),
            ("torch.cuda.is_available", lambda: True),
            ("torch.cuda.current_device", lambda: 0),
            ("torch.cuda.device_count", lambda: 1),
            ("torch.cuda.get_device_properties", properties),
            ("torch.utils._triton.has_triton", lambda *_: True),
            ("torch.utils._triton.triton_hash_with_backend", lambda: "hopper"),
        ):
            stack.enter_context(mock.patch(name, value))
        for kind in (CudaInterface, CudaInterface.Worker):
            stack.enter_context(mock.patch.object(kind, "get_device_properties", staticmethod(properties)))
        yield


def triton_code(function: Any, shape: tuple[int, int], in_registers: bool = True) -> str:
    """The code for a bfloat16 tensor of this shape."""
    fake_mode = FakeTensorMode()
    with fake_mode:
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        module = make_fx(function, decomposition_table=select_decomp_table())(x)
    graph = GraphLowering(module)
    choices = keep_rows_in_registers() if in_registers else nullcontext()
    with hopper(), choices, V.set_graph_handler(graph), V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        graph.run(x)
        code, _ = graph.codegen()
    return getattr(code, "value", code)


def layer_norm(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


CASES = {
    "rows of SigLIP": (layer_norm, (4096, 1152)),
    "the longest rows": (layer_norm, (4096, MAX_ROW)),
    "longer rows": (layer_norm, (4096, MAX_ROW + 1)),
    "a sum of columns": (lambda x: x.sum(0), (1152, 4096)),
    "a softmax of columns": (lambda x: x.float().softmax(0), (1152, 4096)),
}

if __name__ == "__main__":
    codes = {
        name: [triton_code(function, shape, in_registers) for in_registers in (False, True)]
        for name, (function, shape) in CASES.items()
    }
    print(json.dumps(codes))
