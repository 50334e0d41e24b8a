"""Resolve a model name to a folder or a config: built-in models, folders, hub ids and benchmark shapes.

Importing this module does not import torch: a wrong name is refused before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchweave.config.model_shapes import SHAPES
from torchweave.config.options import expand_path

BUILT_IN = {"demo": "demo", "demo-draft": "demo_draft", "demo-eagle": "demo_eagle"}
"""Built-in models, and the draft head of `demo`: name -> folder in `_BUILT_IN_FOLDER`."""
_BUILT_IN_FOLDER = Path(__file__).parents[1] / "models"

ADAPTER = "adapter_config.json"
_POINTER_START = b"version https://git-lfs"
_READ = frozenset({".json", ".jinja", ".model", ".txt"})
"""Kinds of files that are read beside the weights."""
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True)
class Source:
    """Source of a model: a folder or a config.

    Attributes:
        name: the name given by the user, or the config's model type.
        folder: files of the checkpoint; None for a shape.
        config: the config if there is no folder.
        overrides: fields that replace the config's, see `EngineConfig.hf_overrides`.
    """

    name: str
    folder: Path | None
    config: dict[str, Any] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def raw_config(self) -> dict[str, Any]:
        """The config as in config.json, with the overrides.

        Raises:
            ValueError: the file holds no JSON object.
        """
        raw = self.config if self.folder is None else read_json(self.folder / "config.json")
        return override(raw or {}, self.overrides)


def resolve(
    name: str | Path | Mapping[str, Any],
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Source:
    """Find a model by name.

    Args:
        overrides: see `Source`.
        revision: branch, tag or commit of a hub model; None: its main branch.
        download_dir: folder for a hub model; None: Hugging Face's cache.

    Raises:
        ValueError: the model exists neither locally nor on the hub, or the hub is unreachable.
    """
    if isinstance(name, Mapping):
        source = Source(str(name.get("model_type", "config")), None, dict(name))
    elif (local := local_source(name, revision)) is not None:
        source = local
    else:
        text = str(name)
        source = Source(text, _checked(_download(text, trust_remote_code, revision, download_dir), text))
    return replace(source, overrides=overrides) if overrides else source


def override(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values of some fields; a nested config keeps its further fields.

    RoPE's older names, `rope_scaling` and `rope_theta`, change `rope_parameters` where a config has these.
    """
    merged = dict(config)
    for name, value in overrides.items():
        nested, rope = merged.get(name), merged.get("rope_parameters")
        if name in ("rope_scaling", "rope_theta") and isinstance(rope, Mapping):
            if name == "rope_theta":
                merged["rope_parameters"] = {**rope, name: value}
            else:
                kept = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
                merged["rope_parameters"] = {**kept, **(value or {"rope_type": "default"})}
        elif name.endswith("_config") and isinstance(nested, Mapping) and isinstance(value, Mapping):
            merged[name] = override(nested, value)
        else:
            merged[name] = value
    return merged


def local_source(name: str | Path, revision: str | None = None) -> Source | None:
    """Find a model on this machine by name; None for a hub id.

    Raises:
        ValueError: the name is neither a hub id nor that of a model here.
    """
    text = str(name)
    source = _named_source(text)
    if source is not None and revision is not None:
        raise ValueError(f"revision={revision!r} is of a model on the hub, but {text!r} is here; leave revision out.")
    if source is None and not (
        isinstance(name, str) and _HUB_ID.fullmatch(text) and not text.startswith((".", "/", "~"))
    ):
        raise ValueError(
            f"No model at {text!r}: expected a folder in Hugging Face's layout, a hub id like 'organisation/model', "
            f"or one of {', '.join(sorted(BUILT_IN))}."
        )
    return source


def resolve_tokenizer(name: str, trust_remote_code: bool = False, download_dir: str | None = None) -> Path:
    """Find the folder of a tokenizer by name: a folder, a hub id or a built-in model.

    Raises:
        ValueError: it exists neither here nor on the hub.
    """
    folder = expand_path(name)
    if folder.is_dir():
        return folder
    found = resolve(name, trust_remote_code, download_dir=download_dir).folder
    if found is None:
        raise ValueError(f"tokenizer={name!r} is a shape without files; give a folder or a hub id.")
    return found


def _named_source(text: str) -> Source | None:
    """A built-in model, a shape or a folder; None if there is none of that name."""
    if text in SHAPES:
        return Source(text, None, dict(SHAPES[text]))
    if text.startswith("shape:"):
        raise ValueError(f"Unknown shape {text!r}: the shapes are {', '.join(sorted(SHAPES))}.")
    if text in BUILT_IN:
        return Source(text, _checked(_BUILT_IN_FOLDER / BUILT_IN[text], text))
    folder = expand_path(text)
    try:
        if folder.exists():
            return Source(text, _checked(folder, text))
    except OSError as error:  # e.g. a name that is too long or missing permissions
        raise ValueError(
            f"{text[:100]!r} cannot be read ({error.strerror}); give the path of a model folder."
        ) from error
    return None


