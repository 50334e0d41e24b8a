"""Record the pictures of the README and docs from runs of the built-in model.

    python scripts/docs/record_readme.py [demo.svg] [live.png] [report.png]

`demo.svg` is a terminal. The others are pages in Chromium: the live page of a server under load, which takes four minutes, and the
report of `torchweave explain`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.serving.http.browser import browsing
from tests.serving.running import serving

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "torchweave generate demo '12+30=' '907-48=' 'sort: pear fig apple'",
    "echo 'reverse: stone' | torchweave generate demo",
    "torchweave generate demo '12+30=' --max_modle_len 64",
)
SERVE = (
    "--device",
    "cpu",
    "--max_num_tokens",
    "256",
    "--cpu_kv_cache_gib",
    "0.02",
    "--port",
    "0",
    "--api_server_count",
    "1",
    "--quiet",
)
LOAD = (
    "bench serve --num_prompts 100000 --request_rate 5 --burstiness 0.7 --input_len 150 --output_len 90 --range_ratio 0.7 "
    "--prefix_len 32"
)
LOAD_SECONDS = 200
"""The charts show three minutes."""
WIDTH = 1120
SCALE = 1.5
"""Pixels of a picture for each of the page: GitHub shows pages' pictures at about 850 pixels, and screens have two for one."""


def main() -> None:
    pictures: dict[str, Callable[[Path], None]] = {"demo.svg": terminal, "live.png": live, "report.png": report}
    parser = argparse.ArgumentParser(description="Record the pictures of the README and docs.", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(pictures)}")
    for name in parser.parse_args().names or pictures:
        path = ROOT / "docs" / "images" / name
        pictures[name](path)
        print(f"wrote {path}")


def terminal(path: Path) -> None:
    console = Console(record=True, width=100, force_terminal=True, file=sys.stderr)
    for command in COMMANDS:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        console.print(Text(run(command)), end="", soft_wrap=True)
        console.print()
    path.write_text(console.export_svg(title="torchweave", unique_id="torchweave"), encoding="utf-8")


def run(command: str) -> str:
    """Output of a command, errors included, with this interpreter's torchweave."""
    script = command.replace("torchweave ", f"{shlex.quote(sys.executable)} -m torchweave.cli.main ", 1)
    done = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    return done.stdout + done.stderr


def live(path: Path) -> None:
    with serving(quick=SERVE) as server, browsing() as page:
        page.go(server.url, WIDTH)
        load = [sys.executable, "-m", "torchweave.cli.main", *LOAD.split(), "--base_url", server.url, "--quiet"]
        load_process = subprocess.Popen(load, stdout=subprocess.DEVNULL)
        try:
            time.sleep(LOAD_SECONDS)
            page.run("document.getElementById('prompt').value = 'sort: pear fig apple'; 0")
            page.run("document.getElementById('ask').requestSubmit()")
            page.until("document.getElementById('answered').textContent !== ''")
            time.sleep(1)  # until the next poll
            page.screenshot(path, scale=SCALE)
        finally:
            load_process.kill()
            load_process.wait()


def report(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browsing() as page:
        html = Path(folder) / "report.html"
        command = [
            sys.executable,
            "-m",
            "torchweave.cli.main",
            "explain",
            "demo",
            "--device",
            "cpu",
            "--html",
            str(html),
        ]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        page.go(html.as_uri(), WIDTH)
        page.screenshot(path, height=1150, scale=SCALE)


if __name__ == "__main__":
    main()
