"""The other ranks' processes, started before this one has imported torch: they import at the same time.

Nothing here imports more than a config does.
"""

from __future__ import annotations

import os

from torchweave.config import EngineConfig
from torchweave.distributed.local import WaitingRanks
from torchweave.plan.check import check_names, check_numbers

WORK = "torchweave.engine.worker:work"


def waiting_ranks(config: EngineConfig) -> WaitingRanks:
    """The local ranks of an engine, for `open_engine`; none where others start them, or where there is no processor for each.

    Raises:
        ValueError: an option cannot be, whatever the device and the model are; nothing is started then.
    """
    check_names(config, None)
    check_numbers(config)
    others = config.num_ranks - 1 if config.executor == "local" else 0
    return WaitingRanks(WORK, others if others < (os.cpu_count() or 1) else 0)
