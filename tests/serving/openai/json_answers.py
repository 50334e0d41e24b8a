"""Do finished answers validate? Random requests for JSON and for calls, against a server of their own.

    python -m tests.serving.openai.json_answers                                        # demo, 1,000 answers of each kind
    python -m tests.serving.openai.json_answers --speculation --kinds forced --count 50
    python -m tests.serving.openai.json_answers --model FOLDER --keep_template         # a model whose template takes tools

Kinds: `format` (`response_format`), `forced` (`tool_choice` required or named), `tags` (a structural tag), `beside` (a format
beside tools that the model may call), `strict` (strict tools that it may call). Prints a line a kind; exits with 1 if a finished
answer does not validate. Answers that `max_tokens` cut off are counted, and others asked for instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from tests.serving.running import ServerProcess, serving

TEMPLATE = """{%- for tool in tools or [] %}{% endfor -%}
{{ bos_token }}{%- for m in messages %}{{ '<|user|>' + m['content'] | trim + '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}
{#- <tool_call> #}"""
Json = dict[str, Any]
SCHEMAS: tuple[Json, ...] = (
    {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["city", "n"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "kind": {"const": "a"},
            "values": {"type": "array", "items": {"$ref": "#/$defs/Value"}, "maxItems": 3, "minItems": 1},
        },
        "required": ["kind", "values"],
        "additionalProperties": False,
        "$defs": {"Value": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": 0, "maximum": 99}]}},
    },
    {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{1,3}$"},
            "inner": {
                "type": "object",
                "properties": {"b": {"type": ["string", "null"], "maxLength": 8}},
                "required": ["b"],
                "additionalProperties": False,
            },
        },
        "required": ["day", "code", "inner"],
        "additionalProperties": False,
    },
)
NAMES = ("first", "second", "third")
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 4}'


def tools(strict: bool) -> list[Json]:
    """A tool for each schema."""
    return [
        {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}
        for name, schema in zip(NAMES, SCHEMAS, strict=True)
    ]


def is_json(content: str | None, schema: Json) -> str:
    """What is wrong with a text; empty if it validates."""
    try:
        jsonschema.validate(json.loads(content or ""), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{content!r}: {str(error).splitlines()[0]}"
    return ""


def calls_fault(message: Json, with_schema: bool) -> str:
    """What is wrong with an answer's calls; empty if each is of a tool and has valid arguments."""
    made = message.get("tool_calls") or []
    if not made or (message.get("content") or "").strip():
        return f"no calls, or text beside them: {message!r}"
    for call in made:
        name = call["function"]["name"]
        if name not in NAMES:
            return f"calls {name!r}"
        schema = SCHEMAS[NAMES.index(name)] if with_schema else {"type": "object"}
        if fault := is_json(call["function"]["arguments"], schema):
            return fault
    return ""


def tag_fault(content: str | None, schema: Json) -> str:
    """What is wrong with a text that is `<x>JSON</x>`."""
    if not (content or "").startswith("<x>") or not (content or "").endswith("</x>"):
        return f"no tag: {content!r}"
    return is_json((content or "")[3:-4], schema)


def asked(random_: random.Random, kind: str) -> tuple[Json, Callable[[Json], str]]:
    """The fields of a request, and what is wrong with a message that answers it."""
    number = random_.randrange(len(SCHEMAS))
    schema = SCHEMAS[number]
    strict = random_.random() < 0.5
    form: Json = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    if kind == "format":
        return {"response_format": form}, lambda message: is_json(message["content"], schema)
    if kind == "forced":
        named = {"type": "function", "function": {"name": NAMES[number]}}
        choice = named if random_.random() < 0.5 else "required"
        fields = {"tools": tools(strict), "tool_choice": choice, "parallel_tool_calls": random_.random() < 0.2}
        return fields, lambda message: calls_fault(message, True)
    if kind == "tags":
        content = {"type": "json_schema", "json_schema": schema}
        tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<x>", "content": content, "end": "</x>"}}
        return {"response_format": tag}, lambda message: tag_fault(message["content"], schema)
    if kind == "beside":
        fields = {"tools": tools(strict), "response_format": form, "parallel_tool_calls": random_.random() < 0.2}
        return (
            fields,
            lambda message: (
                calls_fault(message, strict) if message.get("tool_calls") else is_json(message["content"], schema)
            ),
        )
    # A small model ends no list of calls by itself: most answers may have one.
    fields = {"tools": tools(True), "parallel_tool_calls": random_.random() < 0.2}
    return fields, lambda message: calls_fault(message, True) if message.get("tool_calls") else ""


async def ask(client: httpx.AsyncClient, kind: str, at: int, counts: dict[str, int], faults: list[str]) -> None:
    """Ask until an answer is finished, and check it."""
    random_ = random.Random(f"{kind} {at}")
    while True:
        fields, fault_of = asked(random_, kind)
        body = fields | {
            "messages": [{"role": "user", "content": f"{random_.randrange(99)}+{random_.randrange(99)}"}],
            "max_tokens": 200,
            "temperature": random_.choice((0.0, 0.7, 1.5)),
            "seed": random_.randrange(1000),
        }
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            faults.append(f"{answer.status_code}: {answer.text[:300]}")
            return
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "length":
            counts["cut"] += 1
            continue
        counts["calls"] += bool(choice["message"].get("tool_calls"))
        if fault := fault_of(choice["message"]):
            faults.append(fault)
        return


async def check(url: str, kind: str, count: int, at_once: int = 32) -> tuple[dict[str, int], list[str]]:
    """Check `count` finished answers of a kind; returns numbers of answers with calls and of those cut off, and faults."""
    counts, faults, left = {"calls": 0, "cut": 0}, list[str](), iter(range(count))

    async def work() -> None:
        for at in left:
            await ask(client, kind, at, counts, faults)

    async with httpx.AsyncClient(base_url=url, timeout=600, verify=False) as client:
        await asyncio.gather(*(work() for _ in range(at_once)))
    return counts, faults


KINDS = ("format", "forced", "tags", "beside", "strict")


def _serving(model: str, keep_template: bool, speculation: bool, folder: Path) -> AbstractContextManager[ServerProcess]:
    options = ["--speculative_config", SPECULATION] if speculation else []
    if not keep_template:
        template = folder / "chat.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        options += ["--chat_template", str(template)]
    return serving(*options, model=model)


def main() -> int:
    """Check the kinds that the command line names, or all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="demo")
    options.add_argument("--keep_template", action="store_true", help="the model's own template, which takes tools")
    options.add_argument("--speculation", action="store_true", help="with prompt lookup")
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    chosen = options.parse_args()
    failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        _serving(chosen.model, chosen.keep_template, chosen.speculation, Path(folder)) as server,
    ):
        for kind in chosen.kinds:
            counts, faults = asyncio.run(check(server.url, kind, chosen.count))
            failed += len(faults)
            line = f"{kind}: {chosen.count - len(faults)} of {chosen.count} valid, {counts['calls']} with calls"
            print(f"{line}; {counts['cut']} more were cut off", *faults[:3], sep="\n  ", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
