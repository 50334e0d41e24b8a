"""`LoRARequest`: the adapter of a request, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name, and where it is.

    Attributes:
        lora_name: of the adapter; requests with an equal name share it.
        lora_int_id: a number from 1 on, vLLM's; adapters are told apart by their names.
        lora_path: folder that PEFT has saved.

    Raises:
        ValueError: the name or the path is empty, or the number is below 1.
    """

    lora_name: str
    lora_int_id: int = field(default=1, compare=False)
    lora_path: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be a name, but is {self.lora_name!r}.")
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be a number from 1 on, but is {self.lora_int_id!r}.")
        object.__setattr__(self, "lora_path", str(self.lora_path))
        if not self.lora_path:
            raise ValueError(f"lora_path of {self.lora_name!r} must be the folder of an adapter, but is empty.")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


def requests_of(requests: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[LoRARequest | None]:
    """One request for each of `count` prompts.

    Raises:
        ValueError: there are more or fewer, or something else is among them.
    """
    each = list(requests) if isinstance(requests, (list, tuple)) else [requests] * count
    if wrong := [request for request in each if not isinstance(request, LoRARequest | None)]:
        raise ValueError(f"lora_request must be a LoRARequest, a list of them, or None, but holds {wrong[0]!r}.")
    if len(each) != count:
        raise ValueError(f"Got {count} prompts but {len(each)} lora_requests; give one for each, or one for all.")
    return each  # type: ignore[return-value]
