"""Process groups of several ranks: which ranks each group holds."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from torchweave.distributed.process_groups import (
    PipelineTransport,
    ProcessGroups,
    abort_groups,
    create_rendezvous_store,
    init_process_groups,
    join_rendezvous_store,
)


def _look(process_groups: ProcessGroups) -> tuple:
    sums = {}
    for name, group in process_groups.groups.items():
        total = torch.tensor([2.0**process_groups.rank])
        dist.all_reduce(total, group=group)
        sums[name] = int(total)
    with pytest.raises(ValueError, match="already"):
        init_process_groups(0, 1, 1, "cpu", dist.HashStore())
    return (
        process_groups.rank,
        process_groups.tensor_rank,
        process_groups.stage,
        sums,
        process_groups.all_reduce_min(10 - process_groups.rank),
    )


def test_tensor_groups_are_neighbours_and_pipelines_cross_them():
    found = run_ranks(_look, 4, pipeline_parallel_size=2)
    assert found == [
        (0, 0, 1, {"tp": 0b0011, "pp": 0b0101, "pp_previous": 0b0101}, 7),
        (1, 1, 1, {"tp": 0b0011, "pp": 0b1010, "pp_previous": 0b1010}, 7),
        (2, 0, 0, {"tp": 0b1100, "pp": 0b0101, "pp_next": 0b0101}, 7),
        (3, 1, 0, {"tp": 0b1100, "pp": 0b1010, "pp_next": 0b1010}, 7),
    ]


def test_single_rank_groups_are_not_created():
    assert [set(sums) for _, _, _, sums, _ in run_ranks(_look, 2)] == [{"tp"}] * 2
    assert [set(sums) for _, _, _, sums, _ in run_ranks(_look, 2, pipeline_parallel_size=2)] == [
        {"pp", "pp_previous"},
        {"pp", "pp_next"},
    ]


class _Group:
    """NCCL groups with a kernel that ends on abort; aborting one group waits for all kernels of the GPU."""

    def __init__(self, running: list[threading.Event]) -> None:
        self.over = threading.Event()
        self.running = running
        running.append(self.over)

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.over.set()
        assert all(over.wait(5) for over in self.running), "another group's kernel still waits for who is gone"
        self.running.append(self.over)


def test_groups_are_aborted_together():
    running: list[threading.Event] = []
    groups = {name: _Group(running) for name in ("tp", "pp", "pp_previous")}
    begin = time.monotonic()
    abort_groups(ProcessGroups(size=4, groups=groups))
    assert time.monotonic() - begin < 4
    assert len(running) == 6, "each was aborted once, to its end"


def _hand_over(process_groups: ProcessGroups) -> tuple[list[float], list[int]]:
    pipeline = PipelineTransport(process_groups)
    x = torch.zeros(2, 2) if pipeline.is_first else pipeline.receive((2, 2), torch.float32)
    x = x.t() + 10**process_groups.stage  # of other strides than those that are sent
    if not pipeline.is_last:
        pipeline.send(x)
    drawn = torch.tensor([process_groups.stage, 7], dtype=torch.int32)
    if pipeline.is_last:
        pipeline.send_tokens(drawn).wait()
    else:
        pipeline.receive_tokens(drawn)
    return x.flatten().tolist(), drawn.tolist()


def test_pipeline_send_and_receive_between_stages():
    found = run_ranks(_hand_over, 3, pipeline_parallel_size=3)
    assert [x for x, _ in found] == [[111.0] * 4, [11.0] * 4, [1.0] * 4], "rank 0 has the last stage"
    assert [drawn for _, drawn in found] == [[2, 7]] * 3


def _fail(process_groups: ProcessGroups) -> None:
    if process_groups.rank == 1:
        raise RuntimeError("rank 1 had enough")


def test_exception_of_a_rank_is_raised_by_the_caller():
    with pytest.raises(AssertionError, match="rank 1 had enough"):
        run_ranks(_fail, 2)


def test_single_rank_collectives_do_nothing():
    process_groups = ProcessGroups.single_rank()
    assert (process_groups.rank, process_groups.size, process_groups.all_reduce_min(3)) == (0, 1, 3)
    process_groups.barrier()


def test_joining_process_groups_imports_nothing():
    """A thread imports Inductor meanwhile: two that import modules which import each other might see half of one."""
    code = """
import sys
import torchweave.engine.startup.rank_worker
from torchweave.distributed.process_groups import destroy_process_groups, init_process_groups, join_rendezvous_store
from torchweave.distributed.process_groups import create_rendezvous_store
store, address = create_rendezvous_store("127.0.0.1")
before = set(sys.modules)
destroy_process_groups(init_process_groups(0, 1, 1, "cpu", join_rendezvous_store(address)))
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_the_store_listens_at_its_address_only_and_needs_a_secret() -> None:
    store, address = create_rendezvous_store("127.0.0.1")
    listening = f":{address.port:04X}"
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[1].endswith(listening) and row[3] == "0A"] == ["0100007F" + listening]
    store.set("address of rank 0", "here")
    assert join_rendezvous_store(address).get("address of rank 0") == b"here"
    foreign = join_rendezvous_store(address._replace(secret="guessed"))
    assert not foreign.check(["address of rank 0"])
