"""Kernels over symmetric memory without a GPU: results, compilation for Hopper, and that one barrier suffices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tests.ops.collectives.collective_cases import Mirror
from tests.ops.collectives.symmetric_cases import workspaces
from tests.ops.interpreted import run_interpreted
from torchweave.distributed.symmetric_memory import KernelSizeLimits, SymmetricCommunicator, size_limits_for
from torchweave.ops.collectives.all_reduce_norm import NormSpec, QuantSpec, empty_norm_output
from torchweave.ops.collectives.symmetric_memory import SIZES, kernels_can_run
from torchweave.ops.kernels.collectives.workspace import SymmetricLayout

RANGES = KernelSizeLimits(slots=4096, gather=8192, one_shot=16384, norm=8192, two_shot=65536)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted("tests.ops.collectives.interpreted_symmetric")


def launches(size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Every kernel as it is launched on Hopper for rank 1 of `size`."""
    from tests.ops.cross_compile import recorded
    from torchweave.ops.kernels.collectives import all_reduce as symmetric_reduce
    from torchweave.ops.kernels.collectives import all_reduce_norm as symmetric_norm

    for module in (symmetric_norm, symmetric_reduce):
        monkeypatch.setattr(module, "supports_pdl", lambda device: True)
    space = workspaces(SymmetricLayout(size, 1 << 20, 1 << 22))[1]
    x = torch.empty(8, 4096, dtype=torch.bfloat16)
    with recorded(symmetric_reduce, "one_shot_kernel", "two_shot_kernel", "gather_kernel") as found:
        for place in (space.locate_operand(x), space.locate_in_data(x)):
            symmetric_reduce.launch_one_shot(space, x, x, place)
        symmetric_reduce.launch_two_shot(space, x, x, space.locate_in_data(x))
        words = torch.empty(64128, dtype=torch.int32)
        symmetric_reduce.launch_gather(space, words, words, 16032)
        words = torch.empty(641280, dtype=torch.int32)
        symmetric_reduce.launch_gather(space, words, words, 16032)
    yield from found
    with recorded(symmetric_norm, "one_shot_norm_kernel") as found:
        for quant in (None, QuantSpec("fp8", 0), QuantSpec("fp8", 128), QuantSpec("fp4", scale=torch.empty(1))):
            norm = NormSpec(x, x[0], 1e-5, quant=quant, keep_norm=quant is None)
            for place in (space.locate_operand(x), space.locate_in_data(x)):
                symmetric_norm.launch_one_shot_norm(space, x, norm, empty_norm_output(x, norm), place)
    yield from found


