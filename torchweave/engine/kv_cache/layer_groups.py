"""Groups of layers with the same attention window, which share block numbers, and the blocks that a sequence needs of each.

A model whose layers all have the same window, or none, is one group. In a mix, a block holds the keys and values of `width`
layers, and layers of one kind are divided into groups of `width`. For each `block_size` tokens a sequence takes a block of every
group, out of one pool; a group with a window frees blocks that have left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchweave.ops.attention.op import LayerSpec

MAX_GROUPS = 8  # each has its own block table, which every step reads


@dataclass(frozen=True)
class AttentionWindow:
    """Keys that a query attends to: the last `window` ones including itself, and those of its `chunk`; 0: no bound."""

    window: int = 0
    chunk: int = 0

    @property
    def max_keys(self) -> int:
        """Most keys that a query attends to; 0: no bound."""
        return min((size for size in (self.window, self.chunk) if size), default=0)

    def first_visible(self, positions: np.ndarray) -> np.ndarray:
        """First position that queries at `positions` attend to, or an earlier one."""
        first_visible = np.zeros_like(positions)
        if self.window:
            first_visible = np.maximum(positions - self.window + 1, first_visible)
        if self.chunk:
            first_visible = np.maximum(positions // self.chunk * self.chunk, first_visible)
        return first_visible

    def resets_at(self, position: int) -> bool:
        """Whether a query at `position` attends only to itself."""
        return self.window == 1 or bool(self.chunk and position % self.chunk == 0)

    def most_tokens(self, num_tokens: int, longest_step: int) -> int:
        """Most tokens that a sequence of `num_tokens` stores at a time, if a step adds at most `longest_step`."""
        return min(num_tokens, self.max_keys + longest_step) if self.max_keys else num_tokens


def max_blocks_needed(windows: Sequence[AttentionWindow], num_tokens: int, step: int, block_size: int) -> np.ndarray:
    """Most blocks `[groups]` that a sequence of `num_tokens` tokens holds at a time, if a step adds at most `step`."""
    num_logical_blocks = -(-num_tokens // block_size)
    tokens = (window.most_tokens(num_tokens, step) for window in windows)
    return np.array([min(-(-each // block_size) + 1, num_logical_blocks) for each in tokens])


def longest_sequence(
    windows: Sequence[AttentionWindow], num_blocks: int, step: int, block_size: int, limit: int
) -> int:
    """Length of the longest sequence, at most `limit` tokens, that fits into `num_blocks` blocks."""
    low, high = 0, -(-limit // block_size)  # in logical blocks
    while low < high:
        middle = (low + high + 1) // 2
        needed = int(max_blocks_needed(windows, middle * block_size, step, block_size).sum())
        low, high = (middle, high) if -(-needed // len(windows)) <= num_blocks // len(windows) else (low, middle - 1)
    return min(low * block_size, limit)


@dataclass(frozen=True)
class KVLayout:
    """Location of each layer's keys and values.

    Attributes:
        windows: attention window of each group.
        groups: group of each layer.
        layer_slots: index of each layer within a block.
    """

    windows: tuple[AttentionWindow, ...]
    groups: tuple[int, ...]
    layer_slots: tuple[int, ...]

    @property
    def width(self) -> int:
        """Layers per block."""
        return max(self.layer_slots) + 1


def group_layers(layers: Sequence[LayerSpec], max_model_len: int) -> KVLayout:
    """Divide layers into groups; one group if that is as good, or if the layers have different sizes."""
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
    """Layers per block for kinds of layers with `counts` layers: the fewest unused layer slots, then the fewest groups.

    0 if more than MAX_GROUPS groups are needed, or if the unused slots cost more than one group of all layers.
    """
    best = (sum(counts) * 1.25, MAX_GROUPS, 0)  # at most a quarter more memory for full contexts
    for width in range(1, min(counts) + 1):
        groups = sum(-(-count // width) for count in counts)
        if groups <= MAX_GROUPS:
            best = min(best, (groups * width, groups, width))
    return best[2]
