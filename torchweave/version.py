"""The package's version, folder and sources, for modules that must not import the public names."""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

__version__ = "0.2.0"
PACKAGE_FOLDER = Path(__file__).resolve().parent
HASHED_FOLDERS = ("compiler", "models", "ops")
"""Folders whose sources determine what is captured, built and stored."""
_SOURCE_SUFFIXES = (".py", ".json", ".cpp")


@functools.cache
def package_source_hash() -> str:
    """Hash of every source file in `HASHED_FOLDERS`: an entry is invalid once the code that made it changes.

    Raises:
        FileNotFoundError: a folder is missing or empty: the installation is incomplete.
    """
    return hash_folders([PACKAGE_FOLDER / folder for folder in HASHED_FOLDERS])


def hash_folders(folders: Iterable[Path]) -> str:
    """Hash of the names and contents of all source files below the folders.

    Raises:
        FileNotFoundError: a folder holds no source file.
    """
    digest = hashlib.sha256()
    for folder in folders:
        paths = sorted(path for path in folder.rglob("*") if path.suffix in _SOURCE_SUFFIXES)
        if not paths:
            raise FileNotFoundError(f"{folder} holds no source files; reinstall torchweave")
        for path in paths:
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
