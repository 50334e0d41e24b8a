"""Load and unload low-rank adapters while the engine serves."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torchweave.engine.control.errors import ControlError
from torchweave.engine.control.host import Host
from torchweave.engine.control.rank import Rank
from torchweave.engine.runner.parts.adapters import AdaptersPart as RankAdapters
from torchweave.engine.scheduler.parts.adapters import AdaptersPart
from torchweave.models.weights.peft_adapter import read_adapter

_LOADING = "adapters being loaded"


def load_adapter(
    host: Host, adapter: str, path: str, max_rank: int, replace: bool = False
) -> Generator[None, None, dict[str, Any]]:
    """Let requests name the adapter in a folder; steps run while its files are read.

    Args:
        max_rank: the option `max_lora_rank`.
        replace: an adapter of this name may be loaded already: later requests have the new one, earlier ones keep theirs.

    Raises:
        ValueError: the name is taken, or the adapter is damaged or not supported.
        ControlError: adapters are off, or the same name is being loaded.
    """
    part = _part(host)
    if not (isinstance(adapter, str) and adapter and isinstance(path, str) and path):
        raise ValueError(f"An adapter has a name and the folder of its files, but these are {adapter!r} and {path!r}.")
    if adapter in part.by_name and not replace:
        raise ValueError(
            f"The adapter {adapter!r} is loaded already, from {part.by_name[adapter].path}; unload it, or replace it "
            "(load_inplace)."
        )
    loading: set[str] = host.state.setdefault(_LOADING, set())
    if adapter in loading:
        raise ControlError(f"The adapter {adapter!r} is being loaded; wait until that has ended.", "conflict")
    loading.add(adapter)
    try:
        yield from host.in_background(lambda: read_adapter(path, max_rank))  # files that are wrong stop no step
        number = part.new_number()
        try:
            missing = [set(each) for each in host.on_ranks("load_adapter", number=number, path=path, max_rank=max_rank)]
            if lost := sorted(set.intersection(*missing)):
                raise ValueError(
                    f"The adapter {path} changes {lost[0]}, for which there is no place in this model{_why(host, lost[0])}."
                )
        except (ControlError, ValueError):
            host.on_ranks("drop_adapters", numbers=[number])
            raise
        part.add_adapter(adapter, number, path)
        _drop_unused(host, part)
    finally:
        loading.discard(adapter)
    return {"name": adapter, "path": path}


def unload_adapter(host: Host, adapter: str) -> None:
    """Take an adapter from later requests; those that have it end with it.

    Raises:
        ValueError: there is no such adapter.
        ControlError: adapters are off.
    """
    part = _part(host)
    if adapter not in part.by_name:
        raise ValueError(f"There is no adapter {adapter!r}; loaded are: {', '.join(sorted(part.by_name)) or 'none'}.")
    part.remove_adapter(adapter)
    _drop_unused(host, part)


def list_adapters(host: Host) -> dict[str, str]:
    """The folders of the loaded adapters, by name; empty where adapters are off."""
    part = host.scheduler.parts.held.get(AdaptersPart.name)
    return {name: adapter.path for name, adapter in part.by_name.items()} if isinstance(part, AdaptersPart) else {}


def load_on_rank(rank: Rank, number: int, path: str, max_rank: int) -> list[str]:
    """Keep this rank's part of an adapter in host memory; returns the linears without a place here."""
    part, adapter = _rank_part(rank), read_adapter(path, max_rank)
    if changed := [name for name, tensor in adapter.copies.items() if not part.slots.has_tensor(name, tensor)]:
        raise ValueError(f"The adapter {path} changes the model's own {changed[0]}, which all requests share.")
    pairs = {name: part.slots.part_of(name, pair) for name, pair in adapter.pairs.items()}
    try:
        return part.store(number, {name: (pair.a, pair.b) for name, pair in pairs.items()})
    except ValueError as error:
        raise ValueError(f"The adapter {path} cannot be loaded: {error}.") from None


def drop_on_rank(rank: Rank, numbers: list[int]) -> None:
    """Forget adapters that no request has."""
    _rank_part(rank).drop(numbers)


def _part(host: Host) -> AdaptersPart:
    part = host.scheduler.parts.held.get(AdaptersPart.name)
    if not isinstance(part, AdaptersPart):
        raise ControlError("Adapters are off; start the engine with enable_lora.", "conflict")
    return part


def _rank_part(rank: Rank) -> RankAdapters:
    part = rank.runner.parts[RankAdapters.name]
    assert isinstance(part, RankAdapters), "the host has checked that adapters are on"
    return part


def _drop_unused(host: Host, part: AdaptersPart) -> None:
    if unused := part.take_unused():
        host.on_ranks("drop_adapters", numbers=unused)


def _why(host: Host, name: str) -> str:
    """Why a linear has no place, as a clause after the sentence, if a rank knows."""
    reasons = {why for why in host.on_ranks("adapter_refusal", linear=name) if why}
    return f": {reasons.pop()}" if reasons else ""


def refusal_on_rank(rank: Rank, linear: str) -> str:
    """Why a linear takes no adapter; empty if it is not known."""
    return _rank_part(rank).slots.refusals.get(linear, "")
