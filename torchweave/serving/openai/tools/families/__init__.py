"""The families of models whose calls are parsed. A family is one file with a `FAMILY`, listed here.

The first family whose text stands in a chat template is the template's: the most specific texts come first.
"""

from __future__ import annotations

from torchweave.serving.openai.tools.families.headed import deepseek_v3, gpt_oss, kimi_k2, mistral
from torchweave.serving.openai.tools.families.json_objects import (
    granite,
    granite31,
    hermes,
    internlm,
    jamba,
    llama3_json,
    phi4_mini,
    phi4_tool_call,
)
from torchweave.serving.openai.tools.families.python import pythonic
from torchweave.serving.openai.tools.families.tagged import deepseek_v32, glm45, minimax_m2, qwen3_coder, seed_oss
from torchweave.serving.openai.tools.family import Family

_FILES = (
    mistral, gpt_oss, seed_oss, minimax_m2, glm45, qwen3_coder, deepseek_v32, deepseek_v3, kimi_k2, internlm, phi4_mini,
    phi4_tool_call, granite, granite31, jamba, hermes, llama3_json, pythonic,
)  # fmt: skip
FAMILIES: dict[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES}
"""By the name of the option `tool_call_parser`."""
