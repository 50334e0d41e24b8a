"""Run the clients of others against a running server and write the table of docs/reference/http.md.

    torchweave serve demo --chat_template scripts/docs/client_matrix.jinja --port 8000 &
    torchweave serve demo --runner pooling --port 8001 & export POOLING_URL=http://127.0.0.1:8001
    python -m venv clients && clients/bin/pip install openai anthropic langchain-openai litellm instructor \
        llama-index-llms-openai-like pydantic-ai-slim[openai] openai-agents outlines guidance lm_eval[api] guidellm
    clients/bin/python scripts/docs/client_matrix.py http://127.0.0.1:8000 --write docs/reference/http.md

Each row is a function; what it returns was seen to work, and an exception is the reason why a client does not. A client that is not
installed has no row, unless `NOT_RUN` says why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MODEL = "demo"
TOKENIZER = Path(__file__).parents[2] / "torchweave" / "models" / "demo"
QUESTION = "12+30="
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
        },
    },
}
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
NOT_RUN = {
    "vllm": "`vllm bench serve` is not run: the package needs a GPU build; `torchweave bench serve` speaks the same protocol",
}
Check = Callable[[str], str]
CHECKS: list[tuple[str, str, Check]] = []


def client(package: str, what: str) -> Callable[[Check], Check]:
    """Register a check of `package`; `what` names the part of it."""

    def register(check: Check) -> Check:
        CHECKS.append((package, what, check))
        return check

    return register


def expect(found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"answered {str(found)[:80]!r} instead of {wanted!r}")


def openai_client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@client("openai", "chat completions")
def openai_chat(url: str) -> str:
    chat = openai_client(url).chat.completions
    expect(chat.create(model=MODEL, messages=MESSAGES, temperature=0).choices[0].message.content, "42")
    stream = chat.create(model=MODEL, messages=MESSAGES, temperature=0, stream=True)
    expect("".join(chunk.choices[0].delta.content or "" for chunk in stream), "42")
    forced = chat.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=40)
    expect(forced.choices[0].message.tool_calls[0].function.name, "add")
    return "whole, streams, tools"


@client("openai", "structured outputs")
def openai_parse(url: str) -> str:
    parsed = openai_client(url).chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=_sum_type(), max_tokens=60
    )
    expect(type(parsed.choices[0].message.parsed).__name__, "Sum")
    return "`parse` of a Pydantic model"


@client("openai", "completions")
def openai_completions(url: str) -> str:
    answer = openai_client(url).completions.create(model=MODEL, prompt=[QUESTION] * 2, temperature=0, logprobs=1)
    expect([choice.text for choice in answer.choices], ["42", "42"])
    return "several prompts, logprobs"


@client("openai", "Responses")
def openai_responses(url: str) -> str:
    responses = openai_client(url).responses
    first = responses.create(model=MODEL, input=QUESTION, temperature=0)
    expect(first.output_text, "42")
    responses.create(model=MODEL, input="1+1=", previous_response_id=first.id, temperature=0)
    events = [event.type for event in responses.create(model=MODEL, input=QUESTION, temperature=0, stream=True)]
    expect(events[-1], "response.completed")
    return "whole, streams, `previous_response_id`"


@client("openai", "embeddings")
def openai_embeddings(url: str) -> str:
    embeddings = openai_client(os.environ.get("POOLING_URL", url)).embeddings
    answer = embeddings.create(model=MODEL, input=[QUESTION, "1+1="])
    expect([round(sum(number**2 for number in each.embedding), 3) for each in answer.data], [1.0, 1.0])
    expect(
        len(embeddings.create(model=MODEL, input=QUESTION, encoding_format="float", dimensions=8).data[0].embedding), 8
    )
    return "base64, float, `dimensions`, with `--runner pooling`"


@client("anthropic", "Messages")
def anthropic_messages(url: str) -> str:
    from anthropic import Anthropic

    messages = Anthropic(base_url=url, api_key="none", max_retries=0).messages
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "extra_body": {"temperature": 0}}
    expect(messages.create(**asked).content[0].text, "42")  # type: ignore[union-attr]
    with messages.stream(**asked) as stream:
        expect("".join(stream.text_stream), "42")
    messages.count_tokens(model=MODEL, messages=MESSAGES)
    return "whole, streams, `count_tokens`"


@client("langchain-openai", "ChatOpenAI")
def langchain(url: str) -> str:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=60, max_retries=0)  # type: ignore[arg-type]
    expect(llm.invoke(QUESTION).content, "42")
    expect("".join(str(chunk.content) for chunk in llm.stream(QUESTION)), "42")
    expect(llm.bind_tools([TOOL], tool_choice="any").invoke(QUESTION).tool_calls[0]["name"], "add")
    expect(type(llm.with_structured_output(_sum_type()).invoke(QUESTION)).__name__, "Sum")
    return "invoke, stream, `bind_tools`, `with_structured_output`"


@client("litellm", "openai/, hosted_vllm/")
def litellm_completion(url: str) -> str:
    import litellm

    for provider in ("openai", "hosted_vllm"):
        asked: Any = {"model": f"{provider}/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES}
        expect(litellm.completion(**asked, temperature=0).choices[0].message.content, "42")
        stream = litellm.completion(**asked, temperature=0, stream=True)
        expect("".join(chunk.choices[0].delta.content or "" for chunk in stream), "42")
    return "whole, streams"


@client("instructor", "tools, JSON schema")
def instructor_create(url: str) -> str:
    import instructor

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(openai_client(url), mode=mode)
        found = patched.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_model=_sum_type(), max_tokens=60, max_retries=0
        )
        expect(type(found).__name__, "Sum")
    return "`response_model`"


@client("llama-index-llms-openai-like", "OpenAILike")
def llama_index(url: str) -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    asked: Any = {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 16}
    chat = OpenAILike(**asked, is_chat_model=True)
    expect(chat.chat([ChatMessage(role="user", content=QUESTION)]).message.content, "42")
    expect([each.delta for each in chat.stream_complete(QUESTION)][-1] is not None, True)
    expect(OpenAILike(**asked, is_chat_model=False).complete(QUESTION).text, "42")
    return "chat, complete, streams"


@client("pydantic-ai-slim", "Agent")
def pydantic_ai(url: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings: Any = {"temperature": 0.0, "max_tokens": 60}
    expect(Agent(model, model_settings=settings).run_sync(QUESTION).output, "42")
    found = Agent(model, output_type=_sum_type(), model_settings=settings).run_sync(QUESTION).output
    expect(type(found).__name__, "Sum")
    return "text, `output_type`"


@client("openai-agents", "Runner, by Responses")
def openai_agents(url: str) -> str:
    from agents import Agent, ModelSettings, Runner, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    agent = Agent(name="sums", model=MODEL, model_settings=ModelSettings(temperature=0.0, max_tokens=16))
    expect(Runner.run_sync(agent, QUESTION).final_output, "42")

    async def streamed() -> Any:
        set_default_openai_client(
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        )  # of this event loop
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    expect(asyncio.run(streamed()), "42")
    return "run, streams"


@client("outlines", "from_vllm")
def outlines_vllm(url: str) -> str:
    import outlines
    from outlines.types import Regex

    model = outlines.from_vllm(openai_client(url), MODEL)
    expect(len(model(QUESTION, Regex(r"[0-9]{3}"), max_tokens=8)), 3)
    expect(_sum_type().model_validate_json(model(QUESTION, _sum_type(), max_tokens=60)).total >= 0, True)
    return "expressions, JSON schemas"


@client("guidance", "VLLMModel")
def guidance_vllm(url: str) -> str:
    import guidance
    from guidance.models.experimental import VLLMModel

    lm = VLLMModel(MODEL, base_url=f"{url}/v1", api_key="none")
    with guidance.user():
        lm += QUESTION
    with guidance.assistant():
        lm += guidance.gen("total", regex=r"[0-9]{2}", temperature=0, max_tokens=8)
    expect(lm["total"], "42")
    return "`gen` with an expression"


@client("lm_eval", "local-completions")
def lm_eval_completions(url: str) -> str:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    lm = LocalCompletionsAPI(model=MODEL, base_url=f"{url}/v1/completions", tokenizer_backend="remote", max_length=256)
    doc: dict[str, Any] = {}
    pairs = [Instance("loglikelihood", doc, (QUESTION, answer), at) for at, answer in enumerate(("42", "43"))]
    right, wrong = lm.loglikelihood(pairs, disable_tqdm=True)
    expect((right[0] > wrong[0], wrong[1]), (True, False))
    asked = [Instance("generate_until", doc, (QUESTION, {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}), 0)]
    expect([type(text) for text in lm.generate_until(asked, disable_tqdm=True)], [str])
    return '`loglikelihood`, `generate_until`, `tokenizer_backend="remote"`'


@client("guidellm", "run, synthetic text")
def guidellm_run(url: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = {
            "backend": f"kind=openai_http,target={url}",
            "profile": "kind=concurrent,streams=2",
            "constraint": "kind=max_requests,count=8",
            "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "output": f"kind=json,path={result}",
        }
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if ran.returncode:
            raise RuntimeError(ran.stderr.strip()[-160:])
        requests = json.loads(result.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]
    expect((len(requests["successful"]), len(requests["errored"])), (8, 0))
    return "concurrent requests; its tokenizer is the model's folder"


def _sum_type() -> Any:
    from pydantic import BaseModel, ConfigDict, Field

    class Sum(BaseModel):
        model_config = ConfigDict(extra="forbid")  # else the small model writes properties of its own up to max_tokens
        total: int = Field(ge=0, le=99)

    return Sum


def rows(url: str, only: list[str]) -> dict[str, str]:
    """A row for each check whose package is installed, by its first two columns, and for `NOT_RUN`."""
    table = {f"| {package} | - |": f"| {package} | - | - | {why} |" for package, why in NOT_RUN.items()}
    for package, what, check in CHECKS:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if only and package not in only:
            continue
        try:
            result = f"works: {check(url)}"
        except Exception as error:
            found = re.search(r"'message': (['\"])(.*?)\1,", str(error))  # of the server, within a client's own words
            reason = found[2] if found else f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            result = f"does not: {reason}".replace("|", "\\|")
        key = f"| {package} | {what} |"
        table[key] = f"{key} {installed} | {result} |"
        print(table[key], flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="address of a server of the built-in model with a template for tools")
    parser.add_argument("--only", metavar="PACKAGE", nargs="+", default=[], help="run these clients; keep other rows")
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the table in this page")
    args = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "none")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up of prices
    found = rows(args.url.rstrip("/"), args.only)
    if args.write is not None:
        before, _, rest = args.write.read_text(encoding="utf-8").partition(BEGIN)
        old, _, after = rest.partition(END)
        kept = {re.match(r"\| [^|]* \| [^|]* \|", row)[0]: row for row in old.strip().splitlines()[2:]}  # type: ignore[index]
        merged = {**kept, **found} if args.only else found
        order = [f"| {package} | {what} |" for package, what, _ in CHECKS]
        order += [f"| {package} | - |" for package in NOT_RUN]
        lines = [
            "| client | part | version | result |",
            "|---|---|---|---|",
            *(merged[key] for key in order if key in merged),
        ]
        table = "\n".join(lines)
        args.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
