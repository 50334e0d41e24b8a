"""pydantic-ai over Chat Completions: `pydantic_agent.py URL`."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from tools import PROMPT, TOOLS

model = OpenAIChatModel("local", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
print(Agent(model, instructions="Use tools.", tools=list(TOOLS)).run_sync(PROMPT).output)
