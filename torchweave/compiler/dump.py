"""The dump folder: every artifact as a file, every event as a line of `timeline.jsonl`.

timeline.jsonl                    every event, in order: {"at": seconds, "event": its kind, facts}
computation_graph.py              the pieces and boundary ops in execution order, and each distinct piece with its shapes
transformed_code.py               the Python of a call: it passes tensors to the pieces and the boundary ops
dynamo/transformed_code.txt       the bytecode that Dynamo generated for the forward; not where the cache had the graph
passes/NN-NAME/{before,after}.py  the graph before and after each pass
pieces/DIGEST/{fx,inductor}.py    each distinct piece, and the code that Inductor generated for it
explain.json, report.html         all decisions, written once everything is built
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

from torchweave.config.options import TorchCompileConfig, expand_path
from torchweave.report import Report

TIMELINE = "timeline.jsonl"
_FOLDERS = ("dynamo", "passes", "pieces")


def open_dump(config: TorchCompileConfig, report: Report) -> Path | None:
    """Write all later events and artifacts of `report` to the config's dump folder; None when it names none.

    Files of an earlier dump are removed first; other files stay.

    Raises:
        ValueError: the folder cannot be created or written.
    """
    if config.dump_dir is None:
        return None
    folder = expand_path(config.dump_dir).absolute()
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

    dump = _DumpWriter(folder, report)
    report.keep(dump.keep)
    report.listen(dump.on_event)
    return folder


class _DumpWriter:
    """Writes events and artifacts until a write fails: a dump must not stop the compilation."""

    def __init__(self, folder: Path, report: Report) -> None:
        self._folder, self._report, self._disabled = folder, report, False

    def keep(self, name: str, text: str) -> None:
        self._write(self._folder / name, "w", text)

    def on_event(self, kind: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"at": round(self._report.seconds(), 6), "event": kind, **facts}, default=str)
        self._write(self._folder / TIMELINE, "a", line + "\n")

    def _write(self, path: Path, mode: str, text: str) -> None:
        if self._disabled:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._disabled = True
            why = f"stopped writing to {self._folder}: {error}"
            self._report.event("warning", what="dump_dir", why=why)


def graph_text(module: fx.GraphModule) -> str:
    """A graph as annotated Python: values with dtype, shape and strides, operations below their lines of the model."""
    return module.print_readable(print_output=False, include_stride=True, include_device=True)


def bytecode_text(code: CodeType) -> str:
    """The disassembly of a code object and of those nested in it."""
    text = io.StringIO()
    dis.dis(code, file=text)
    return text.getvalue()
