"""The dump folder: every artifact as a file, every event as a line of `timeline.jsonl`.

timeline.jsonl                    every event, in order: {"at": seconds, "event": its kind, facts}
dynamo/transformed_code.txt       the bytecode that Dynamo made of the forward
passes/NN-NAME/{before,after}.py  the graph around each pass
pieces/DIGEST/{fx,inductor}.py    each distinct piece, and what Inductor generated for it
explain.json, report.html         everything that was decided, once all is built
"""

from __future__ import annotations

import dis
import io
import json
import shutil
from pathlib import Path
from types import CodeType
from typing import Any

from torch import fx

from torchweave.config import TorchCompileConfig
from torchweave.log import Report

TIMELINE = "timeline.jsonl"
_FOLDERS = ("dynamo", "passes", "pieces")


def open_dump(config: TorchCompileConfig, report: Report) -> Path | None:
    """Let everything that `report` is told from now on be written to the folder that a config asks for.

    What an earlier dump left there is taken away first; other files stay.

    Raises:
        ValueError: the folder cannot be made or written.
    """
    if config.dump_dir is None:
        return None
    folder = Path(config.dump_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / TIMELINE).exists():
            for name in _FOLDERS:
                shutil.rmtree(folder / name, ignore_errors=True)
        (folder / TIMELINE).write_text("", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"dump_dir={config.dump_dir} cannot be written: {error.strerror}; name another folder"
        ) from None

    def keep(name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def tell(kind: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"at": round(report.seconds(), 6), "event": kind, **facts}, default=str)
        with (folder / TIMELINE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    report.keep(keep)
    report.listen(tell)
    return folder


def graph_text(module: fx.GraphModule) -> str:
    """A graph as annotated Python: each value with its dtype, shape and strides, each line of the model above what it made."""
    return module.print_readable(print_output=False, include_stride=True, include_device=True)


def bytecode_text(code: CodeType) -> str:
    """A code object and those within it, disassembled."""
    text = io.StringIO()
    dis.dis(code, file=text)
    return text.getvalue()
