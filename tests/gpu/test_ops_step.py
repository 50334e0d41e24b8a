"""Step kernels, sampling and slot uploads on a GPU against the CPU versions, alone and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.ops.sampling.sampling_cases import PARAMETERS, build
from tests.ops.step_cases import BLOCK_SIZE, Outputs, copy_state, random_state, random_step
from torchweave.engine.runner.step_buffers import HostBufferRing
from torchweave.ops.sampling.sample import sample
from torchweave.ops.slot_state import advance, carry, prepare, prepare_decode_inputs

pytestmark = pytest.mark.gpu


def captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `function`, which runs once before; the caller resets its state."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("graphed", [False, True])
def test_step_kernels_equal_the_cpu_versions(seed: int, graphed: bool) -> None:
    generator = np.random.default_rng(seed)
    state = random_state(generator)
    start = state.arena.clone()
    twin = copy_state(state, "cuda")
    step = random_step(generator, state)
    rows, tokens = step.slots.numel(), step.host_ids.numel()
    inputs = (step.slots, step.query_start, step.host_ids, step.host_positions)
    sampled = torch.from_numpy(generator.integers(0, 6, rows).astype(np.int32))
    emit = torch.from_numpy(generator.integers(0, 4, rows) > 0)

    def run(on, mixed, decode, out, inputs, sampled, emit) -> None:
        prepare(on, *inputs, mixed, block_size=BLOCK_SIZE)
        advance(sampled, inputs[0], emit, on, out)
        prepare_decode_inputs(on, inputs[0], decode, block_size=BLOCK_SIZE)

    def outputs(device: str):
        out = torch.empty(rows, dtype=torch.int32, device=device)
        return Outputs.empty(rows, tokens, device), Outputs.empty(rows, rows, device), out

    expected, got = outputs("cpu"), outputs("cuda")
    run(state, *expected, inputs, sampled, emit)
    on_device = [tensor.cuda() for tensor in inputs], sampled.cuda(), emit.cuda()
    if graphed:
        graph = captured(lambda: run(twin, *got, *on_device))
        twin.arena.copy_(start)
        graph.replay()
    else:
        run(twin, *got, *on_device)
    assert got[0].lists() == expected[0].lists() and got[1].lists() == expected[1].lists()
    assert got[2].tolist() == expected[2].tolist()
    assert twin.arena.cpu().equal(state.arena)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [5, 1000, 4097, 32000, 128256, 262144])
def test_sampling_equals_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    logits, slots, state = build(vocab_size, dtype, repeats=2, seed=vocab_size)
    expected = sample(logits, slots, state).tolist()
    twin, on_device = copy_state(state, "cuda"), logits.cuda()
    device_slots, out = slots.cuda(), torch.empty(len(slots), dtype=torch.int32, device="cuda")
    graph = captured(lambda: sample(on_device, device_slots, twin, out))
    out.fill_(-7)
    graph.replay()
    got = out.tolist()
    wrong = [
        (i, PARAMETERS[i % len(PARAMETERS)], expected[i], got[i]) for i in range(len(got)) if got[i] != expected[i]
    ]
    assert not wrong
    alone = [sample(on_device[i : i + 1], device_slots[i : i + 1], twin).item() for i in range(len(slots))]
    assert alone == got, "a row's token must not depend on its batch"


def test_uploads_do_not_overtake_each_other() -> None:
    """Many updates queued after a long-running kernel: staging buffers in flight must keep their contents."""
    generator = np.random.default_rng(0)
    state = copy_state(random_state(generator, max_batch=300, columns=64), "cuda")
    expected = state.arena.cpu().numpy().copy()
    updates = state.updates()
    torch.cuda._sleep(50_000_000)
    for _ in range(30):
        size = int(generator.integers(1, 20_000))  # some need several copies
        slots, columns = generator.integers(0, 300, size), generator.integers(0, 64, size)
        blocks = generator.integers(0, 1000, size)
        updates.set_block_table(slots, columns, blocks)
        updates.set("temperature", slots[:5], 0.25)
        state.apply(updates)
        expected[state.layout["block_table"] + slots * 64 + columns] = blocks
        expected[state.layout["temperature"] + slots[:5]] = np.float32(0.25).view(np.int32)
    assert (state.arena.cpu().numpy() == expected).all()


def test_pinned_copies_and_sampling_keep_stream_order() -> None:
    """Steps queued after a long-running kernel: each reads its own inputs and returns its own tokens."""
    exchange, device = (
        HostBufferRing(5000, 300, 3, torch.device("cuda")),
        torch.zeros(5000, dtype=torch.int32, device="cuda"),
    )
    waiting: list[tuple[int, int]] = []
    for step in range(12):
        ring_index, size = exchange.acquire(), (5000, 1, 2049)[step % 3]
        exchange.packed_inputs[ring_index].fill_(step)
        torch.cuda._sleep(20_000_000)
        carry(exchange.packed_inputs[ring_index][:size], device[:size])
        device[:size] += 100
        carry(device[:300], exchange.sampled[ring_index])
        exchange.record_end(ring_index)
        waiting.append((step, ring_index))
        if len(waiting) == 3:
            assert not exchange.ready(ring_index)
            first, its_turn = waiting.pop(0)
            assert exchange.wait(its_turn)[0] == first + 100
    assert [int(exchange.wait(ring_index)[0]) for _, ring_index in waiting] == [110, 111]


def test_steps_compile_no_kernel() -> None:
    """Sizes differ between steps; a kernel specialized to one would be compiled during serving."""
    from torchweave.ops.kernels import step_io as kernels
    from torchweave.ops.kernels.sampling import sample as sampling

    every = [kernels.prepare_kernel, kernels.prepare_decode_kernel, kernels.advance_kernel, kernels.scatter_kernel]
    every.append(kernels.pinned_copy_kernel)
    every += [sampling.partial_kernel, sampling.finish_kernel]

    def run(seed: int) -> None:
        generator = np.random.default_rng(seed)
        state = copy_state(random_state(generator), "cuda")
        step = random_step(generator, copy_state(state))
        rows, tokens = step.slots.numel(), step.host_ids.numel()
        packed = [step.slots, step.query_start, step.host_ids, step.host_positions]
        inputs = list(torch.cat(packed).cuda().split([value.numel() for value in packed]))  # of any alignment
        prepare(state, *inputs, Outputs.empty(rows, tokens, "cuda"), block_size=BLOCK_SIZE)
        prepare_decode_inputs(state, inputs[0], Outputs.empty(rows, rows, "cuda"), block_size=BLOCK_SIZE)
        out = torch.empty(rows, dtype=torch.int32, device="cuda")
        sample(torch.zeros(rows, 5000, device="cuda"), inputs[0], state, out)
        advance(out, inputs[0], torch.ones_like(out), state, out)
        updates = state.updates()
        updates.set("position", np.arange(rows), 1)
        state.apply(updates)
        carry(inputs[3], torch.empty(tokens, dtype=torch.int32, pin_memory=True))

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in every for cache in kernel.device_caches.values())

    run(0)
    before = compiled()
    for seed in range(1, 12):
        run(seed)
    assert compiled() == before
