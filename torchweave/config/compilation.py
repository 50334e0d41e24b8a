"""vLLM's `CompilationConfig` and `DynamicShapesConfig`, for scripts that import them: dicts of the fields that they are given.

`LLM(compilation_config=...)` takes such a dict, and refuses unknown fields.
"""

from __future__ import annotations

from typing import Any


class DynamicShapesType:
    """Values of `DynamicShapesConfig.type`."""

    BACKED = "backed"
    UNBACKED = "unbacked"
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"


class DynamicShapesConfig(dict[str, Any]):
    """`DynamicShapesConfig(type=DynamicShapesType.UNBACKED)`."""


class CompilationConfig(dict[str, Any]):
    """`CompilationConfig(compile_sizes=[1, 2], dynamic_shapes_config=DynamicShapesConfig(...))`."""
