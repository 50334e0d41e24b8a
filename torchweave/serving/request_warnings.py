"""Warnings of requests: what of a request has no effect, reported in a response header, the log and the metrics.

A field that a server does not know must not break the clients that send it, and must not be dropped in silence either.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

LOGGER = logging.getLogger(__name__)
HEADER = b"x-torchweave-warning"
_MAX_HEADER_CHARS = 1000
_MAX_LOGGED = 1000
"""Most different warnings that a process logs: clients choose the names of fields."""


@dataclass
class WarningCounts:
    """The warnings of a server.

    Attributes:
        by_kind: number of warnings of this process.
        remote: those of the other HTTP processes, as of the last poll.
    """

    by_kind: Counter[str] = field(default_factory=Counter)
    remote: Sequence[Counter[str]] = ()
    _logged: set[str] = field(default_factory=set)

    @property
    def all_kinds(self) -> Counter[str]:
        return sum(self.remote, self.by_kind)

    def add(self, kind: str, sentence: str) -> None:
        """Count a warning; the first of its wording is logged."""
        self.by_kind[kind] += 1
        if sentence not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(sentence)
            LOGGER.warning("%s (further requests are counted in request_warnings)", sentence)


class RequestWarnings:
    """The warnings of one request.

    Args:
        counts: of the server; None: they are not counted.
    """

    def __init__(self, counts: WarningCounts | None = None) -> None:
        self._counts = counts
        self.sentences: list[str] = []

    def add(self, kind: str, sentence: str) -> None:
        """Add a warning; one of the same wording is added once.

        Args:
            kind: label of the counter, from a fixed set: `unknown_field`, `unsupported_tool`, `unsupported_content`,
                `reasoning_effort` or `schema`.
        """
        if sentence not in self.sentences:
            self.sentences.append(sentence)
            if self._counts is not None:
                self._counts.add(kind, sentence)

    @property
    def header(self) -> bytes:
        """Value of the response header: printable ASCII."""
        text = " ".join(self.sentences)
        text = text if len(text) <= _MAX_HEADER_CHARS else text[: _MAX_HEADER_CHARS - 3] + "..."
        return "".join(char if " " <= char <= "~" else "?" for char in text).encode()
