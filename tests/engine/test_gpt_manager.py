"""The batch manager made as TensorRT-LLM's documentation makes it: path, type, beam width, policy, callbacks."""

from __future__ import annotations

import gc
import json
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torchweave
from torchweave import InferenceRequest, SamplingParams

OPTIONS: dict[str, Any] = {"device": "cpu", "enforce_eager": True}


@pytest.mark.parametrize(
    ("model_type", "policy", "key", "effective"),
    [
        ("InflightBatching", "MAX_UTILIZATION", "Generation Requests", "max_utilization"),
        ("V1", "GUARANTEED_NO_EVICT", "Empty Generation Slots", "static_batch"),
    ],
)
def test_a_manager_made_by_path_type_and_policy_answers(model_type: str, policy: str, key: str, effective: str) -> None:
    todo, answers, records = queue.SimpleQueue(), queue.SimpleQueue(), []

    def get_requests(max_num: int) -> list[InferenceRequest]:
        assert 0 <= max_num <= 16
        return [todo.get() for _ in range(min(todo.qsize(), max_num))]

    manager = torchweave.GptManager(
        "demo",  # model
        model_type,
        2,  # maximum beam width
        policy,
        16,  # maximum number of requests
        get_requests,
        lambda *response: answers.put(response),
        None,
        lambda text: records.append(json.loads(text)),
        **OPTIONS,
    )
    with manager:
        assert manager.engine.plan.config.capacity_scheduler_policy == effective
        tokenizer = manager.engine.loaded.tokenizer
        assert tokenizer is not None
        prompt = np.array(tokenizer.encode("12+30="))
        for number, width in ((1, 1), (2, 3)):
            params = SamplingParams(temperature=0.0, max_tokens=8, beam_width=width)
            todo.put(InferenceRequest(number, prompt, params))
        manager.wake()
        found = {request_id: (output, final, error) for request_id, output, final, error in _take(answers, 2)}
    assert tokenizer.decode(found[1][0].token_ids.tolist()).strip() == "42" and found[1][1:] == (True, "")
    assert found[2][1] and "beam_width=3 is above 2, the maximum beam width of this batch manager" in found[2][2]
    assert key in records[-1] and records[-1]["Max Request Count"] == 16 and not manager.alive


def test_a_manager_that_is_collected_ends_its_ranks() -> None:
    answers: queue.SimpleQueue = queue.SimpleQueue()
    todo = [InferenceRequest(1, np.array([1, 5]), SamplingParams(temperature=0.0, max_tokens=4))]
    manager = torchweave.GptManager(
        "demo", "V1", 1, "MAX_UTILIZATION", 4, lambda max_num: [todo.pop()] if todo else [],
        lambda *response: answers.put(response), tensor_parallel_size=2, **OPTIONS,
    )  # fmt: skip
    assert _take(answers, 1)[0][2]
    process = manager.engine.report.select("rank")[0]["process"]
    del manager
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        gc.collect()  # also what the loop held until it had ended
        time.sleep(0.1)
    assert not Path(f"/proc/{process}").exists()


def _take(answers: queue.SimpleQueue, count: int) -> list[Any]:
    return [answers.get(timeout=60) for _ in range(count)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "Inflight", 1, "MAX_UTILIZATION", 4), "model_type='Inflight' is not known: it is InflightBatching"),
        (("demo", "V1", 1, "EVICT", 4), "scheduler_policy='EVICT' is not known: it is MAX_UTILIZATION or"),
        (("demo", "V1", 0, "MAX_UTILIZATION", 4), "max_beam_width=0 must be a whole number, at least 1"),
        (("demo", "V1", 1, "MAX_UTILIZATION", 0), "max_num_requests=0 must be a whole number, at least 1"),
    ],
)
def test_unknown_arguments_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make: Any = torchweave.GptManager
        make(*arguments, lambda max_num: [], lambda *response: None)
