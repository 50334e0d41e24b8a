"""openai-agents over the Responses API: `openai_agents.py URL`."""

import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from tools import PROMPT, TOOLS

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
model = OpenAIResponsesModel("local", client)
agent = Agent(name="a", instructions="Use tools.", tools=[function_tool(tool) for tool in TOOLS], model=model)
print(Runner.run_sync(agent, PROMPT).final_output)
