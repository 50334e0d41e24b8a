"""Groups of layers with windows keep only what they need: right tokens, bounded memory, and the same sharing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.fake import FakeMover, expected, make
from tests.engine.kv_cache.test_cpu_offload import conversations
from tests.engine.scheduler.test_scheduler import drive, request, tokens_of
from torchweave.engine.kv_cache.block_manager import KVCache
from torchweave.engine.kv_cache.layer_groups import Layout, Sight, layout_of, longest_sequence, most_blocks
from torchweave.ops.attention.op import LayerSpec

FULL, WINDOW, CHUNK = Sight(), Sight(window=10), Sight(chunk=16)
MIXES = {
    "window": (WINDOW,),
    "chunk": (CHUNK,),
    "mixed": (FULL, WINDOW),
    "three": (FULL, WINDOW, Sight(window=21)),
    "twice": (FULL, FULL, WINDOW, CHUNK),
}


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("how", ["alone", "reuse", "offload"])
def test_B11_tokens_are_those_of_a_cache_that_gives_nothing_back(policy: str, mix: str, how: str) -> None:
    """Prompts several windows long, read in chunks, paused and resumed, shared and restored, in a cache that is too small."""
    sights, rng = MIXES[mix], np.random.default_rng(len(mix))
    mover = FakeMover(40) if how == "offload" else None
    batch, runner = make(
        policy=policy, sights=sights, num_blocks=22 * len(sights), max_batch_size=5, max_num_tokens=16, mover=mover,
        reuse=how != "alone",
    )  # fmt: skip
    wanted = {}
    for number, prompt in enumerate(conversations(rng, 40)):
        max_tokens = int(rng.integers(1, 30))
        batch.add(request(number, prompt, max_tokens=max_tokens), seed=0)
        wanted[number] = expected(prompt, max_tokens, sights=sights)
    assert {number: tokens_of(said) for number, said in drive(batch, runner).items()} == wanted
    assert batch.kv.num_free == batch.kv.num_blocks
    assert (batch.kv.reused_total > 0) == (how != "alone")
    if policy == "guaranteed_no_evict":
        assert batch.paused_total == 0
    if mover is not None:
        assert batch.kv.restored_total > 0


def test_B11_a_window_bounds_what_a_request_holds() -> None:
    batch, runner = make(
        sights=(WINDOW,), num_blocks=12, max_batch_size=1, max_num_tokens=8, max_model_len=400, reuse=False
    )
    prompt = list(range(90))
    assert not batch.why_not(request(0, prompt, max_tokens=300)), "a cache of 48 tokens serves 390 of them"
    most = 0

    def watch(step: int) -> tuple:
        nonlocal most
        most = max(most, batch.kv.num_used)
        return ()

    batch.add(request(0, prompt, max_tokens=300), seed=0)
    said = drive(batch, runner, per_step=watch)
    assert tokens_of(said[0]) == expected(prompt, 300, sights=(WINDOW,))
    assert most <= int(most_blocks((WINDOW,), 390, 8 + 16, 4)[0]) <= 10


def test_more_requests_run_at_once_than_without_windows() -> None:
    """The same memory: 72 blocks of two groups of one layer each, or 36 of both layers together."""
    running = {}
    for name, sights, blocks in (("mixed", (FULL, WINDOW), 72), ("full", (FULL,), 36)):
        batch, runner = make(sights=sights, num_blocks=blocks, max_batch_size=8, max_num_tokens=16, reuse=False)
        for number in range(8):
            batch.add(request(number, list(range(10)), max_tokens=70), seed=0)
        most = 0
        for _ in range(60):
            step = batch.next_step()
            assert step is not None
            batch.absorb(step, runner.collect(runner.launch(step)))
            batch.kv.check()
            most = max(most, step.num_rows)
        running[name] = most
    assert running["full"] == 1 and running["mixed"] == 2


def test_a_prefix_needs_only_the_last_window_of_a_group() -> None:
    kv = KVCache(40, 4, 2, 20, sights=(FULL, WINDOW), longest_step=40)
    hashes = [bytes([i]) for i in range(10)]
    kv.reserve(0, 40)
    kv.grant(np.array([0]), np.array([40]))
    kv.slide(np.array([0]), np.array([20]))
    assert kv.first[:, 0].tolist() == [0, 2], "position 20 sees keys from 11 on"
    kv.publish(0, hashes)
    kv.check()
    found = kv.match(hashes[:9])
    assert (
        found.columns == 9 and found.blocks is not None and (found.blocks[1] >= 0).tolist() == [False] * 6 + [True] * 3
    )
    assert kv.match(hashes[:5]).columns == 5 and kv.match(hashes[:4]).columns == 0, "column 1 of the window is gone"
    assert kv.match([*hashes[:5], b"other"]).columns == 5
    kv.attach(1, found)
    kv.reserve(1, 40)
    kv.check()
    kv.free(0)
    kv.check()
    assert kv.own_columns.tolist() == [0, 0]
    kv.free(1)
    assert kv.num_free == 40
    kv.check()


LAYER = LayerSpec(2, 16, 16, 4)
SLIDING = LayerSpec(2, 16, 16, 4, window=64)


def test_layers_are_dealt_into_groups() -> None:
    assert layout_of([LAYER] * 3, 4096) == Layout((FULL,), (0, 0, 0), (0, 1, 2))
    assert layout_of([SLIDING] * 3, 4096).sights == (Sight(window=64),)
    assert layout_of([SLIDING] * 3, 64).sights == (FULL,), "a window as long as any sequence is none"
    gpt_oss = layout_of([SLIDING, LAYER] * 3, 4096)
    assert gpt_oss == Layout((FULL, Sight(window=64)), (1, 0, 1, 0, 1, 0), (0, 0, 1, 1, 2, 2)) and gpt_oss.width == 3
    gemma = layout_of(([SLIDING] * 5 + [LAYER]) * 4 + [SLIDING] * 2, 4096)
    assert len(gemma.sights) == 7 and gemma.width == 4 and gemma.sights[0] == FULL
    for group in range(7):
        places = [place for place, its in zip(gemma.places, gemma.groups, strict=True) if its == group]
        assert len(set(places)) == len(places), "two layers of a group in one place"
    odd = layout_of([SLIDING, LayerSpec(1, 16, 16, 4)], 4096)
    assert odd.sights == (FULL,), "layers of different sizes have no common block"
    lonely = layout_of([SLIDING] * 40 + [LAYER], 4096)
    assert lonely.sights == (FULL,), "more groups than there may be"


def test_needs_are_counted_exactly() -> None:
    assert most_blocks((FULL, WINDOW), 100, 20, 4).tolist() == [25, 9]
    assert most_blocks((FULL, WINDOW), 8, 20, 4).tolist() == [2, 2]
    assert longest_sequence((FULL,), 10, 5, 4, 1000) == 40
    assert longest_sequence((WINDOW,), 10, 5, 4, 1000) == 1000
    assert longest_sequence((FULL, WINDOW), 20, 5, 4, 1000) == 60, "15 blocks of the one group, 5 of the other"
    assert longest_sequence((WINDOW,), 4, 5, 4, 1000) == 16


SIGHTS = [Sight(window) for window in (0, 1, 2, 3, 4, 5, 9, 40)] + [
    Sight(0, 8),
    Sight(0, 12),
    Sight(6, 16),
    Sight(0, 6),
]


def test_the_longest_known_beginning_is_found_whatever_is_known() -> None:
    """By comparison with looking at each length; blocks of 4 tokens."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(3000):
        sights = [SIGHTS[at] for at in rng.integers(len(SIGHTS), size=rng.integers(1, 4))]
        kv = KVCache(64, 4, 1, 20, sights)
        hashes = [bytes([column]) for column in range(int(rng.integers(0, 14)))]
        known = rng.random((len(sights), len(hashes))) < rng.choice([0.2, 0.8, 0.97])
        for block, (group, column) in enumerate(np.argwhere(known).tolist()):
            kv._known.enter((group, hashes[column]), block)
        lengths = [
            length
            for length in range(len(hashes) + 1)
            if all(
                known[group, int(sight.lowest(np.array(length * 4))) // 4 : length].all()
                for group, sight in enumerate(sights)
            )
        ]
        found = kv.match(hashes).columns
        assert found == lengths[-1], (sights, known)
        seen.add(found)
    assert len(seen) > 10
