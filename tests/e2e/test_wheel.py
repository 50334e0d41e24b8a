"""The wheel of `python -m build` generates outside the checkout: it contains every file that the package reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import torchweave

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_wheel_installs_and_generates(tmp_path: Path) -> None:
    """Dependencies come from this environment by a .pth file; torchweave itself comes from the wheel alone."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "results"))
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), cwd=source)
    (wheel,) = tmp_path.glob("torchweave-*.whl")
    assert wheel.name.startswith(f"torchweave-{torchweave.__version__}-")

    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    _run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(packages),
        str(wheel),
        cwd=tmp_path,
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    # Commands of one process, since imports take 5 s of CPU time in each.
    code = """
import torchweave
from importlib.resources import files
from torchweave.cli.main import main
print(torchweave.__file__)
print(files("torchweave.serving.http").joinpath("page.html").is_file(), flush=True)
main(["generate", "demo", "12+30=", "-O0"])
main(["explain", "demo", "--html", "report.html", "-cc.enable_inductor=false"])
"""
    where, has_page, said = _run(str(python), "-c", code, cwd=tmp_path).split("\n", 2)
    assert Path(where).is_relative_to(folder) and has_page == "True"
    assert "42" in said
    assert "<html" in (tmp_path / "report.html").read_text()
