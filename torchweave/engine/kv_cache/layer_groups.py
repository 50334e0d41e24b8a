"""Layers that see equally far back share block numbers: which layers do, and how many blocks a sequence needs of each group.

A model whose layers all see everything is one group, and so is one whose layers all have the same window. In a mix, a block has
room for the keys and values of some `width` layers, and layers of one kind are dealt into groups of that many; a sequence
takes a block of every group for each `block_size` tokens, out of one pool, and a group with a window gives back what none
of its layers can see any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchweave.ops.attention.op import LayerSpec

MAX_GROUPS = 8  # each has a block table of its own, which every step reads


@dataclass(frozen=True)
class AttentionWindow:
    """What a query sees: the last `window` keys, itself included; those of its own stretch of `chunk`; 0: all."""

    window: int = 0
    chunk: int = 0

    @property
    def max_keys(self) -> int:
        """Most keys that a query sees; 0: all."""
        return min((size for size in (self.window, self.chunk) if size), default=0)

    def first_visible(self, positions: np.ndarray) -> np.ndarray:
        """First position that queries at `positions` see, or one before."""
        first_visible = np.zeros_like(positions)
        if self.window:
            first_visible = np.maximum(positions - self.window + 1, first_visible)
        if self.chunk:
            first_visible = np.maximum(positions // self.chunk * self.chunk, first_visible)
        return first_visible

    def resets_at(self, position: int) -> bool:
        """Whether a query at `position` sees nothing before itself."""
        return self.window == 1 or bool(self.chunk and position % self.chunk == 0)

    def most_tokens(self, num_tokens: int, longest_step: int) -> int:
        """Most tokens of a sequence of `num_tokens` that are held at once, when a step adds up to `longest_step`."""
        return min(num_tokens, self.max_keys + longest_step) if self.max_keys else num_tokens


def max_blocks_needed(windows: Sequence[AttentionWindow], num_tokens: int, step: int, block_size: int) -> np.ndarray:
    """Most blocks of each group that a sequence of `num_tokens` tokens holds at once, if it grows by at most `step` at a time."""
    num_logical_blocks = -(-num_tokens // block_size)
    tokens = (window.most_tokens(num_tokens, step) for window in windows)
    return np.array([min(-(-each // block_size) + 1, num_logical_blocks) for each in tokens])


def longest_sequence(
    windows: Sequence[AttentionWindow], num_blocks: int, step: int, block_size: int, limit: int
) -> int:
    """Most tokens, `limit` at the most, of a sequence that so many blocks hold to its end."""
    low, high = 0, -(-limit // block_size)  # in columns
    while low < high:
        middle = (low + high + 1) // 2
        needed = int(max_blocks_needed(windows, middle * block_size, step, block_size).sum())
        low, high = (middle, high) if -(-needed // len(windows)) <= num_blocks // len(windows) else (low, middle - 1)
    return min(low * block_size, limit)


@dataclass(frozen=True)
class KVLayout:
    """Where the layers' keys and values are.

    Attributes:
        windows: of each group.
        groups: of each layer, its group.
        layer_slots: of each layer, its place among those that a block has room for.
    """

    windows: tuple[AttentionWindow, ...]
    groups: tuple[int, ...]
    layer_slots: tuple[int, ...]

    @property
    def width(self) -> int:
        """Layers that a block has room for."""
        return max(self.layer_slots) + 1


def group_layers(layers: Sequence[LayerSpec], max_model_len: int) -> KVLayout:
    """Groups of layers; one group of all where that serves as well, or where layers of different sizes leave no choice."""
    kinds: dict[AttentionWindow, list[int]] = {}
    for index, layer in enumerate(layers):
        window = AttentionWindow(layer.window, layer.chunk)
        kinds.setdefault(window if 0 < window.max_keys < max_model_len else AttentionWindow(), []).append(index)
    sizes = {replace(layer, window=0, chunk=0, softcap=0.0, sinks=False, k_scale=1.0, v_scale=1.0) for layer in layers}
    width = _width([len(members) for members in kinds.values()]) if len(sizes) == 1 else 0
    if len(kinds) == 1:
        width = len(layers)
    if not width:
        return KVLayout((AttentionWindow(),), (0,) * len(layers), tuple(range(len(layers))))
    windows: list[AttentionWindow] = []
    groups, layer_slots = [0] * len(layers), [0] * len(layers)
    for window, members in sorted(kinds.items(), key=lambda kind: kind[0].max_keys):
        for number, layer in enumerate(members):
            groups[layer], layer_slots[layer] = len(windows) + number // width, number % width
        windows += [window] * -(-len(members) // width)
    return KVLayout(tuple(windows), tuple(groups), tuple(layer_slots))


def _width(counts: Sequence[int]) -> int:
    """Layers of a block for kinds of so many layers: the fewest places left empty, and of these the fewest groups; 0 where
    there are too many groups, or so much is empty that one group of all layers is better."""
    best = (sum(counts) * 1.25, MAX_GROUPS, 0)  # a quarter more for full contexts, at the worst
    for width in range(1, min(counts) + 1):
        groups = sum(-(-count // width) for count in counts)
        if groups <= MAX_GROUPS:
            best = min(best, (groups * width, groups, width))
    return best[2]
