"""The examples of docs/serving.md run against a server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.serving.running import ServerProcess
from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```(py|bash)\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
SAYS = ("42", "apple fig pear", "completion_tokens=", "'sum':", "{", "42 True")
"""What each example prints, in the order of the page."""


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_guide_run(server: ServerProcess, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    language, code = EXAMPLES[number]
    code = code.replace("http://127.0.0.1:8000", server.url)
    if language == "py":
        exec(compile(code, "serving.md", "exec"), {"__name__": "__main__"})
        assert SAYS[number] in capsys.readouterr().out
    else:
        done = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert SAYS[number] in done.stdout


def test_every_field_is_in_the_guide() -> None:
    documented = set(re.findall(r"`([a-z_*]+)`", TEXT))
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    missing = {name for name in fields if name not in documented and not name.startswith("guided_")}
    assert missing - {"stream_options"} == set() and "guided_*" in documented


def test_every_address_is_in_the_guide(server: ServerProcess) -> None:
    for path in server.get("/openapi.json").json()["paths"]:
        assert path.replace("{name}", "NAME") in TEXT, path
