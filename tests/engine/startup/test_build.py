"""Decisions made while an engine is built."""

from __future__ import annotations

import pytest
import torch

from torchweave.config import AttentionFacts, DeviceFacts, ModelFacts, Plan, resolve
from torchweave.config.options import EngineConfig
from torchweave.engine.startup import build
from torchweave.ops.attention.op import LayerSpec

LAYER = LayerSpec(num_kv_heads=2, head_dim=64, value_dim=64, num_heads=4, window=128)


def plan(asked: str) -> Plan:
    config = EngineConfig(model="m", device="cpu", attention_backend=asked)  # type: ignore[arg-type]
    facts = DeviceFacts("cpu", "a device", None, (AttentionFacts("fa3", 128, (128,)), AttentionFacts("torch", 16)))
    return resolve(config, facts, ModelFacts("m", 1024, "bfloat16"))


def test_default_attention_backend_falls_back_if_layers_are_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = build.get_backend

    def picky(name: str, *args: object) -> object:
        if name == "fa3":
            raise ValueError("attention_backend 'fa3' cannot run this model: it has a sliding window; choose triton")
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "get_backend", picky)
    assert plan("auto").attention_backend == "fa3"
    backend, settled = build._choose_attention(plan("auto"), [LAYER], torch.bfloat16)
    entry = next(entry for entry in settled.entries if entry.name == "attention_backend")
    assert backend.name == settled.attention_backend == entry.effective != "fa3"
    assert "sliding window" in entry.why
    with pytest.raises(ValueError, match="sliding window"):
        build._choose_attention(plan("fa3"), [LAYER], torch.bfloat16)
