"""langgraph with langchain-openai over Chat Completions, streamed: `langgraph_agent.py URL`."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from tools import PROMPT, TOOLS

model = ChatOpenAI(model="local", base_url=f"{sys.argv[1]}/v1", api_key="none", streaming=True)
agent = create_react_agent(model, [tool(each) for each in TOOLS], prompt="Use tools.")
print(agent.invoke({"messages": [("user", PROMPT)]})["messages"][-1].content)
