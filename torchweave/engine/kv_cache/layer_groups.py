"""Groups of layers with the same attention window, which share block numbers, and the blocks that a sequence needs of each.

A model whose layers all have the same window, or none, is one group. In a mix, a block holds the keys and values of `width`
layers, and layers of one kind are divided into groups of `width`. For each `block_size` tokens a sequence takes a block of every
group, out of one pool; a group with a window frees blocks that have left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchweave.engine.kv_cache.block_manager import AttentionWindow, max_blocks_needed
from torchweave.ops.attention.op import LayerSpec

MAX_GROUPS = 8  # each has its own block table, which every step reads


def longest_sequence(
    windows: Sequence[AttentionWindow], num_blocks: int, step: int, block_size: int, limit: int
) -> int:
    """Length of the longest sequence, at most `limit` tokens, that fits into `num_blocks` blocks."""
    low, high = 0, -(-limit // block_size)  # in logical blocks
    while low < high:
        middle = (low + high + 1) // 2
        needed = sum(max_blocks_needed(windows, middle * block_size, step, block_size))
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
        return max(self.layer_slots, default=-1) + 1


def group_layers(layers: Sequence[LayerSpec], max_model_len: int) -> KVLayout:
    """Divide layers into groups; one group if that is as good, or if the layers have different sizes."""
    if not layers:
        return KVLayout((AttentionWindow(),), (), ())
    kinds: dict[AttentionWindow, list[int]] = {}
    for index, layer in enumerate(layers):
        window = AttentionWindow(layer.window, layer.chunk)
        kinds.setdefault(window if 0 < window.max_keys < max_model_len else AttentionWindow(), []).append(index)
    plain = {"window": 0, "chunk": 0, "softcap": 0.0, "sinks": False, "alibi": False, "k_scale": 1.0, "v_scale": 1.0}
    sizes = {replace(layer, **plain) for layer in layers}
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
