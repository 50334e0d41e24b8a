"""Ranks that do next to nothing, and a leader of one: processes of a moment, since none of them imports torch."""

from __future__ import annotations

import sys
import time

from torchweave.distributed import channel
from torchweave.distributed.channel import Link
from torchweave.distributed.launchers.local import WaitingRanks
from torchweave.distributed.leader_connection import Follower
from torchweave.distributed.worker_group import Crew

WORK = "tests.distributed.light:work"


def work(link: Link, task: str) -> None:
    """Echo what is sent as a digest until the end; `refuse`, `crash` and `hang` are other things to do."""
    follower = Follower(link, rank_timeout=2.0)
    follower.joined()
    if task == "refuse":
        follower.failed("this cannot be; do that.", asked=True)
        return
    if task == "crash":
        sys.exit(3)
    follower.built({"rank": 1})
    while (message := follower.messages.get())[0] != channel.END:
        follower.digest(message[1])
        while task == "hang":  # as in a collective whose other rank is gone
            time.sleep(60)


if __name__ == "__main__":
    members = WaitingRanks(WORK).give(["hang"])
    crew = Crew(members, rank_timeout=60.0)
    crew.wait_until_built()
    crew.send(channel.STEP)
    crew.digests(10.0)
    print(members[0].name, flush=True)
    time.sleep(60)
