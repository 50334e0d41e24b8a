"""vLLM's `outputs`."""

from torchweave.engine.outputs import ClassificationOutput as ClassificationOutput
from torchweave.engine.outputs import ClassificationRequestOutput as ClassificationRequestOutput
from torchweave.engine.outputs import CompletionOutput as CompletionOutput
from torchweave.engine.outputs import EmbeddingOutput as EmbeddingOutput
from torchweave.engine.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
from torchweave.engine.outputs import PoolingOutput as PoolingOutput
from torchweave.engine.outputs import PoolingRequestOutput as PoolingRequestOutput
from torchweave.engine.outputs import RequestOutput as RequestOutput
from torchweave.engine.outputs import ScoringOutput as ScoringOutput
from torchweave.engine.outputs import ScoringRequestOutput as ScoringRequestOutput
