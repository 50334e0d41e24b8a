"""Ranks that do next to nothing, and a leader of one: processes of a moment, since none of them imports torch."""

from __future__ import annotations

import sys
import time

from torchweave.distributed.launchers.local import WorkerPool
from torchweave.distributed.worker_group import Channel, LeaderConnection, MessageKind, WorkerGroup

WORKER_ENTRYPOINT = "tests.distributed.light:run_worker"


def run_worker(channel: Channel, task: str) -> None:
    """Echo what is sent as a digest until the end; `refuse`, `crash` and `hang` are other things to do."""
    leader = LeaderConnection(channel, rank_timeout=2.0)
    leader.report_joined()
    if task == "refuse":
        leader.report_failure("this cannot be; do that.", user_error=True)
        return
    if task == "crash":
        sys.exit(3)
    leader.report_built({"rank": 1})
    while (message := leader.messages.get())[0] != MessageKind.END:
        leader.answer(MessageKind.DIGEST, message[1])
        while task == "hang":  # as in a collective whose other rank is gone
            time.sleep(60)


if __name__ == "__main__":
    workers = WorkerPool(WORKER_ENTRYPOINT).assign(["hang"])
    worker_group = WorkerGroup(workers, rank_timeout=60.0)
    worker_group.wait_until_built()
    worker_group.send(MessageKind.STEP)
    worker_group.answers(MessageKind.DIGEST, 10.0)
    print(workers[0].name, flush=True)
    time.sleep(60)
