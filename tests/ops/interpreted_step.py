"""Run by test_step with TRITON_INTERPRET=1: the step kernels against the CPU versions."""

from __future__ import annotations

import numpy as np
import torch

from tests.ops.step_cases import BLOCK_SIZE, Outputs, copy_state, random_state, random_step
from torchweave.ops.kernels import step_io
from torchweave.ops.kernels.sampling.layout import INVALID_TOKEN
from torchweave.ops.slot_state import advance, prepare, prepare_decode_inputs


def main() -> None:
    for seed in range(8):
        generator = np.random.default_rng(seed)
        tables = 1 + seed % 3
        state = random_state(generator, tables=tables)
        twin = copy_state(state)
        step = random_step(generator, state)
        rows, tokens = step.slots.numel(), step.host_ids.numel()
        inputs = (step.slots, step.query_start, step.host_ids, step.host_positions)
        expected, got = (Outputs.empty(rows, tokens, tables=tables) for _ in range(2))
        prepare(state, *inputs, expected, block_size=BLOCK_SIZE)
        views = (twin.last_token, twin.position, twin.block_table)
        step_io.launch_prepare(*views, *inputs, *got, BLOCK_SIZE)
        assert expected.lists() == got.lists()

        expected, got = (Outputs.empty(rows, rows, tables=tables) for _ in range(2))
        prepare_decode_inputs(state, step.slots, expected, block_size=BLOCK_SIZE)
        step_io.launch_prepare_decode(*views, step.slots, *got, BLOCK_SIZE)
        assert expected.lists() == got.lists()

        sampled = torch.from_numpy(generator.integers(0, 6, rows).astype(np.int32))
        sampled[seed % rows] = INVALID_TOKEN
        emit = torch.from_numpy(generator.integers(0, 4, rows) > 0)
        out, other = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
        advance(sampled, step.slots, emit, state, out)
        step_io.launch_advance(
            sampled, step.slots, emit, twin.last_token, twin.position, twin.min_position, twin.stop_ids, other
        )
        assert out.tolist() == other.tolist()
        assert state.arena.tolist() == twin.arena.tolist()

    arena, pairs = torch.arange(700, dtype=torch.int32), torch.randperm(700, dtype=torch.int32)[:600]
    expected = arena.clone()
    expected[pairs[:300].long()] = pairs[300:]
    step_io.launch_scatter(arena, pairs, 300)
    assert arena.equal(expected)
    for count in (1, 700, 1024, 2500):
        source, target = torch.randint(1 << 30, (count,), dtype=torch.int32), torch.zeros(count + 1, dtype=torch.int32)
        step_io.launch_pinned_copy(source, target[:count])
        assert target.tolist() == [*source.tolist(), 0]


if __name__ == "__main__":
    main()
