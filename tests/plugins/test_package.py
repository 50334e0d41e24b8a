"""A package with entry points, found on the import path, whose plug-ins serve on one rank and over two."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchweave import LLM, SamplingParams
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.config.validate import check_config, check_server
from torchweave.plug_points import REASONING_PARSERS
from torchweave.report import Report
from torchweave.serving.openai.answer_parser import AnswerFormat, AnswerParser, WholeAnswer
from torchweave.serving.openai.protocol import Tool
from torchweave.serving.openai.tools import ToolUse, has_special_tokens, make_tool_parser, new_call_id

PACKAGE = Path(__file__).parent / "package"
PROMPT = "sort: pear fig apple"
OPTIONS = {
    "device": "cpu", "attention_backend": "acme", "quantization": "acme", "logits_processors": ("acme_cycle", "acme_forbid"),
    "torch_compile_config": {"enable_inductor": False, "compile_cache": False, "passes": ("acme_count",)},
    "plugins": ("acme-plugin",),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PACKAGE), prepend=":")  # of the other ranks
        patch.syspath_prepend(PACKAGE)
        yield
    sys.modules.pop("acme_plugin", None)


def greedy(**extra_args: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=5, detokenize=False, extra_args=extra_args or None)


def tokens(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate([PROMPT] * len(params), list(params))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_package_serves(ranks: int) -> None:
    report = Report(show=False)
    with LLM("demo", report=report, tensor_parallel_size=ranks, **OPTIONS) as llm:  # type: ignore[arg-type]
        plain, cycled, forbidden, again = tokens(llm, greedy(), greedy(cycle=[5, 6]), greedy(cycle=[5, 6, 7]), greedy())
        assert cycled == [5, 6, 5, 6, 5] and forbidden == [5, 6, 7, 5, 6] and plain == again
        mixed = SamplingParams(
            temperature=0.0, max_tokens=5, detokenize=False, repetition_penalty=1.5, extra_args={"forbid": plain[0] + 1}
        )
        without, both, whole = tokens(llm, greedy(forbid=plain[0] + 1), mixed, greedy())
        assert plain[0] not in without and plain[0] not in both and whole == plain
        with pytest.raises(ValueError, match="cycle must be a list of token ids"):
            llm.generate(PROMPT, greedy(cycle=["x"]))
        with pytest.raises(RuntimeError, match=r"The logits processor Cycle failed \(ZeroDivisionError"):
            llm.generate(PROMPT, greedy(cycle=[]))
        assert tokens(llm, greedy()) == [plain], "the engine goes on"
    assert {"attention", "quantization", "hook of LlamaMLP"} <= set(sys.modules["acme_plugin"].used)
    assert [each["matches"] > 10 for each in report.select("pass") if each["name"] == "acme_count"] == [True]
    assert report.select("quantized")[0]["scheme"] == "int8_per_channel"


def test_parsers_of_a_package_read_an_answer() -> None:
    check_server(EngineConfig("demo"), ServerConfig(tool_call_parser="acme", reasoning_parser="acme"))
    tool = Tool.model_validate({"type": "function", "function": {"name": "now"}})
    assert not has_special_tokens("acme") and new_call_id("acme", 0)("now", 0).startswith("call")
    form = AnswerFormat(ToolUse([], None, make_tool_parser("acme", [tool])), REASONING_PARSERS.get("acme"))
    parser, answer = AnswerParser(form), '<muse>It is late.</muse>Look: <acme>{"name": "now", "arguments": {}}</acme>'
    pieces = [piece for at in range(len(answer)) for piece in parser.feed(answer[at], is_last=at == len(answer) - 1)]
    found = WholeAnswer.of(pieces)
    assert (found.reasoning, found.text.strip(), found.calls) == ("It is late.", "Look:", [("now", "{}")])


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_parsers_that_are_unknown_or_left_out_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=rf"{option}='acne' is not known: .*did you mean 'acme'\?"):
        check_server(EngineConfig("demo"), ServerConfig(**{option: "acne"}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not known"):
        check_server(EngineConfig("demo", plugins=()), ServerConfig(**{option: "acme"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("attention_backend", "acne", r"'acne' is not known: .*did you mean 'acme'\?"),
        ("quantization", "acne", r"quantization='acne' is not known: .*acme"),
        ("logits_processors", ("acme_cycel",), r"logits_processors='acme_cycel' is not known: .*acme_cycle"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(EngineConfig("demo", **{option: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["attention_backend", "quantization", "logits_processors"])
def test_names_of_packages_that_are_left_out_are_refused(option: str) -> None:
    value = OPTIONS[option]
    check_config(EngineConfig("demo", **{option: value}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not known"):
        check_config(EngineConfig("demo", plugins=(), **{option: value}))  # type: ignore[arg-type]


def test_processors_within_steps_do_not_go_with_speculation() -> None:
    options = {"device": "cpu", "speculative_config": {"method": "ngram"}, "logits_processors": ["acme_forbid"]}
    with pytest.raises(ValueError, match=r"acme_forbid.* runs within steps, .* speculative_config\.method=ngram"):
        LLM("demo", **options)  # type: ignore[arg-type]
