"""Pointers of Git LFS, which stand where a clone did not download the files themselves."""

from __future__ import annotations

from pathlib import Path

_START = b"version https://git-lfs"


def check_no_pointer(file: Path) -> None:
    """Raise `ValueError` for a pointer of Git LFS."""
    with file.open("rb") as content:
        if content.read(len(_START)) == _START:
            raise ValueError(
                f"{file} is a pointer of Git LFS and not the file itself; run `git lfs pull` in its folder, or download it again."
            )
