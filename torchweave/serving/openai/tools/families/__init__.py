"""The families of models whose calls are parsed. A family is one file with a `FAMILY`, listed here.

The first family whose text stands in a chat template is the template's: the most specific texts come first.
"""

from __future__ import annotations

from torchweave.plug_points import TOOL_PARSERS
from torchweave.serving.openai.tools.families.headed import (
    deepseek_v3,
    functiongemma,
    gemma4,
    gpt_oss,
    kimi_k2,
    kimi_k3,
    mistral,
)
from torchweave.serving.openai.tools.families.json_objects import (
    cohere,
    ernie45,
    granite,
    granite31,
    hermes,
    internlm,
    jamba,
    llama3_json,
    longcat,
    nemotron_json,
    phi4_mini,
    phi4_tool_call,
    xlam,
)
from torchweave.serving.openai.tools.families.python import lfm2, olmo3, pythonic
from torchweave.serving.openai.tools.families.tagged import (
    deepseek_v4,
    deepseek_v32,
    glm45,
    hy_v3,
    minimax_m2,
    minimax_m3,
    qwen3_coder,
    seed_oss,
    step3,
)
from torchweave.serving.openai.tools.family import Family

_FILES = (
    mistral, gpt_oss, seed_oss, minimax_m3, minimax_m2, longcat, hy_v3, glm45, qwen3_coder, deepseek_v4, deepseek_v32,
    deepseek_v3, step3, kimi_k3, kimi_k2, internlm, cohere, lfm2, olmo3, functiongemma, gemma4, nemotron_json, phi4_mini,
    phi4_tool_call, granite, granite31, jamba, ernie45, hermes, xlam, llama3_json, pythonic,
)  # fmt: skip
FAMILIES: dict[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES}
"""By name, the most specific texts of templates first."""
for _family in FAMILIES.values():
    for _name in (_family.name, *_family.aliases):
        TOOL_PARSERS.register(_name, _family)
