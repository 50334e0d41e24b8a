"""The examples of pages that call a server run against one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.serving.running import ServerProcess
from torchweave.serving.openai.protocol import ChatRequest, CompletionRequest

DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "reference" / "http.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
EXAMPLES = [
    (page.relative_to(DOCS).as_posix(), language, code)
    for page in sorted(DOCS.rglob("*.md"))
    for language, code in re.findall(
        r"^```(py|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    if URL in code
]
PRINTED = {
    "curl": "42",
    "stream_options": "apple fig pear",
    "extra_body": "completion_tokens=",
    "json_schema": "'sum':",
    "tool_choice": "{",
    "previous_response_id": "42 True",
}
"""What an example prints, by a word of its code."""


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=lambda number: f"{EXAMPLES[number][0]}-{number}")
def test_examples_of_pages_run(server: ServerProcess, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    page, language, code = EXAMPLES[number]
    expected = [printed for word, printed in PRINTED.items() if word in code]
    code = code.replace(URL, server.url)
    if language == "py":
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
        said = capsys.readouterr().out
    else:
        done = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        said = done.stdout
    assert all(printed in said for printed in expected)


def test_the_known_examples_are_among_them() -> None:
    assert all(any(word in code for _, _, code in EXAMPLES) for word in PRINTED)


def test_every_field_is_in_the_reference() -> None:
    documented = set(re.findall(r"`([a-z_*]+)`", TEXT))
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    missing = {name for name in fields if name not in documented and not name.startswith("guided_")}
    assert missing - {"stream_options"} == set() and "guided_*" in documented


def test_every_address_is_in_the_reference(server: ServerProcess) -> None:
    for path in server.get("/openapi.json").json()["paths"]:
        assert path.replace("{name}", "NAME") in TEXT, path
