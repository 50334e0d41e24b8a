"""A headless Chromium driven over a pipe (the DevTools protocol), without any package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._ids = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.requested: list[str] = []
        self.faults: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 30
        while time.monotonic() < end:
            for found in self._messages(end - time.monotonic()):
                if found.get("id") == number:
                    assert "error" not in found, found["error"]
                    return found["result"]
        raise TimeoutError(method)

    def _messages(self, timeout: float) -> Iterator[dict[str, Any]]:
        if b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(timeout, 0))[0]:
                return
            self._rest += os.read(self._read, 1 << 20)
        while b"\0" in self._rest:
            text, self._rest = self._rest.split(b"\0", 1)
            message = json.loads(text)
            self._note(message)
            if "id" in message:
                yield message
                return

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.faults.append(str(params["args"]))

    def go(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.size(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, code: str) -> Any:
        """The value of a piece of JavaScript."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, code: str, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(code):
            assert time.monotonic() < end, f"not within {seconds} seconds: {code}"
            time.sleep(0.05)

    def screenshot(self, path: Path, height: int = 0, scale: float = 1.0) -> None:
        """Write the whole page, or its first `height` pixels, with `scale` pixels for each."""
        height = height or self.run("document.documentElement.scrollHeight")
        width = self.run("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browsing() -> Iterator[Page]:
    """A browser with one empty page."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    folder = tempfile.mkdtemp(prefix="chromium-")

    def give_pipes() -> None:  # the protocol is spoken on the descriptors 3 and 4
        reading, writing = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        preexec_fn=give_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        os.close(theirs_in)
        os.close(theirs_out)
        yield Page(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
        shutil.rmtree(folder, ignore_errors=True)
