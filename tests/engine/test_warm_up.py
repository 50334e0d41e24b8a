"""The stand-in launches what the model will launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.engine.warm_up import StandIn, draw_again
from torchweave.models import load, zoo
from torchweave.ops.state import SlotState


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func._schema.name, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "llama"])
def test_experts_of_each_kind_are_run_once(name: str) -> None:
    module = load(zoo.specimen(name).config().to_dict(), load_format="dummy").module
    stand_in = StandIn(module, module.attention_layers, module.vocab_size, torch.float32)
    attended: list[Any] = []
    ids = torch.zeros(5, dtype=torch.int64)
    with _Ops() as seen:
        logits = stand_in(lambda op, args, kwargs: attended.append(op), ids, ids, ids[:2])
    assert logits.shape == (2, module.vocab_size) and attended
    experts = [args for op, args in seen.calls if op == "torchweave::experts"]
    assert len(experts) == (0 if name == "llama" else 1)
    assert all(x.shape[0] == 5 and index.shape == (5, 2) for x, index, *_ in experts)


def test_a_row_that_is_drawn_again_can_be_launched_ahead() -> None:
    state = SlotState(2, 4)
    draw_again(state, torch.zeros(1, 40))
    assert state.host["position"].tolist() == [0, 0]
