"""The training script, run as a user runs it: a few steps on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, str(ROOT / "scripts/demo/train_demo.py"), "--out", str(folder / "demo")]
    command += ["--draft-out", str(folder / "draft"), "--report", str(folder / "report.json"), "--preset", "tiny"]
    command += [
        "--device",
        "cpu",
        "--steps",
        "3",
        "--seconds",
        "60",
        "--questions",
        "2",
        "--workers",
        "1",
        "--no-compile",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return folder, subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_an_untrained_model_fails_the_thresholds_and_says_which(trained) -> None:
    folder, done = trained
    assert done.returncode == 1, done.stderr
    assert "missed: demo, float32, add (plain)" in done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["missed"]
    assert report["models"]["demo"]["steps"] == 3
    assert set(report["models"]["draft"]["graded"]["float32"]["accuracy"]["sort"]) == {"plain", "chat", "dialogue"}


def test_the_folders_load_in_transformers_with_one_tokenizer(trained) -> None:
    folder, _ = trained
    texts = {(folder / name / "tokenizer.json").read_text() for name in ("demo", "draft")}
    assert len(texts) == 1
    for name in ("demo", "draft"):
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto")
        assert model.dtype == torch.bfloat16
        assert model.generation_config.do_sample is False
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        assert model.config.vocab_size == len(tokenizer)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert tokenizer.encode("1+1=")[0] == tokenizer.bos_token_id
        assert tokenizer.chat_template
