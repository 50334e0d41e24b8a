"""smolagents over Chat Completions: `smolagents_agent.py URL`."""

import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from tools import PROMPT, TOOLS

model = OpenAIServerModel(model_id="local", api_base=f"{sys.argv[1]}/v1", api_key="none")
print(ToolCallingAgent(tools=[tool(each) for each in TOOLS], model=model, verbosity_level=0).run(PROMPT))
