"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.running import ServerProcess, serving

TEMPLATE = """{%- for tool in tools or [] %}{% endfor -%}
{{ bos_token }}
{%- for m in messages %}{{ '<|user|>' + m['content'] | trim + '<|end|>' }}{% endfor %}{{ reasoning_effort }}
{{- '<|assistant|>' }}
{#- a model that calls tools would be told here to write <tool_call> #}"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The built-in model under two names, behind a chat template that takes tools."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    with serving("--chat_template", str(template), "--served_model_name", "demo,sums") as running:
        yield running


REASONING_TEMPLATE = """{{ bos_token }}
{%- for m in messages %}{{ '(' + m['role'] + ')' if m['role'] != 'user' else '<|user|>' }}
{%- if m['reasoning_content'] %}{{ '[' + m['reasoning_content'] + ']' }}{% endif %}{{ m['content'] | trim }}
{{- '<|end|>' if m['role'] == 'user' }}{% endfor %}
{{- '<|assistant|>' }}{{ '<think>\\n' if enable_thinking is not defined or enable_thinking }}"""


@pytest.fixture(scope="session")
def reasoning_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The built-in model behind a chat template that opens reasoning and a path of a proxy, in two HTTP processes."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(REASONING_TEMPLATE, encoding="utf-8")
    options = ("--chat_template", str(template), "--trust_request_chat_template", "--api_server_count", "2")
    with serving(*options, "--root_path", "/llm", "--max_logprobs", "-1") as running:
        yield running
