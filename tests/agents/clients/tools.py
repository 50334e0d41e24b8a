"""Tools that the clients of this folder give to the model."""

import subprocess
from pathlib import Path

PROMPT = "Replace hello in a.txt, then copy it to b.txt."


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: the file.
    """
    return Path(path).read_text(encoding="utf-8")


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file.

    Args:
        path: the file.
        old: the text.
        new: what stands there afterwards.
    """
    file = Path(path)
    file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    return "done"


def run_command(command: str) -> str:
    """Run a command in a shell.

    Args:
        command: the command.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout or "done"


TOOLS = (read_file, edit_file, run_command)
