"""Turn a config into what is effective, once, and say why: asked / effective / why for every option.

`resolve` reads three frozen facts (what was asked, what the device is, what the model is) and returns a frozen `Plan`,
which the engine obeys. What turns out only later (how many KV blocks fit, a model that will not trace) is recorded by
`Plan.settle`, which returns a new plan.
"""

from torchweave.plan.facts import AttentionFacts as AttentionFacts
from torchweave.plan.facts import DeviceFacts as DeviceFacts
from torchweave.plan.facts import ModelFacts as ModelFacts
from torchweave.plan.facts import choose_device as choose_device
from torchweave.plan.plan import Entry as Entry
from torchweave.plan.plan import Plan as Plan
from torchweave.plan.plan import show as show
from torchweave.plan.resolution import DEFAULT_TOKEN_BUCKETS as DEFAULT_TOKEN_BUCKETS
from torchweave.plan.resolution import default_batch_sizes as default_batch_sizes
from torchweave.plan.resolution import resolve as resolve
