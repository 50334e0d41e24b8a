"""Options and their resolution: `resolve` turns an `EngineConfig` into a `Plan` (asked, effective, why per option).

`resolve` reads frozen facts about the device and the model and returns a frozen `Plan` for the engine. Later changes (the
number of KV blocks, a failed capture) go through `Plan.with_effective`, which returns a new plan.
"""

from torchweave.config.facts import AttentionFacts as AttentionFacts
from torchweave.config.facts import DeviceFacts as DeviceFacts
from torchweave.config.facts import ModelFacts as ModelFacts
from torchweave.config.facts import choose_device as choose_device
from torchweave.config.options import EngineConfig as EngineConfig
from torchweave.config.options import TorchCompileConfig as TorchCompileConfig
from torchweave.config.plan import Plan as Plan
from torchweave.config.plan import format_value as format_value
from torchweave.config.resolve import DEFAULT_TOKEN_BUCKETS as DEFAULT_TOKEN_BUCKETS
from torchweave.config.resolve import default_batch_sizes as default_batch_sizes
from torchweave.config.resolve import default_token_buckets as default_token_buckets
from torchweave.config.resolve import resolve as resolve
