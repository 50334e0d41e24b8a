"""Groups of layers with attention windows: correct tokens, bounded memory, prefix reuse."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.fake import FakeBlockCopier, expected, make
from tests.engine.kv_cache.test_cpu_offload import conversations
from tests.engine.scheduler.test_scheduler import drive, request, tokens_of
from torchweave.engine.kv_cache.block_manager import AttentionWindow, BlockManager, max_blocks_needed
from torchweave.engine.kv_cache.layer_groups import KVLayout, group_layers, longest_sequence
from torchweave.ops.attention.op import LayerSpec

FULL, WINDOW, CHUNK = AttentionWindow(), AttentionWindow(window=10), AttentionWindow(chunk=16)
MIXES = {
    "window": (WINDOW,),
    "chunk": (CHUNK,),
    "mixed": (FULL, WINDOW),
    "three": (FULL, WINDOW, AttentionWindow(window=21)),
    "twice": (FULL, FULL, WINDOW, CHUNK),
}


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("how", ["alone", "reuse", "offload"])
def test_freeing_out_of_window_blocks_changes_no_token(policy: str, mix: str, how: str) -> None:
    """Prompts of several windows, chunked, paused, shared and restored, in a cache that is too small."""
    windows, rng = MIXES[mix], np.random.default_rng(len(mix))
    copier = FakeBlockCopier(40) if how == "offload" else None
    scheduler, runner = make(
        policy=policy, windows=windows, num_blocks=22 * len(windows), max_batch_size=5, max_num_tokens=16, copier=copier,
        reuse=how != "alone",
    )  # fmt: skip
    wanted = {}
    for number, prompt in enumerate(conversations(rng, 40)):
        max_tokens = int(rng.integers(1, 30))
        scheduler.add(request(number, prompt, max_tokens=max_tokens), seed=0)
        wanted[number] = expected(prompt, max_tokens, windows=windows)
    assert {number: tokens_of(said) for number, said in drive(scheduler, runner).items()} == wanted
    assert scheduler.kv.num_free == scheduler.kv.num_blocks
    assert (scheduler.kv.reused_total > 0) == (how != "alone")
    if policy == "guaranteed_no_evict":
        assert scheduler.paused_total == 0
    if copier is not None:
        assert scheduler.kv.restored_total > 0


def test_window_bounds_the_blocks_of_a_request() -> None:
    scheduler, runner = make(
        windows=(WINDOW,), num_blocks=12, max_batch_size=1, max_num_tokens=8, max_model_len=400, reuse=False
    )
    prompt = list(range(90))
    assert not scheduler.rejection_reason(request(0, prompt, max_tokens=300)), "a cache of 48 tokens serves 390 of them"
    most = 0

    def watch(step: int) -> tuple:
        nonlocal most
        most = max(most, scheduler.kv.num_used)
        return ()

    scheduler.add(request(0, prompt, max_tokens=300), seed=0)
    said = drive(scheduler, runner, per_step=watch)
    assert tokens_of(said[0]) == expected(prompt, 300, windows=(WINDOW,))
    assert most <= max_blocks_needed((WINDOW,), 390, 8 + 16, 4)[0] <= 10


def test_more_requests_run_at_once_than_without_windows() -> None:
    """Equal memory: 72 blocks of two groups with one layer each, or 36 blocks of both layers."""
    running = {}
    for name, windows, blocks in (("mixed", (FULL, WINDOW), 72), ("full", (FULL,), 36)):
        scheduler, runner = make(windows=windows, num_blocks=blocks, max_batch_size=8, max_num_tokens=16, reuse=False)
        for number in range(8):
            scheduler.add(request(number, list(range(10)), max_tokens=70), seed=0)
        most = 0
        for _ in range(60):
            step = scheduler.schedule()
            assert step is not None
            scheduler.update(step, runner.collect(runner.launch(step)))
            scheduler.kv.check()
            most = max(most, step.num_rows)
        running[name] = most
    assert running["full"] == 1 and running["mixed"] == 2


def test_a_prefix_needs_only_the_last_window_of_a_group() -> None:
    kv = BlockManager(40, 4, 2, 20, windows=(FULL, WINDOW), longest_step=40)
    hashes = [bytes([i]) for i in range(10)]
    kv.reserve(0, 40)
    kv.grant(np.array([0]), kv.blocks_needed(np.array([0]), np.array([40])))
    kv.free_out_of_window(np.array([0]), np.array([20]))
    assert kv.first[:, 0].tolist() == [0, 2], "position 20 attends to keys from 11 on"
    kv.cache_full_blocks(0, hashes)
    kv.check()
    found = kv.match(hashes[:9])
    assert (
        found.num_blocks == 9
        and found.blocks is not None
        and (found.blocks[1] >= 0).tolist() == [False] * 6 + [True] * 3
    )
    assert kv.match(hashes[:5]).num_blocks == 5 and kv.match(hashes[:4]).num_blocks == 0, (
        "block 1 of the window was freed"
    )
    assert kv.match([*hashes[:5], b"other"]).num_blocks == 5
    kv.attach(1, found)
    kv.reserve(1, 40)
    kv.check()
    kv.free(0)
    kv.check()
    assert kv.exclusive_logical_blocks.tolist() == [0, 0]
    kv.free(1)
    assert kv.num_free == 40
    kv.check()


LAYER = LayerSpec(2, 16, 16, 4)
SLIDING = LayerSpec(2, 16, 16, 4, window=64)


def test_layers_are_grouped_by_attention_window() -> None:
    assert group_layers([LAYER] * 3, 4096) == KVLayout((FULL,), (0, 0, 0), (0, 1, 2))
    assert group_layers([SLIDING] * 3, 4096).windows == (AttentionWindow(window=64),)
    assert group_layers([SLIDING] * 3, 64).windows == (FULL,), "a window as long as any sequence is none"
    gpt_oss = group_layers([SLIDING, LAYER] * 3, 4096)
    assert (
        gpt_oss == KVLayout((FULL, AttentionWindow(window=64)), (1, 0, 1, 0, 1, 0), (0, 0, 1, 1, 2, 2))
        and gpt_oss.width == 3
    )
    gemma = group_layers(([SLIDING] * 5 + [LAYER]) * 4 + [SLIDING] * 2, 4096)
    assert len(gemma.windows) == 7 and gemma.width == 4 and gemma.windows[0] == FULL
    for group in range(7):
        layer_slots = [
            layer_slot for layer_slot, its in zip(gemma.layer_slots, gemma.groups, strict=True) if its == group
        ]
        assert len(set(layer_slots)) == len(layer_slots), "two layers of a group share a layer slot"
    odd = group_layers([SLIDING, LayerSpec(1, 16, 16, 4)], 4096)
    assert odd.windows == (FULL,), "layers of different sizes cannot share a block"
    lonely = group_layers([SLIDING] * 40 + [LAYER], 4096)
    assert lonely.windows == (FULL,), "more groups than there may be"


def test_max_blocks_and_longest_sequence_are_exact() -> None:
    assert max_blocks_needed((FULL, WINDOW), 100, 20, 4) == [25, 9]
    assert max_blocks_needed((FULL, WINDOW), 8, 20, 4) == [2, 2]
    assert longest_sequence((FULL,), 10, 5, 4, 1000) == 40
    assert longest_sequence((WINDOW,), 10, 5, 4, 1000) == 1000
    assert longest_sequence((FULL, WINDOW), 20, 5, 4, 1000) == 60, "15 blocks of the one group, 5 of the other"
    assert longest_sequence((WINDOW,), 4, 5, 4, 1000) == 16


ALL_WINDOWS = [AttentionWindow(window) for window in (0, 1, 2, 3, 4, 5, 9, 40)] + [
    AttentionWindow(0, 8),
    AttentionWindow(0, 12),
    AttentionWindow(6, 16),
    AttentionWindow(0, 6),
]


def test_prefix_lookup_finds_the_longest_valid_prefix() -> None:
    """Compared with a search over all lengths, with blocks of 4 tokens."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(3000):
        windows = [ALL_WINDOWS[at] for at in rng.integers(len(ALL_WINDOWS), size=rng.integers(1, 4))]
        kv = BlockManager(64, 4, 1, 20, windows)
        hashes = [bytes([block_idx]) for block_idx in range(int(rng.integers(0, 14)))]
        known = rng.random((len(windows), len(hashes))) < rng.choice([0.2, 0.8, 0.97])
        for block, (group, block_idx) in enumerate(np.argwhere(known).tolist()):
            kv._prefix_index.insert((group, hashes[block_idx]), block)
        lengths = [
            length
            for length in range(len(hashes) + 1)
            if all(
                known[group, int(window.first_visible(np.array(length * 4))) // 4 : length].all()
                for group, window in enumerate(windows)
            )
        ]
        found = kv.match(hashes).num_blocks
        assert found == lengths[-1], (windows, known)
        seen.add(found)
    assert len(seen) > 10
