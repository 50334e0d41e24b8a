"""Ranks started by torchrun or Ray, and the rendezvous that connects them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest

from tests.distributed.two_ranks import GREEDY, OPTIONS, agreed
from torchweave.distributed.rendezvous import RendezvousServer, connect_to_rendezvous
from torchweave.engine.llm import LLM
from torchweave.engine.request import SamplingParams

LIMIT = 60.0


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What one rank draws."""
    with LLM("demo", **(OPTIONS | {"tensor_parallel_size": 1})) as llm:
        return list(llm.generate("1+1=", GREEDY)[0].outputs[0].token_ids)


@pytest.mark.whole
def test_torchrun_runs_one_script_on_two_ranks(expected: list[int]):
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"rank (\d) drew (.*), agreed (\w+)", run.stdout) == [("0", str(expected), "True")]


def test_torchrun_executor_outside_torchrun_is_an_error(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"torchrun did not start this process; run `torchrun --nproc-per-node 2"):
        LLM("demo", executor="torchrun", **OPTIONS)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun started 4 processes, but tensor_parallel_size=2 needs 2"):
        LLM("demo", executor="torchrun", **OPTIONS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine alone."""
    ray = pytest.importorskip("ray")
    before = dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.whole
def test_ray_starts_ranks_and_a_killed_actor_ends_all(cluster: None, expected: list[int]):
    with LLM("demo", executor="ray", **OPTIONS) as llm:
        assert list(llm.generate("1+1=", GREEDY)[0].outputs[0].token_ids) == expected
        assert agreed(llm, steps=8)
        (event,) = llm.report.select("rank")
        stream = llm.stream("Once upon", SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True))
        next(stream)
        begin = time.monotonic()
        os.kill(event["process"], 9)
        with pytest.raises(RuntimeError, match=rf"Rank 1 \(process {event['process']} on .*\) has ended unexpectedly"):
            list(stream)
        while Path(f"/proc/{event['process']}").exists() and time.monotonic() - begin < LIMIT:
            time.sleep(0.02)
        assert time.monotonic() - begin < LIMIT


@pytest.mark.whole
def test_ray_cluster_without_resources_is_an_error(cluster: None):
    with pytest.raises(ValueError, match=r"no room for 4 ranks with a CPU each.* \(it has 2 CPUs and 0 GPUs\)"):
        LLM("demo", executor="ray", **(OPTIONS | {"tensor_parallel_size": 4}))


def test_connection_without_the_secret_is_refused():
    server = RendezvousServer("127.0.0.1")
    channels = {}
    waiting = threading.Thread(target=lambda: channels.update(server.accept_ranks({1}, LIMIT, lambda: None)))
    waiting.start()
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        connect_to_rendezvous(server.address, b"not the key", 1)
    channel = connect_to_rendezvous(server.address, server.key, 1)
    waiting.join()
    channel.send(b"x", b"hello")
    (ours, process_name) = channels[1]
    assert ours.receive() == (b"x", b"hello") and str(os.getpid()) in process_name


def test_missing_rank_is_named_after_the_timeout():
    with pytest.raises(TimeoutError, match="rank 2 did not connect"):
        RendezvousServer("127.0.0.1").accept_ranks({2}, 0.1, lambda: None)
