"""Child processes: start a fresh Python interpreter, watch for its exit, and end it.

Interpreters are started as commands, not forked, so that no CUDA state is shared, and not by `multiprocessing`, which would run
the user's script again in each child: scripts without `if __name__ == "__main__"`, notebooks and interactive sessions work.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_BOOTSTRAP = (
    "import sys; sys.path[:], sys.pycache_prefix, sys.dont_write_bytecode = {imports!r}; "
    "from {module} import main; main({fd})"
)
_EXIT_WAIT_SECONDS = 2.0  # from the end of a process's connections to its exit status
_parent: socket.socket | None = None  # in a child: its end of the socket pair


class ChildProcess:
    """A Python process that calls `target(*args)`, with this process's `sys.path`, settings of bytecode (`bytecode_in`) and
    standard error, and without standard input.

    A socket pair connects both processes. It carries the target and its arguments, which therefore do not appear in `ps`, and
    each end becomes readable when the other process has ended: `fileno()` here, `exit_with_parent` in the child. The parent's end
    is closed with this object.

    Args:
        target: a function at the top level of a module; pickled by its name.
        args: picklable.
        name: shown by `ps` and `top`, at most 15 characters; Linux only.
        pass_fds: file descriptors of this process that the child inherits under the same numbers.
        new_group: put the child in a process group of its own, which Ctrl-C in the terminal does not reach.
        ignored_signals: signals that neither end nor interrupt the child, from its first instruction on. Processes that it
            starts handle them as usual.
        stdout: as for `subprocess.Popen`; None: this process's.
    """

    def __init__(
        self,
        target: Callable[..., object],
        *args: Any,
        name: str = "",
        pass_fds: Sequence[int] = (),
        new_group: bool = False,
        ignored_signals: Sequence[signal.Signals] = (),
        stdout: int | None = None,
    ) -> None:
        call = pickle.dumps((name, tuple(ignored_signals), target, args))
        self._socket, child_end = socket.socketpair()
        with child_end:
            imports = sys.path, sys.pycache_prefix, sys.dont_write_bytecode
            code = _BOOTSTRAP.format(imports=imports, module=__name__, fd=child_end.fileno())
            # Blocked until the child has installed its handlers; the child inherits the mask.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored_signals)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[child_end.fileno(), *pass_fds],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    process_group=0 if new_group else None,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._process.pid
        with contextlib.suppress(OSError):  # the child has ended already
            self._socket.sendall(len(call).to_bytes(8, "little") + call)

    def fileno(self) -> int:
        """File descriptor that becomes readable when the process, and every process that it has forked, has ended."""
        return self._socket.fileno()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exit_text(self, seconds: float = _EXIT_WAIT_SECONDS) -> str:
        """Return `exit code 3` or `killed by SIGKILL`; empty if the process still runs after `seconds`."""
        if not self.wait(seconds):
            return ""
        code = self._process.returncode
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` (None: without limit) for the process to end; return whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.is_alive()

    def terminate(self) -> None:
        """Send SIGTERM; returns at once."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; returns at once."""
        self._process.kill()

    def kill_and_wait(self) -> None:
        """Send SIGKILL and wait until the process is gone, which takes longer if it has GPU memory."""
        self.kill()
        self.wait()


def main(fd: int) -> None:
    """Run a child: receive the call from the parent and make it."""
    global _parent
    _parent = socket.socket(fileno=fd)
    _parent.set_inheritable(False)
    with _parent.makefile("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        call = stream.read(size)
    if not call or len(call) < size:  # the parent has ended
        os._exit(1)
    name, ignored_signals, target, args = pickle.loads(call)
    # A Python handler, unlike SIG_IGN and a mask, is not inherited by processes started from here.
    for number in ignored_signals:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored_signals)
    if name:
        with contextlib.suppress(OSError):  # no such file except on Linux
            Path("/proc/self/comm").write_text(name)
    target(*args)


def exit_with_parent(cleanup: Callable[[], object] | None = None) -> None:
    """End this child process with exit code 1 as soon as its parent has ended, however that happened. Starts a thread.

    Args:
        cleanup: called first.
    """
    parent = _parent
    assert parent is not None, "not a ChildProcess"

    def wait() -> None:
        with contextlib.suppress(OSError):
            parent.recv(1)  # the parent sends nothing more: returns at its end
        if cleanup is not None:
            cleanup()
        os._exit(1)

    threading.Thread(target=wait, name="torchweave-exit-with-parent", daemon=True).start()
