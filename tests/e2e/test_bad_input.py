"""Invalid input gives one-line errors that say what to do, from Python and from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweave
from torchweave import LLM, SamplingParams
from torchweave.cli.main import main
from torchweave.engine.startup import build as building
from torchweave.report import Report

DEMO = Path(torchweave.__file__).parent / "models" / "demo"
# Started without the compiler: what is refused is the same.
FAST: dict[str, Any] = {"device": "cpu", "torch_compile_config": {"enable_fullgraph": False}}


def missing_folder(folder: Path) -> Path:
    return folder / "nothing" / "here" / "at all"


def without_weights(folder: Path) -> Path:
    shutil.copytree(DEMO, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def truncated(folder: Path) -> Path:
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    return folder


def unknown_architecture(folder: Path) -> Path:
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "babbage", "architectures": ["Babbage"]}))
    return folder


def demo(folder: Path) -> str:
    return "demo"


@dataclass(frozen=True)
class Fault:
    """An invalid model or option, and words that the error must contain: what is wrong and what to do."""

    name: str
    model: Callable[[Path], Path | str]
    words: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


FAULTS = [
    Fault("missing folder", missing_folder, ("No model at", "nothing/here", "expected a folder")),
    Fault("no weights", without_weights, ("no weights", "expected model.safetensors")),
    Fault("truncated", truncated, ("model.safetensors", "damaged or cut short", "download it again")),
    Fault("unknown architecture", unknown_architecture, ("'babbage'", "does not support", "docs/reference/models.md")),
    Fault(
        "unknown key", demo, ("unknown option", "max_modle_len", "did you mean", "max_model_len"), {"max_modle_len": 64}
    ),
    Fault("unknown value", demo, ("dtype='float23'", "did you mean 'float32'"), {"dtype": "float23"}),
    Fault("no such GPU", demo, ("cuda:99",), {"device": "cuda:99"}),
    Fault("longer than the model", demo, ("max_model_len", "512"), {"max_model_len": 100_000}),
    Fault(
        "too little memory",
        demo,
        (
            "room for 16 tokens (0.08 MiB)",
            "one request of max_model_len=512 needs 2.50 MiB",
            "raise cpu_kv_cache_gib",
            "lower max_model_len",
        ),
        {"cpu_kv_cache_gib": 0.0001, "max_model_len": 512},
    ),
    Fault("no memory at all", demo, ("room for 0 tokens", "raise cpu_kv_cache_gib"), {"cpu_kv_cache_gib": 1e-9}),
]
BY_NAME = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def check_sentence(text: str, words: tuple[str, ...]) -> None:
    assert "\n" not in text.strip() and "Traceback" not in text
    assert len(text) < 500, text
    for word in words:
        assert word in text, text


@BY_NAME
def test_invalid_option_raises_value_error_in_python(fault: Fault, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        LLM(str(fault.model(tmp_path)), report=Report(show=False), **(FAST | fault.options))
    check_sentence(str(error.value), fault.words)


@BY_NAME
def test_invalid_option_exits_with_2_on_the_command_line(
    fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        part for name, value in ({"device": "cpu"} | fault.options).items() for part in (f"--{name}", str(value))
    ]
    assert main(["generate", str(fault.model(tmp_path)), "12+30=", "-O0", "--quiet", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    check_sentence(captured.err, ("torchweave: ", *(word for word in fault.words if not word.startswith("did you"))))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["12+30=", "--temperature", "-1"], ("temperature must be 0 (greedy) or a positive number", "but is -1")),
        (["1" * 600], ("prompt has 601 tokens", "max_model_len is 512", "shorten the prompt")),
        (["12+30=", "--temprature", "0"], ("unknown option --temprature", "--temperature")),
    ],
)
def test_invalid_sampling_parameter_on_the_command_line(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "demo", "--device", "cpu", "-O0", "--quiet", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    check_sentence(captured.err, words)


def test_unknown_yaml_key_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("torch_compile_config:\n  enable_inducter: false\n")
    assert main(["generate", "demo", "12+30=", "--config", str(file), "--quiet"]) == 2
    check_sentence(capsys.readouterr().err, ("enable_inducter", "did you mean", "enable_inductor"))


def test_unknown_nested_config_key_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"torch_compile_config\.enable_inducter; did you mean .*enable_inductor\?"):
        LLM("demo", torch_compile_config={"enable_inducter": False})


@pytest.mark.parametrize(
    ("model", "prompt"), [(truncated, "12+30="), (demo, "1" * 600)], ids=["truncated", "prompt too long"]
)
def test_process_prints_one_line_and_exits_with_2(
    model: Callable[[Path], Path | str], prompt: str, tmp_path: Path
) -> None:
    """As a process, so that warnings of libraries are seen, too."""
    command = [sys.executable, "-m", "torchweave.cli.main", "generate", str(model(tmp_path)), prompt, "-O0", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("torchweave: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.50 GiB "
                "is free. Process 1 has 77 GiB memory in use. If reserved memory is large try setting things."
            ),
            ("too little memory on the GPU", "Tried to allocate 2.00 GiB", "1.50 GiB is free", "smaller model"),
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 bytes."),
            ("too little memory on the CPU", "smaller model"),
        ),
    ],
)
def test_out_of_memory_gives_a_one_line_error(
    error: Exception, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(building, "load", load)
    with pytest.raises(ValueError) as found:
        LLM("demo", **FAST)
    check_sentence(str(found.value), words)
    assert found.value.__context__ is None, "the failed frames would keep what they had allocated"


def test_other_exceptions_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(building, "load", load)
    with pytest.raises(RuntimeError, match="a kernel is broken"):
        LLM("demo", **FAST)


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", report=Report(show=False), **FAST) as engine:
        yield engine


REQUESTS: list[tuple[str, Callable[[LLM], object], str]] = [
    ("too long", lambda llm: llm.generate("1" * 600), "shorten the prompt"),
    ("one of several", lambda llm: llm.generate(["1+1=", "1" * 600]), "Prompt 1: The prompt has 601 tokens"),
    (
        "scored",
        lambda llm: llm.stream("1", SamplingParams(prompt_logprobs=1)),
        "A stream does not return prompt_logprobs; use generate",
    ),
    ("streamed", lambda llm: llm.stream("1" * 600), "shorten the prompt"),
    ("empty", lambda llm: llm.generate([[]]), "The prompt is empty"),
    ("unknown token", lambda llm: llm.generate([[5, 104]]), "outside 0..103"),
    ("negative token", lambda llm: llm.generate([[-1]]), "outside 0..103"),
    ("huge token", lambda llm: llm.generate([[2**70]]), "whole numbers"),
    ("no list at all", lambda llm: llm.generate([1.5]), "whole numbers"),  # type: ignore[list-item]
    ("fraction of a token", lambda llm: llm.generate([[5, 1.5]]), "whole numbers"),  # type: ignore[list-item]
    ("temperature", lambda llm: llm.generate("1", SamplingParams(temperature=-0.1)), "temperature must be 0"),
    ("not a number", lambda llm: llm.generate("1", SamplingParams(temperature=float("nan"))), "temperature must be"),
    ("parameters", lambda llm: llm.generate(["1", "2"], [SamplingParams()]), "2 prompts but 1 sampling_params"),
    ("text as a conversation", lambda llm: llm.chat("1+1="), "Expected a list of messages"),  # type: ignore[arg-type]
    ("message without a role", lambda llm: llm.chat([{"content": "1+1="}]), "Expected a list of messages"),
]


LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def right(llm: LLM) -> list[int]:
    return llm.generate("12+30=", LONG)[0].outputs[0].token_ids


@pytest.mark.parametrize(("ask", "sentence"), [case[1:] for case in REQUESTS], ids=[case[0] for case in REQUESTS])
def test_invalid_request_is_rejected_and_others_finish(
    llm: LLM, right: list[int], ask: Callable[[LLM], object], sentence: str
) -> None:
    begun = threading.Event()
    said: list[int] = []

    def listen() -> None:
        for piece in llm.stream("12+30=", LONG):
            said.extend(piece.token_ids)
            begun.set()

    thread = threading.Thread(target=listen)
    thread.start()
    assert begun.wait(30)
    with pytest.raises(ValueError) as error:
        ask(llm)
    in_flight = len(said) < len(right)
    thread.join(30)
    check_sentence(str(error.value), (sentence,))
    assert in_flight, "the long answer was over before the bad request came: nothing was shown"
    assert said == right
    assert llm.engine.scheduler.num_active == 0
