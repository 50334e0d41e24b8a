"""Config of engines whose model is captured, for tests of what happens around its graph."""

from __future__ import annotations

from torchweave import TorchCompileConfig
from torchweave.compiler.passes.manager import default_passes

CAPTURED = TorchCompileConfig(
    enable_inductor=False,
    compile_cache=False,
    # Tracing a piece for its passes takes as long as the capture; tests/compiler/passes and `models verify` run them.
    disabled_passes=tuple(each.name for each in default_passes() if each.stage == "aten"),
)
