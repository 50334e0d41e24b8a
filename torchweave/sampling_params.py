"""vLLM's `sampling_params`."""

from torchweave.engine.outputs import BeamSearchParams as BeamSearchParams
from torchweave.engine.request import RequestOutputKind as RequestOutputKind
from torchweave.engine.request import SamplingParams as SamplingParams
from torchweave.engine.request import StructuredOutputs as StructuredOutputs

StructuredOutputsParams = GuidedDecodingParams = StructuredOutputs
