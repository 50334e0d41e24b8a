"""Passes from outside the package, by name."""

from __future__ import annotations

import importlib

from torchweave.compiler.passes.base import Pass


def load_pass(name: str) -> Pass:
    """The pass that `module:Name` names: an instance, or a class that is called without arguments.

    Raises:
        ValueError: there is no such module or name, or what is there is no pass.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise ValueError(f"passes: {name!r} does not name a pass; write module:Name, for example my_passes:DropDropout")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ValueError(f"passes: {name} cannot be imported ({error}); is the module on PYTHONPATH?") from error
    except AttributeError as error:
        raise ValueError(f"passes: {name} is not there; module {module_name} has nothing called {attribute}") from error
    try:
        made = found() if isinstance(found, type) else found
    except TypeError as error:
        raise ValueError(
            f"passes: {name} cannot be made without arguments ({error}); name an instance of it"
        ) from error
    if not isinstance(made, Pass):
        facts = ("name", "stage", "numerics", "token_range", "fixpoint", "gated", "builds", "run")
        missing = ", ".join(fact for fact in facts if not hasattr(made, fact))
        raise ValueError(
            f"passes: {name} is no pass, it has no {missing}; derive it from torchweave.compiler.GraphPass"
        )
    return made
