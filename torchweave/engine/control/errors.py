"""Errors of control calls, without torch: HTTP processes import them."""

from __future__ import annotations

from typing import Literal, NamedTuple

ErrorKind = Literal["invalid", "conflict", "failed"]
"""Invalid name or arguments; not possible in the engine's state; any other failure of a handler."""


class ControlError(RuntimeError):
    """A control call failed; the engine continues to serve.

    Attributes:
        kind: see `ErrorKind`.
    """

    def __init__(self, sentence: str, kind: ErrorKind = "failed") -> None:
        super().__init__(sentence)
        self.kind: ErrorKind = kind


class Fault(NamedTuple):
    """An error of a handler, in one sentence, as it travels between processes."""

    sentence: str
    kind: ErrorKind


def fault_of(error: Exception) -> Fault:
    """What travels of an error: a `ValueError` says that the arguments are invalid."""
    if isinstance(error, ControlError):
        return Fault(str(error), error.kind)
    if isinstance(error, ValueError):
        return Fault(str(error), "invalid")
    return Fault(str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}", "failed")


def joined(faults: dict[str, Fault]) -> ControlError:
    """One error for those of several ranks or engines, by their names; the same error of all is said once."""
    kinds: set[ErrorKind] = {fault.kind for fault in faults.values()}
    kind = kinds.pop() if len(kinds) == 1 else "failed"
    return ControlError(" ".join(f"{name}: {fault.sentence}" for name, fault in faults.items()), kind)
