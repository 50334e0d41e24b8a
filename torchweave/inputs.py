"""vLLM's `inputs`."""

from torchweave.engine.prompts import PromptType as PromptType
from torchweave.engine.prompts import TextPrompt as TextPrompt
from torchweave.engine.prompts import TokensPrompt as TokensPrompt
