"""Load user passes by import path."""

from __future__ import annotations

import importlib

from torchweave.compiler.passes.base import Pass


def load_pass(name: str) -> Pass:
    """Load the pass at `module:Name`: an instance, or a class, which is called without arguments.

    Raises:
        ValueError: the module or name does not exist, or the object is not a pass.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ValueError(f"passes: {name!r} does not name a pass; write module:Name, for example my_passes:DropDropout")
    try:
        loaded = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ValueError(f"passes: {name} cannot be imported ({error}); is the module on PYTHONPATH?") from error
    except AttributeError as error:
        raise ValueError(f"passes: module {module_name} has no attribute {attribute}") from error
    try:
        instance = loaded() if isinstance(loaded, type) else loaded
    except TypeError as error:
        raise ValueError(
            f"passes: {name} cannot be constructed without arguments ({error}); name an instance"
        ) from error
    if not isinstance(instance, Pass):
        facts = ("name", "stage", "numerics", "token_range", "fixpoint", "gated", "builds", "run")
        missing = ", ".join(fact for fact in facts if not hasattr(instance, fact))
        raise ValueError(
            f"passes: {name} is not a pass, it lacks {missing}; derive it from torchweave.compiler.GraphPass"
        )
    return instance