@pytest.mark.parametrize("size", SIZES)
def test_kernels_build_for_hopper(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.ops.cross_compile import compile_for_hopper

    cases = list(launches(size, monkeypatch))[: None if size == 2 else 7]
    assert cases
    for launch in cases:
        ptx = compile_for_hopper(launch).asm["ptx"]
        meetings = 2 if "two_shot" in launch.kernel.fn.__name__ else launch.kwargs.get("NUM_BARRIERS", 1)
        assert ptx.count("st.release.sys") == ptx.count("ld.acquire.sys") == meetings
        assert ptx.count("bar.sync") >= 2 * meetings
        assert len(re.findall(r"ld\.global\S*v4", ptx)) >= size + 1, "operands must be read 16 bytes at a time"
        assert "multimem" not in ptx
        # Addresses are known before the wait for the kernel before, so that nothing but data is read after the meeting.
        assert meetings == 2 or ptx.index("griddepcontrol.wait") > ptx.rindex("ld.global.b64")


DATA = 9
"""A slot like those of collectives with two barriers."""


def interleavings(places: tuple[int, ...]) -> Iterator[list[tuple[int, int, int]]]:
    """What reads can see, over all orders in which two ranks can carry out one-shot collectives over these places.

    A rank writes the place, signals, waits for the other's signal, reads the other's place; over `DATA` it signals and waits again;
    then comes the next one. Yields for each order of steps the reads that went wrong: (collective, what should be there, what is).
    """
    steps: list[tuple[int, str, int]] = []  # collective, what, signals that this step has sent or needs
    sent = 0
    for number, place in enumerate(places):
        steps += [(number, "write", sent), (number, "signal", sent + 1), (number, "read", sent + 1)]
        sent += 1
        if place == DATA:
            steps += [(number, "signal", sent + 1), (number, "leave", sent + 1)]
            sent += 1
    seen = set()
    stack = [((0, 0), (0, 0), ((-1,) * (DATA + 1),) * 2, ())]
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        at, signals, memory, reads = state
        if at == (len(steps), len(steps)):
            yield list(reads)
        for rank in (0, 1):
            if at[rank] == len(steps):
                continue
            number, step, count = steps[at[rank]]
            new_signals, new_memory, new_reads = list(signals), [list(slot) for slot in memory], reads
            if step == "write":
                new_memory[rank][places[number]] = number
            elif step == "signal":
                new_signals[rank] = count
            elif signals[1 - rank] < count:
                continue  # still waits
            elif step == "read" and memory[1 - rank][places[number]] != number:
                new_reads = (*reads, (number, number, memory[1 - rank][places[number]]))
            new_at = tuple(each + (index == rank) for index, each in enumerate(at))
            stack.append((new_at, tuple(new_signals), tuple(map(tuple, new_memory)), new_reads))


@pytest.mark.parametrize(
    "places",
    [(0, 1, 0, 1, 0), (0, 2, 1, 0, 2, 1), (0, 1, 2, 1, 0), (DATA, DATA, DATA), (0, DATA, 0, DATA), (0, 1, DATA, 1)],
)
def test_one_barrier_is_enough_when_consecutive_collectives_use_different_slots(places: tuple[int, ...]) -> None:
    orders = list(interleavings(places))
    assert orders and all(not wrong for wrong in orders)


def test_one_barrier_is_not_enough_for_one_slot() -> None:
    assert any(wrong for wrong in interleavings((0, 0))), "a rank overwrites what the other still reads"
    assert any(wrong for wrong in interleavings((0, 1, 1, 0)))


def communicator(rank: int = 0) -> SymmetricCommunicator:
    space = workspaces(SymmetricLayout(2, 4096, 65536))[rank]
    return SymmetricCommunicator(space, Mirror(2, rank), RANGES, torch.zeros(1, dtype=torch.int32))


def test_operand_size_selects_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchweave.distributed import symmetric_memory as symmetric

    monkeypatch.setattr(symmetric, "gather", lambda workspace, x, dim: "gather")
    for name in ("one_shot", "two_shot"):
        monkeypatch.setattr(symmetric, name, lambda workspace, x, name=name: name)
    monkeypatch.setattr(symmetric, "one_shot_norm", lambda workspace, x, norm: "norm")
    ranks = communicator()
    picked = [ranks.all_reduce(torch.zeros(rows, 512, dtype=torch.bfloat16)) for rows in (1, 4, 5, 64)]
    assert picked == ["one_shot", "one_shot", "one_shot", "two_shot"]
    odd = (torch.ones(65, 512, dtype=torch.bfloat16), torch.ones(3, 9), torch.ones(8, 8).t(), torch.ones(2, 8).double())
    for x in odd:
        assert torch.equal(ranks.all_reduce(x), 2 * x), "torch.distributed carries what the kernels do not"
    gathered = [ranks.all_gather(torch.zeros(rows, 512, dtype=torch.uint8), dim) for rows, dim in ((8, 1), (16, 0))]
    assert gathered == ["gather", "gather"]
    for shape, dim in (((17, 512), 0), ((8, 24), 1)):
        assert ranks.all_gather(torch.zeros(shape, dtype=torch.uint8), dim).shape[dim] == 2 * shape[dim]
    norm = NormSpec(None, None, 1e-5)
    assert ranks.fused_all_reduce_norm(torch.zeros(8, 512, dtype=torch.bfloat16), norm) == "norm"
    assert ranks.fused_all_reduce_norm(torch.zeros(9, 512, dtype=torch.bfloat16), norm) is None


def test_user_buffers_are_not_copied() -> None:
    ranks = communicator()
    space = ranks.workspace
    for slot, rows in product(range(3), (1, 4)):
        x = ranks.buffer((1, rows, 512), torch.bfloat16, slot)
        assert x is not None and kernels_can_run(x) and x.shape == (1, rows, 512)
        place = space.locate_operand(x)
        assert not place.staged and place.at == space.slot(slot)
    large = ranks.buffer((64, 512), torch.bfloat16, 0)
    assert large is not None and not space.locate_in_data(large).staged
    assert space.locate_operand(large) == space.locate_in_data(large), (
        "what neighbors share is left only when all have met again"
    )
    assert ranks.buffer((65, 512), torch.bfloat16, 0) is None, "torch.distributed reads any memory"
    assert ranks.buffer((3, 9), torch.float32, 0) is None
    ordinary = torch.zeros(4, 512, dtype=torch.bfloat16)
    assert space.locate_operand(ordinary).staged and space.locate_in_data(ordinary).staged
    assert space.locate_operand(torch.zeros(5, 512, dtype=torch.bfloat16)).channel == 1, "it fits into no slot"
    places = {space.layout.slot(index) for index in range(5)}
    assert len(places) == 5 and max(places) + 4096 <= space.layout.data < space.layout.sums < space.layout.bytes


def test_a_barrier_timeout_is_reported() -> None:
    status = torch.zeros(1, dtype=torch.int32)
    ranks = SymmetricCommunicator(workspaces(SymmetricLayout(2, 4096, 0))[1], Mirror(2, 1), RANGES, status)
    assert ranks.fault() is None
    status[0] = 1  # as a kernel writes it
    assert "gave up" in (ranks.fault() or "")
    ranks.abort()
    assert int(status[0]) == 2 and ranks.fault() == "a rank died"


def test_default_ranges_for_unmeasured_gpus() -> None:
    found = size_limits_for("some GPU", 4)
    assert found is not None and found.measured == "" and size_limits_for("some GPU", 3) is None
