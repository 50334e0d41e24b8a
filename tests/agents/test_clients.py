"""Agents that people run: each a session of four turns, which reads a file, edits it, runs a command, and answers.

`make test-agents` installs them. The model says what the script of a client says, with a template that reasons, one that does not,
and one that takes a system message at the beginning only, in two formats of calls. Clients find no network but loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.serving.running import ServerProcess, serving

INSTALLED = Path(__file__).resolve().parents[2] / ".agents"
NODE, PYTHON = INSTALLED / "node_modules", INSTALLED / "python" / "bin"
CLIENTS = Path(__file__).parent / "clients"
PROMPT = "Replace hello in a.txt, then copy it to b.txt."
ANSWER = "All turns are done ✅."
COPY = "cp a.txt b.txt"
pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not INSTALLED.is_dir(), reason="run make test-agents, which installs the clients"),
]


@dataclass(frozen=True)
class Client:
    """An agent.

    Attributes:
        program: the file that must be there.
        command: arguments of a session, from the server's address and the folder to work in.
        marker: a text of its tools.
        calls: of the session, from that folder.
        environment: from the server's address and the folder.
        files: to write before it starts, by name within the folder.
    """

    program: Path
    command: Callable[[str, Path], list[str]]
    marker: str
    calls: Callable[[Path], list[tuple[str, dict[str, Any]]]]
    environment: Callable[[str, Path], dict[str, str]] = lambda url, folder: {}
    files: Callable[[str], dict[str, str]] = field(default=lambda url: {})
    answer: tuple[str, dict[str, Any]] | str = ANSWER


def _library(name: str) -> Client:
    def calls(folder: Path) -> list[tuple[str, dict[str, Any]]]:
        path = str(folder / "a.txt")
        return [
            ("read_file", {"path": path}),
            ("edit_file", {"path": path, "old": "hello", "new": "grüße"}),
            ("run_command", {"command": f"cd {folder} && {COPY}"}),
        ]

    if name.endswith(".mjs"):
        return Client(
            NODE / "ai", lambda url, folder: ["node", str(CLIENTS / name), url, str(NODE)], '"run_command"', calls
        )
    answer = ("final_answer", {"answer": ANSWER}) if name.startswith("smol") else ANSWER
    marker = '"final_answer"' if name.startswith("smol") else '"run_command"'
    script = str(CLIENTS / f"{name}.py")
    return Client(
        PYTHON / "python", lambda url, folder: [str(PYTHON / "python"), script, url], marker, calls, answer=answer
    )


def _claude_environment(url: str, folder: Path) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "local",
        "ANTHROPIC_SMALL_FAST_MODEL": "local",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000",
    }


def _codex_files(url: str) -> dict[str, str]:
    provider = f'[model_providers.torchweave]\nname = "torchweave"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    return {".codex/config.toml": f'model = "local"\nmodel_provider = "torchweave"\n{provider}'}


def _opencode_files(url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"local": {"name": "local"}},
    }
    return {"opencode.json": json.dumps({"provider": {"torchweave": provider}, "autoupdate": False})}


def _bin(name: str) -> Path:
    return NODE / ".bin" / name


AGENTS = {
    "openai_agents": _library("openai_agents"),
    "langgraph": _library("langgraph_agent"),
    "smolagents": _library("smolagents_agent"),
    "pydantic_ai": _library("pydantic_agent"),
    "ai_sdk": _library("ai_sdk.mjs"),
    "claude_code": Client(
        _bin("claude"),
        lambda url, folder: [str(_bin("claude")), "-p", PROMPT, "--allowedTools", "Read,Edit,Bash"],
        '"Edit"',
        lambda folder: [
            ("Read", {"file_path": f"{folder}/a.txt"}),
            ("Edit", {"file_path": f"{folder}/a.txt", "old_string": "hello", "new_string": "grüße"}),
            ("Bash", {"command": COPY, "description": "Copy the file"}),
        ],
        _claude_environment,
    ),
    "codex": Client(
        _bin("codex"),
        lambda url, folder: [
            str(_bin("codex")),
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            PROMPT,
        ],
        '"exec_command"',
        lambda folder: [
            ("exec_command", {"cmd": "cat a.txt"}),
            ("exec_command", {"cmd": "sed -i s/hello/grüße/ a.txt"}),
            ("exec_command", {"cmd": COPY}),
        ],
        lambda url, folder: {"CODEX_HOME": str(folder / ".codex")},
        _codex_files,
    ),
    "qwen_code": Client(
        _bin("qwen"),
        lambda url, folder: [str(_bin("qwen")), "-p", PROMPT, "--yolo", "--auth-type", "openai"],
        '"run_shell_command"',
        lambda folder: [
            ("read_file", {"file_path": f"{folder}/a.txt"}),
            ("edit", {"file_path": f"{folder}/a.txt", "old_string": "hello", "new_string": "grüße"}),
            ("run_shell_command", {"command": COPY, "is_background": False, "description": "Copy the file"}),
        ],
        lambda url, folder: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "local"},
    ),
    "opencode": Client(
        _bin("opencode"),
        lambda url, folder: [str(_bin("opencode")), "run", "-m", "torchweave/local", PROMPT],
        '"todowrite"',
        lambda folder: [
            ("read", {"filePath": f"{folder}/a.txt"}),
            ("edit", {"filePath": f"{folder}/a.txt", "oldString": "hello", "newString": "grüße"}),
            ("bash", {"command": COPY, "description": "Copy the file"}),
        ],
        lambda url, folder: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        _opencode_files,
    ),
}
KINDS = [(kind, form) for kind in ("reasoning", "plain", "strict") for form in ("hermes", "qwen3_coder")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def scripted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, Path]]:
    """A server of the scripted model, and the folder that clients work in."""
    from tests.agents.scripted_model import Script, make

    folder = tmp_path_factory.mktemp("work")
    scripts = {"": Script("", ["OK."])}
    for client in AGENTS.values():
        scripts[client.marker] = Script(client.marker, [*client.calls(folder), client.answer])
    model = make(tmp_path_factory.mktemp("model"), list(scripts.values()), *request.param)
    options = ("--served_model_name", "local", "--cpu_kv_cache_gib", "0.2")
    with serving(*options, model=str(model)) as server:
        yield server, folder


@pytest.mark.parametrize("name", AGENTS)
def test_a_session_of_four_turns(scripted: tuple[ServerProcess, Path], name: str, tmp_path: Path) -> None:
    server, folder = scripted
    client = AGENTS[name]
    if not client.program.exists():
        pytest.skip(f"{client.program} is not installed")
    for old in ("a.txt", "b.txt"):
        (folder / old).unlink(missing_ok=True)
    (folder / "a.txt").write_text("hello world\n", encoding="utf-8")
    for path, text in client.files(server.url).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    closed = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    path = f"{PYTHON}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path), "LANG": "C.UTF-8", **closed, **local}
    ended = subprocess.run(
        client.command(server.url, folder),
        cwd=folder,
        env=environment | client.environment(server.url, folder),
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    said = f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    assert ended.returncode == 0, said
    assert (folder / "a.txt").read_text(encoding="utf-8") == "grüße world\n", said
    assert (folder / "b.txt").is_file() and (folder / "b.txt").read_text(encoding="utf-8") == "grüße world\n", said
    assert ANSWER in ended.stdout, said
