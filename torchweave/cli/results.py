"""Output files of commands: validated before long work starts."""

from __future__ import annotations

import os
from pathlib import Path

from torchweave.config.options import expand_path


def check_output_path(option: str, requested: str | Path) -> Path:
    """The absolute path of an output file; missing folders are not created.

    Raises:
        ValueError: the file cannot be written there.
    """
    path = expand_path(requested).absolute()
    try:
        if path.is_dir():
            raise ValueError(f"{option} {requested}: this is a folder; name a file in it")
        nearest = next(each for each in path.parents if each.exists())
    except OSError as error:  # e.g. the name is too long
        raise ValueError(f"{option} {requested}: {error.strerror}; name another file") from None
    if not nearest.is_dir():
        raise ValueError(f"{option} {requested}: {nearest} is not a folder; name another file")
    if not os.access(path if path.exists() else nearest, os.W_OK):
        raise ValueError(
            f"{option} {requested}: {path if path.exists() else nearest} cannot be written; name another file"
        )
    return path


def write_output(option: str, path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}; name another file") from error
