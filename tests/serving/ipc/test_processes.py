"""Server processes: own process group, default signal handling in children, nothing left behind."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tests.serving.ipc.children import end_a_child, fail_behind, stand_apart
from tests.serving.running import serving, wait_until
from torchweave.config.options import EngineConfig
from torchweave.serving.engine_client import engine_supervisor as own_engine
from torchweave.serving.ipc import messages, processes
from torchweave.serving.ipc.processes import spawn


@pytest.mark.parametrize("number", [1, 2])
def test_children_of_server_processes_can_be_terminated(number: int) -> None:
    """The first process of all was started otherwise than later ones, which hung here."""
    process = spawn(end_a_child, name=f"tw-test-{number}")
    assert process.exit_text(60) == "exit code 0"


def test_a_failing_critical_task_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    process = spawn(fail_behind, name="tw-test")
    assert process.exit_text(30) == "exit code 1"
    assert "RuntimeError: nobody awaits this" in capfd.readouterr().err


def test_terminal_signals_do_not_end_server_processes() -> None:
    process = spawn(stand_apart, os.getpgid(0), name="tw-test")
    assert process.exit_text(60) == "exit code 0"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "nor does the mask stay here"


def meeting_places(pid: int) -> set[Path]:
    """Folders of the Unix sockets that a process has bound."""
    own = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    bound = (Path(line[7]) for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in own)
    return {path.parent for path in bound if path.is_absolute()}


def test_sockets_of_a_killed_server_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a temporary folder whose path is longer than that of a socket may be: they are in /tmp."""
    built = os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", built
    )  # with the C++ kernel of attention, which takes seconds to build
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("deeper-than-the-path-of-a-socket-may-be-" * 3)))
    Path(os.environ["TMPDIR"]).mkdir()
    with serving("--api_server_count", "3") as running:
        pids = [*running.pids("tw-http-"), running.engine_pid()]
        places = meeting_places(running.process.pid)
        assert len(places) == 2 and {place.parent for place in places} == {Path("/tmp")}
        assert all(place.stat().st_mode & 0o77 == 0 for place in places), "nobody else can enter them"
        assert running.client().completions.create(model="demo", prompt="1+1=", max_tokens=1).choices
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert not any(place.exists() for place in places)


@pytest.mark.parametrize(("surplus", "used"), [(0, True), (1, False)])
def test_sockets_are_in_the_temporary_folder_as_far_as_paths_go(
    surplus: int, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_MAX_TMP_DIR_BYTES", len(os.fsencode(tmp_path)) - surplus)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = Path(processes.make_socket_dir())
    try:
        assert place.parent == (tmp_path if used else Path("/tmp")) and place.stat().st_mode & 0o77 == 0
    finally:
        place.rmdir()


def test_an_engine_ends_with_its_server_while_it_still_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It looks out before it does anything else: imports take up to a quarter of a minute on a slow machine."""

    def gone(cleanup: Callable[[], object]) -> None:
        cleanup()
        raise SystemExit

    monkeypatch.setattr(own_engine, "exit_with_parent", gone)
    monkeypatch.setattr(own_engine, "prestart_workers", lambda *_: pytest.fail("ranks were started first"))
    with pytest.raises(SystemExit):
        own_engine._run_engine(EngineConfig(model="demo"), messages.Addresses(str(tmp_path)), messages.ReplicaInfo())
    assert not tmp_path.exists()
