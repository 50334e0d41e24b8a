"""vLLM's `engine.arg_utils`."""

from torchweave.config.engine_args import EngineArgs as EngineArgs

AsyncEngineArgs = EngineArgs
