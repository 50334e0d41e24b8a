"""Logits processors and resampling on a GPU: the kernels against the reference, and engines with and without graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.gpu.test_engine import GREEDY, build
from tests.ops.sampling import logits_processor_cases
from torchweave.engine.request import SamplingParams
from torchweave.ops.sampling.logits_processors import process_logits_reference, resample, rewind_reference
from torchweave.ops.slot_state import SlotState

pytestmark = pytest.mark.gpu


def copied(state: SlotState) -> SlotState:
    twin = SlotState(state.max_batch, state.max_blocks_per_seq, device="cuda")
    twin.arena.copy_(state.arena)
    return twin


@pytest.mark.parametrize("vocab_size", [40, 4500, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_processor_kernels_equal_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    from torchweave.ops.kernels.sampling import logits_processors

    for seed in range(5):
        case = logits_processor_cases.build(vocab_size, seed, dtype)
        state, processor_state = copied(case.state), case.processor_state("cuda")
        changed = torch.empty(8, vocab_size, device="cuda")
        expected = torch.empty(8, vocab_size)
        rows, masks = case.rows.cuda(), case.masks.cuda()
        logits_processors.launch_process_logits(case.logits.cuda(), rows, masks, processor_state, changed)
        logits_processors.launch_rewind(rows, state, processor_state, changed)
        process_logits_reference(case.logits, case.rows, case.masks, case.processor_state(), expected)
        rewind_reference(case.rows, case.state, case.processor_state(), expected)
        torch.testing.assert_close(changed.cpu(), expected, rtol=1e-6, atol=1e-6)
        assert state.position.cpu().equal(case.state.position)


def test_resampling_equals_the_reference() -> None:
    for seed in range(20):
        case = logits_processor_cases.build(5000, seed)
        state, processor_state, twin_state = copied(case.state), case.processor_state("cuda"), case.processor_state()
        tokens, out = case.tokens.cuda(), case.out.cuda()
        resample(case.logits.cuda(), case.rows.cuda(), case.masks.cuda(), state, processor_state, tokens, out)
        resample(case.logits, case.rows, case.masks, case.state, twin_state, case.tokens, case.out)
        assert tokens.cpu().equal(case.tokens) and out.cpu().equal(case.out)
        assert state.arena.cpu().equal(case.state.arena)
        for name in ("counts", "recent_tokens"):
            assert getattr(processor_state, name).cpu().equal(getattr(twin_state, name))


def test_cuda_graphs_change_no_token_with_logits_processors() -> None:
    asks = [
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, presence_penalty=1.0, frequency_penalty=0.5),
        replace(GREEDY, logit_bias={5: 3.0}, bad_words=[[5, 5], [7]]),
        replace(GREEDY, allowed_token_ids=list(range(100, 200)), repetition_penalty=0.9),
        replace(GREEDY, prompt_logprobs=2),
        GREEDY,
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True),
    ]
    prompts = [np.random.default_rng(n).integers(0, 1000, 10 + 9 * n).tolist() for n in range(len(asks))]
    found = []
    for graphs in (True, False):
        with build(graphs=graphs, compiled=False) as llm:
            together = llm.generate(prompts, asks)
            alone = [llm.generate([prompt], params)[0] for prompt, params in zip(prompts, asks, strict=True)]
            if graphs:
                assert llm.manager.counts.get("decode_graph", 0) > 0
        assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in alone]
        found.append([each.outputs[0].token_ids for each in together])
        scores = together[4].prompt_logprobs
        assert scores is not None and len(scores) == len(prompts[4]) and all(scores[1:])
    assert found[0] == found[1]
