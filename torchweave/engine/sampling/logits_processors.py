"""Logits processors of users: classes that change the logits of requests before a token is sampled.

Two forms, named by the option `logits_processors`. A `HostLogitsProcessor` runs Python in the leader's process from the tokens that
a request has so far; only requests that it takes wait for it. A `DeviceLogitsProcessor` is torch code within every step, also of
recorded ones, on the rank that samples. Both read their arguments from `SamplingParams.extra_args`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchweave.config.options import EngineConfig
from torchweave.engine.request import SamplingParams
from torchweave.plug_points import LOGITS_PROCESSORS
from torchweave.utils.registry import PluginError

if TYPE_CHECKING:
    from torch import Tensor, device


class HostLogitsProcessor:
    """Adds numbers to the logits of a request's next token, given its tokens.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def start(self, params: SamplingParams, prompt: np.ndarray) -> Any:
        """What `bias` takes for a request; None: the request is not processed. `prompt` is int32 `[tokens]`.

        Raises:
            ValueError: an argument is invalid; the request is refused with the message.
        """
        raise NotImplementedError

    def bias(self, requests: Sequence[Any], outputs: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Add to the logits of several requests at the same time.

        Args:
            requests: what `start` returned.
            outputs: the tokens generated so far, int32.
            out: float32 `[requests, V]`, to which it adds; `-inf` excludes a token.
        """
        raise NotImplementedError


class DeviceLogitsProcessor:
    """Changes logits within a step: torch code without host synchronization or data-dependent shapes, so that it can be recorded.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, device: device) -> None:
        self.vocab_size, self.device = vocab_size, device

    @staticmethod
    def value(params: SamplingParams) -> float:
        """The request's number, which `apply` gets; 0: the request is not processed.

        Raises:
            ValueError: an argument is invalid; the request is refused with the message.
        """
        raise NotImplementedError

    def apply(self, logits: Tensor, values: Tensor) -> Tensor:
        """The processed logits.

        Args:
            logits: float32 `[rows, V]`, after temperature-free model output and before all filters.
            values: float32 `[rows, 1]`, of `value`; rows with 0 must come out as they are.
        """
        raise NotImplementedError


Processor = type[HostLogitsProcessor] | type[DeviceLogitsProcessor]


def load_processors(config: EngineConfig) -> list[Processor]:
    """The classes that the option `logits_processors` names.

    Raises:
        ValueError: one does not exist, is no logits processor, or does not go with other options.
    """
    names, method = config.logits_processors, config.speculative_config.method
    classes = [LOGITS_PROCESSORS.get(name, config.plugins) for name in names]
    for name, each in zip(names, classes, strict=True):
        if not (isinstance(each, type) and issubclass(each, HostLogitsProcessor | DeviceLogitsProcessor)):
            raise PluginError(
                f"logits_processors={name!r} is no class derived from torchweave.HostLogitsProcessor or DeviceLogitsProcessor; "
                "derive it from one of them"
            )
        if method is not None and issubclass(each, DeviceLogitsProcessor):
            raise ValueError(
                f"logits_processors={name!r} runs within steps, which is not supported with speculative_config.method={method}; "
                "leave one of them out, or derive it from HostLogitsProcessor"
            )
    return classes


def of_form(classes: Sequence[Processor], form: type) -> list[Any]:
    """The classes of one form, in order."""
    return [each for each in classes if issubclass(each, form)]
