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
