"""Torchweave: compile unmodified Hugging Face decoders and serve them.

Public names are imported on first use, which keeps `import torchweave` fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchweave.version import __version__ as __version__

if TYPE_CHECKING:
    from torchweave.compiler.api import compile as compile
    from torchweave.config.engine_args import EngineArgs as EngineArgs
    from torchweave.config.options import CudaGraphConfig as CudaGraphConfig
    from torchweave.config.options import EngineConfig as EngineConfig
    from torchweave.config.options import TorchCompileConfig as TorchCompileConfig
    from torchweave.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
    from torchweave.engine.async_llm import AsyncLLM as AsyncLLM
    from torchweave.engine.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from torchweave.engine.async_llm import LLMEngine as LLMEngine
    from torchweave.engine.batch_manager import BatchManager as BatchManager
    from torchweave.engine.gpt_manager import GptManager as GptManager
    from torchweave.engine.llm import LLM as LLM
    from torchweave.engine.lora_request import LoRARequest as LoRARequest
    from torchweave.engine.outputs import BeamSearchParams as BeamSearchParams
    from torchweave.engine.outputs import ClassificationOutput as ClassificationOutput
    from torchweave.engine.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from torchweave.engine.outputs import CompletionOutput as CompletionOutput
    from torchweave.engine.outputs import EmbeddingOutput as EmbeddingOutput
    from torchweave.engine.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from torchweave.engine.outputs import Logprob as Logprob
    from torchweave.engine.outputs import PoolingOutput as PoolingOutput
    from torchweave.engine.outputs import PoolingRequestOutput as PoolingRequestOutput
    from torchweave.engine.outputs import RequestOutput as RequestOutput
    from torchweave.engine.outputs import ScoringOutput as ScoringOutput
    from torchweave.engine.outputs import ScoringRequestOutput as ScoringRequestOutput
    from torchweave.engine.pooling_methods import PoolingParams as PoolingParams
    from torchweave.engine.prompts import PromptType as PromptType
    from torchweave.engine.prompts import TextPrompt as TextPrompt
    from torchweave.engine.prompts import TokensPrompt as TokensPrompt
    from torchweave.engine.request import InferenceRequest as InferenceRequest
    from torchweave.engine.request import RequestOutputKind as RequestOutputKind
    from torchweave.engine.request import SamplingParams as SamplingParams
    from torchweave.engine.request import StructuredOutputs as StructuredOutputs
    from torchweave.engine.sampling.logits_processors import DeviceLogitsProcessor as DeviceLogitsProcessor
    from torchweave.engine.sampling.logits_processors import HostLogitsProcessor as HostLogitsProcessor
    from torchweave.engine.startup.open import open_engine as open_engine
    from torchweave.ops.registry import register_custom_op as register_custom_op

LAZY_EXPORTS = {
    "LLM": "torchweave.engine.llm",
    "AsyncLLM": "torchweave.engine.async_llm",
    "LoRARequest": "torchweave.engine.lora_request",
    "SamplingParams": "torchweave.engine.request",
    "StructuredOutputs": "torchweave.engine.request",
    "InferenceRequest": "torchweave.engine.request",
    "BeamSearchParams": "torchweave.engine.outputs",
    "CompletionOutput": "torchweave.engine.outputs",
    "Logprob": "torchweave.engine.outputs",
    "RequestOutput": "torchweave.engine.outputs",
    "BatchManager": "torchweave.engine.batch_manager",
    "GptManager": "torchweave.engine.gpt_manager",
    "DeviceLogitsProcessor": "torchweave.engine.sampling.logits_processors",
    "HostLogitsProcessor": "torchweave.engine.sampling.logits_processors",
    "AsyncEngineArgs": "torchweave.engine.arg_utils",
    "EngineArgs": "torchweave.config.engine_args",
    "AsyncLLMEngine": "torchweave.engine.async_llm",
    "LLMEngine": "torchweave.engine.async_llm",
    "PoolingParams": "torchweave.engine.pooling_methods",
    "PromptType": "torchweave.engine.prompts",
    "TextPrompt": "torchweave.engine.prompts",
    "TokensPrompt": "torchweave.engine.prompts",
    "ClassificationOutput": "torchweave.engine.outputs",
    "ClassificationRequestOutput": "torchweave.engine.outputs",
    "EmbeddingOutput": "torchweave.engine.outputs",
    "EmbeddingRequestOutput": "torchweave.engine.outputs",
    "PoolingOutput": "torchweave.engine.outputs",
    "PoolingRequestOutput": "torchweave.engine.outputs",
    "ScoringOutput": "torchweave.engine.outputs",
    "ScoringRequestOutput": "torchweave.engine.outputs",
    "RequestOutputKind": "torchweave.engine.request",
    "open_engine": "torchweave.engine.startup.open",
    "EngineConfig": "torchweave.config.options",
    "TorchCompileConfig": "torchweave.config.options",
    "CudaGraphConfig": "torchweave.config.options",
    "compile": "torchweave.compiler.api",
    "register_custom_op": "torchweave.ops.registry",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchManager",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "CudaGraphConfig",
    "DeviceLogitsProcessor",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "GptManager",
    "HostLogitsProcessor",
    "InferenceRequest",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "TorchCompileConfig",
    "compile",
    "open_engine",
    "register_custom_op",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY_EXPORTS:
        raise AttributeError(f"module 'torchweave' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(LAZY_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
