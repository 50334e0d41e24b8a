"""Load the adapters of the option `lora_modules` before the engine takes requests."""

from __future__ import annotations

import time

from torchweave.config.validate import lora_modules
from torchweave.engine.control.adapters import load_adapter
from torchweave.engine.control.errors import ControlError
from torchweave.engine.control.host import Host
from torchweave.engine.startup.build import Engine
from torchweave.report import Report

_POLL_SECONDS = 0.001


def load_listed_adapters(engine: Engine, report: Report) -> None:
    """Load them on all ranks.

    Raises:
        ValueError: one cannot be loaded.
    """
    folders = lora_modules(engine.plan.config)
    if not folders:
        return
    host = Host(engine.scheduler, lambda _: None, lambda: None, engine.call_ranks)  # no step is in flight
    with report.stage("loading adapters"):
        for name, folder in folders.items():
            try:
                for _ in load_adapter(host, name, folder, engine.plan.config.max_lora_rank):
                    time.sleep(_POLL_SECONDS)
            except ControlError as error:
                raise ValueError(str(error)) from None
