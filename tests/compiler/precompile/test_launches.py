"""Kernels of collectives are found before their first launch, without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.collectives.collective_cases import Mirror, mirrored
from tests.ops.collectives.symmetric_cases import workspaces
from tests.ops.hopper import Hopper, hopper
from torchweave.compiler.partition.split import Piece
from torchweave.compiler.passes.testing import T, graph_of
from torchweave.compiler.precompile.kernel_jobs import KernelSpec, kernel_specs
from torchweave.compiler.precompile.precompile import KernelPrecompiler, OpCall, linear_kernels, op_calls
from torchweave.distributed.symmetric_memory import (
    FakeCommunicator,
    KernelSizeLimits,
    SymmetricCommunicator,
    fake_collectives,
)
from torchweave.ops.collectives.op import find_communicator, register_communicator
from torchweave.ops.kernels.collectives.workspace import SymmetricLayout
from torchweave.ops.linear_config import LinearConfig

BF16, D, VOCAB = torch.bfloat16, 1024, 512
ROW = LinearConfig("row", 4, 1024, 4, 4)
RANGES = KernelSizeLimits(slots=64 * 1024, gather=64 * 1024, one_shot=256 * 1024, norm=128 * 1024, two_shot=1 << 20)
ops = torch.ops.torchweave


class Busy(FakeCommunicator):
    """A fake torch.distributed that fails on use."""

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("a collective waited for another rank")

    all_gather = all_reduce  # type: ignore[assignment]


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> Iterator[SymmetricCommunicator]:
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", Hopper())
    space = workspaces(SymmetricLayout(2, RANGES.slots, RANGES.large))[1]
    found = SymmetricCommunicator(space, Busy(1, 2), RANGES, torch.zeros(1, dtype=torch.int32))
    register_communicator("tp", found)
    yield found
    register_communicator("tp", None)


def layer(x: Tensor, w: Tensor, norm: Tensor, residual: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    first, h = ops.all_reduce_add_rms_norm(x, None, norm, 1e-5, 0.0, False, True, "tp")
    second, total = ops.buffered_all_reduce_add_rms_norm(
        "linear", [first, w], f"4={ROW}", BF16, 1, h + residual, norm, 1e-5, 0.0, False, True, "tp"
    )
    return ops.all_reduce(second, "tp"), total, ops.all_gather(second @ down, -1, "tp")


@pytest.fixture
def piece() -> Piece:
    x, residual = (torch.randn(1, T, D).to(BF16) for _ in range(2))
    others = [torch.randn(D, D), torch.rand(D), residual, torch.rand(D, VOCAB)]
    with mirrored():
        return graph_of(layer, [x, *(each.to(BF16) for each in others)])


def keys(found: list[KernelSpec]) -> set[tuple[str, str]]:
    return {(spec.name, spec.key) for spec in found}


def calls(tokens: int) -> list[Callable[[], object]]:
    """The calls of `layer` at a token count, as in a step."""
    x, norm = torch.empty(1, tokens, D, dtype=BF16), torch.empty(D, dtype=BF16)
    rest = (norm, 1e-5, 0.0, False, True)
    return [
        lambda: ops.all_reduce_add_rms_norm(x, None, *rest, "tp"),
        lambda: ops.buffered_all_reduce_add_rms_norm("copy", [x], "", BF16, 2, x, *rest, "tp"),
        lambda: ops.all_reduce(x, "tp"),
        lambda: ops.all_gather(torch.empty(1, tokens, VOCAB, dtype=BF16), -1, "tp"),
    ]


def test_all_kernels_of_a_step_are_found_without_communication(
    piece: Piece, communicator: SymmetricCommunicator
) -> None:
    found_calls = list(op_calls(piece))
    assert [call.op._schema.name.partition("::")[2] for call in found_calls] == [
        "all_reduce_add_rms_norm",
        "buffered_all_reduce_add_rms_norm",
        "all_reduce",
        "all_gather",
    ]
    found = keys(
        [spec for call in found_calls for spec in kernel_specs(lambda call=call: call.launch(torch.device("cpu")))]
    )
    names = [name for name, _ in found]
    assert set(names) == {"one_shot_kernel", "one_shot_norm_kernel", "two_shot_kernel", "gather_kernel"}
    assert names.count("one_shot_norm_kernel") >= 4, "with a residual and without one, in a slot and beyond"
    assert find_communicator("tp") is communicator
    for tokens in (1, 3, 8, 24, 40, 56, 96, 128, 200, 300, 512):
        with fake_collectives("tp"):
            wanted = [spec for call in calls(tokens) for spec in kernel_specs(call)]
        assert wanted and keys(wanted) <= found, f"at {tokens} tokens"


def block(x: Tensor, residual: Tensor, weight: Tensor, both: Tensor) -> tuple[Tensor, ...]:
    y, h = ops.add_rms_norm(x, residual, weight, 1e-5, 0.0, False)
    part = ops.rms_norm(both[..., :D], weight, 1e-5, 0.0, False)
    return y, h, part, ops.gated_activation(ops.linear(both[..., D:], weight.expand(D, D), None, ""), "silu")


def test_kernels_that_depend_on_operands_only_are_found() -> None:
    from torchweave.ops.kernels.activation import launch_gated
    from torchweave.ops.kernels.norm import launch_norm

    x, residual, both = torch.randn(1, T, D), torch.randn(1, T, D), torch.randn(1, T, 2 * D)
    found = list(op_calls(graph_of(block, [each.to(BF16) for each in (x, residual, torch.rand(D), both)])))
    names = ["add_rms_norm", "rms_norm", "gated_activation"]
    assert [call.op._schema.name for call in found] == [f"torchweave::{name}" for name in names], "no products"
    with hopper():
        seen = keys([spec for call in found for spec in kernel_specs(partial(call.launch, torch.device("cpu")))])
        assert {name for name, _ in seen} == {"norm_kernel", "gated_kernel"}
        for tokens in (1, 2, 3, 16, 17, 100, 1000, 4096):
            x, both = torch.empty(1, tokens, D, dtype=BF16), torch.empty(1, tokens, 2 * D, dtype=BF16)
            launches = [
                lambda x=x: launch_norm(x, x, x[0, 0], 1e-5, 0.0, False),
                lambda x=x, both=both: launch_norm(both[..., :D], None, x[0, 0], 1e-5, 0.0, False),
                lambda x=x: launch_gated(x[..., : D // 2], x[..., D // 2 :], "silu"),
            ]
            wanted = [spec for launch in launches for spec in kernel_specs(launch)]
            assert len(wanted) == 3 and keys(wanted) <= seen, f"at {tokens} tokens"


def test_torch_distributed_collectives_launch_no_triton_kernel(piece: Piece) -> None:
    (first, *_) = op_calls(piece)
    with mirrored() as group:
        first.launch(torch.device("cpu"))
        with fake_collectives(group) as has_kernels:
            assert not has_kernels and isinstance(find_communicator(group), Mirror)


def test_producers_of_operands_are_found(piece: Piece) -> None:
    found = [job for node in piece.module.graph.nodes for job in linear_kernels(node)]
    assert [(job.config, job.tokens, job.width, job.norm) for job in found] == [
        (ROW, each, D, False) for each in (1, 2, 4)
    ]


def test_kernels_are_built_once_and_loaded_without_a_launch(
    piece: Piece, communicator: SymmetricCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[KernelSpec] = []
    loaded: list[KernelSpec] = []

    class Workers:
        def __enter__(self) -> Workers:
            return self

        def __exit__(self, *_: object) -> None: ...

        def begin(self, wanted: list[KernelSpec]) -> None:
            begun.extend(wanted)

        def finish(self) -> list[str]:
            assert not loaded
            return []

    launch = OpCall.launch
    monkeypatch.setattr(OpCall, "launch", lambda self, device: launch(self, torch.device("cpu")))
    monkeypatch.setattr("torchweave.compiler.precompile.precompile.linear_kernels", lambda node: ())
    monkeypatch.setattr("torchweave.compiler.precompile.precompile.KernelWorkers", Workers)
    monkeypatch.setattr("torchweave.compiler.precompile.precompile.missing_kernels", lambda wanted: wanted)
    monkeypatch.setattr(KernelSpec, "load", lambda self: loaded.append(self))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with KernelPrecompiler(torch.device("cuda")) as ahead:
        ahead.submit_piece(piece)
        ahead.submit_piece(piece)
    assert len(begun) == len(keys(begun)) and keys(loaded) == keys(begun)
    assert "one_shot_norm_kernel" in {spec.name for spec in begun}
