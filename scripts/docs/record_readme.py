"""Record docs/demo.svg, the terminal picture of the README, from a run of the built-in model.

python scripts/docs/record_readme.py [--output docs/demo.svg]
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "torchweave generate demo '12+30=' '907-48=' 'sort: pear fig apple'",
    "echo 'reverse: stone' | torchweave generate demo",
    "torchweave generate demo '12+30=' --max_modle_len 64",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the terminal of the README.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "demo.svg")
    path = parser.parse_args().output
    console = Console(record=True, width=100, force_terminal=True, file=sys.stderr)
    for command in COMMANDS:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        console.print(Text(run(command)), end="", soft_wrap=True)
        console.print()
    path.write_text(console.export_svg(title="torchweave", unique_id="torchweave"), encoding="utf-8")
    print(f"wrote {path}")


def run(command: str) -> str:
    """Output of a command, errors included, with this interpreter's torchweave."""
    script = command.replace("torchweave ", f"{shlex.quote(sys.executable)} -m torchweave.cli.main ", 1)
    done = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
