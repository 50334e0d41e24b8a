"""vLLM's `pooling_params`."""

from torchweave.engine.pooling_methods import PoolingParams as PoolingParams
