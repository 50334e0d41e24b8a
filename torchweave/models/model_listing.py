"""The list of transformers' models, read once.

To know which names its 500 models define, transformers reads the source of all of them, 1500 files, when it is imported, and again
when `transformers.models` is: what it remembers of the first time it has forgotten by then. 0.25 s of 3 s of imports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

_PREFIX = "models."


def import_models() -> None:
    """Import `transformers.models`, which lists the models."""
    with _cached_model_list():
        import_module("transformers.models")


@contextmanager
def _cached_model_list() -> Iterator[None]:
    """The second list is made of the first one in here, if that is still there; else as ever."""
    tools = import_module("transformers.utils.import_utils")
    read = getattr(tools, "define_import_structure", None)
    folder = Path(str(tools.__file__)).parents[1] / "models"
    if read is None or not hasattr(read, "cache_info"):
        yield
        return

    def define_import_structure(module_path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path) != folder / "__init__.py":
            return read(module_path, prefix)
        return models_of(read(folder, prefix="models"))  # as transformers itself has asked, which is remembered

    tools.define_import_structure = define_import_structure  # type: ignore[attr-defined]
    try:
        yield
    finally:
        tools.define_import_structure = read  # type: ignore[attr-defined]


def models_of(found: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Of names by module and by what they need: those of models, with modules counted from their folder."""
    return {
        needs: {name.removeprefix(_PREFIX): names for name, names in modules.items() if name.startswith(_PREFIX)}
        for needs, modules in found.items()
    }