def is_eagle_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head, in either published form."""
    names = config.get("architectures") or ()
    if "speculators_model_type" in config:
        return config["speculators_model_type"] == "eagle3"
    return any("eagle3" in name.lower() for name in names if isinstance(name, str))


def reject_draft_head(name: str, folder: Path) -> None:
    """Reject a folder that is no model of its own.

    Raises:
        ValueError: it is a draft head.
    """
    if is_eagle_head(read_json(folder / "config.json")):
        raise ValueError(
            f"{name} is an EAGLE-3 draft head and no model: it drafts for the model that it was trained for. Name that model, and "
            f"add --speculative_config.method eagle3 --speculative_config.model {name}."
        )


def check_no_adapter(source: Source, ignored: bool) -> None:
    """Reject a model with an adapter beside it, which transformers would apply.

    Args:
        ignored: load the model without its adapter.

    Raises:
        ValueError: there is an adapter.
    """
    if ignored or source.folder is None or not (source.folder / ADAPTER).is_file():
        return
    raise ValueError(
        f"{source.name!r} has {_adapter(source.folder)} beside the model, which transformers would apply; move it into a "
        "folder of its own and serve it with enable_lora, merge it (PEFT's merge_and_unload), or load the model alone with "
        "ignore_unused_weights=true."
    )


def _adapter(folder: Path) -> str:
    config = read_json(folder / ADAPTER)
    return (
        f"an adapter ({config.get('peft_type', 'PEFT')}) of {config.get('base_model_name_or_path') or 'a base model'}"
    )


def check_no_pointer(file: Path) -> None:
    """Raise `ValueError` for a pointer that Git LFS leaves where a clone did not download a file."""
    with file.open("rb") as content:
        if content.read(len(_POINTER_START)) == _POINTER_START:
            raise ValueError(
                f"{file} is a pointer of Git LFS and not the file itself; run `git lfs pull` in its folder, or download it again."
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError if the file holds none."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; copy or download the file again.")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Read a JSON list; ValueError if the file holds none."""
    content = _read_json(path)
    if not isinstance(content, list):
        raise ValueError(f"{path} is not a JSON list; copy or download the file again.")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy or download the file again.") from error


def _checked(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        if folder.suffix == ".gguf":
            raise ValueError(_gguf(name))
        raise ValueError(f"{name!r} is a file: expected the model's folder, with config.json and *.safetensors in it.")
    for entry in sorted(folder.iterdir()):
        if not (entry.is_file() or entry.is_dir()):
            kind = (
                "a link to a file that does not exist" if entry.is_symlink() else "no regular file (a pipe or a device)"
            )
            raise ValueError(f"{entry} is {kind}; copy or download the model again.")
        if entry.suffix in _READ and entry.is_file():
            check_no_pointer(entry)
    has_weights = any(not path.name.startswith("adapter_") for path in folder.glob("*.safetensors")) or any(
        folder.glob("pytorch_model*")
    )
    if (folder / ADAPTER).is_file() and not has_weights:
        raise ValueError(
            f"{name!r} is {_adapter(folder)} and no model; name that model and serve the adapter beside it (enable_lora, "
            "lora_modules), or merge it (PEFT's merge_and_unload) and give the folder of the result."
        )
    if not has_weights and any(folder.glob("*.gguf")):
        raise ValueError(_gguf(name))
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name!r} has no config.json: expected a model folder in Hugging Face's layout.")
    return folder


def _gguf(name: str) -> str:
    return (
        f"{name!r} is a model in GGUF, which is not read; give the model's folder in Hugging Face's layout, or write one from it: "
        "AutoModelForCausalLM.from_pretrained(folder, gguf_file=file).save_pretrained(new_folder), and the same of AutoTokenizer."
    )


def _download(
    hub_id: str, trust_remote_code: bool, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Files of a hub model, from the local hub cache or the network."""
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"] + (["*.py"] if trust_remote_code else [])

    def download(patterns: list[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id,
                revision=revision,
                cache_dir=None if download_dir is None else expand_path(download_dir),
                allow_patterns=patterns,
                # Of subfolders only JSON: that of sentence-transformers' pooling.
                ignore_patterns=["*/*/*", *(f"*/{pattern}" for pattern in patterns if pattern != "*.json")],
            )
        )

    try:
        folder = download(patterns)
        return folder if any(folder.glob("*.safetensors")) else download([*patterns, "pytorch_model*.bin"])
    except RevisionNotFoundError as error:
        raise ValueError(f"{hub_id!r} has no revision {revision!r}; give a branch, a tag or a commit of it.") from error
    except GatedRepoError as error:
        raise ValueError(
            f"{hub_id!r} is gated: accept its terms on the hub and log in with `hf auth login`, then try again."
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{hub_id!r} is neither a local folder nor a model on the hub; check the spelling.") from error
    except HFValidationError as error:
        raise ValueError(f"{hub_id!r} is neither a local folder nor a valid hub id.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{hub_id!r} is not a local folder, and the hub is unreachable; give the path of a model folder."
        ) from error
