"""vLLM's `entrypoints.llm`."""

from torchweave.engine.llm import LLM as LLM
