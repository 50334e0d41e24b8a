"""`bench profile`: the profiled steps and the reported kernel times."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from torchweave.bench.profile import StepDriver, _by_name, kernel_gaps, profile
from torchweave.bench.result import rows
from torchweave.cli.main import main


def test_profiles_a_decode_step_and_a_mixed_step(tiny_args: list[str], capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "profile", "--model", *tiny_args, "--running", "3", "--input_len", "20", "--steps", "4"]
    assert main([*argv, "--mixed_step_tokens", "16", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert torch.is_grad_enabled(), "the thread is as it was"
    decode, mixed = result["steps"]
    assert (decode["kind"], decode["rows"], decode["tokens"]) == ("decode", 3, 3)
    assert mixed["kind"] == "mixed" and mixed["rows"] > 3
    assert mixed["tokens"] == 16, "as the scheduler has it, three rows that generate among them"
    for step in result["steps"]:
        assert sum(step["how"].values()) == 4
        microseconds = [kernel["us"] for kernel in step["kernels"]]
        assert microseconds == sorted(microseconds, reverse=True) and microseconds[0] > 0
        linears = [kernel for kernel in step["kernels"] if "mm" in kernel["name"]]
        assert linears and linears[0]["launches"] >= 1 and linears[0]["launches"] % 1 == 0, (
            "of the steps that count alone"
        )
        assert not any("ProfilerStep" in kernel["name"] for kernel in step["kernels"])
    shown = rows(result)
    assert {row[0] for row in shown} == {"A decode step", "A mixed step"}
    assert shown[0][1:3] == ("3 rows, 3 tokens, plain", f"{decode['ms']:.3f} ms")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--running", "0"], "running=0 must be at least 1"),
        (["--running", "40", "--input_len", "5"], "running=40 requests do not fit at once: max_batch_size is 8"),
        (["--running", "2", "--input_len", "100000"], "exceed max_model_len"),
        (["--running", "8", "--input_len", "20"], "running=8 requests leave no room for the prompts"),
        (
            ["--running", "7", "--input_len", "20", "--mixed_step_tokens", "16"],
            "a mixed step, which prefilled 2 tokens",
        ),
        (["--running", "2", "--input_len", "20", "--num_kv_blocks", "7"], "running=2 requests leave no room"),
    ],
)
def test_invalid_profile_options_are_rejected(
    options: list[str], sentence: str, tiny_args: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "profile", "--model", *tiny_args, "--max_batch_size", "8", "--steps", "2", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_mixed_step_fills_a_token_bucket(tiny_args: list[str], capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "profile", "--model", *tiny_args, "--running", "7", "--input_len", "8", "--steps", "3"]
    assert main([*argv, "--mixed_step_tokens", "8", "--json"]) == 0
    mixed = json.loads(capsys.readouterr().out)["steps"][1]
    assert mixed["tokens"] == 16, "the first size with room for 4 beside those 7 holds 9, more than the least size"


def test_requests_fit_max_model_len(tiny_args: list[str], capsys: pytest.CaptureFixture[str]):
    argv = [
        "bench",
        "profile",
        "--model",
        *tiny_args,
        "--max_batch_size",
        "4",
        "--max_model_len",
        "128",
        "--steps",
        "2",
    ]
    assert main([*argv, "--json"]) == 0
    decode, mixed = json.loads(capsys.readouterr().out)["steps"]
    assert (decode["rows"], mixed["rows"], mixed["tokens"]) == (2, 3, 66), (
        "half of the slots, and half of the positions"
    )


def test_profile_without_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch):
    blind = SimpleNamespace(step=lambda: None, events=list)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(blind))
    step = SimpleNamespace(num_rows=1, num_tokens=1)
    work = SimpleNamespace(device="cuda:0", count=2, run=lambda kind, count: [(step, "plain")] * count)
    with pytest.raises(ValueError, match="recorded no kernel on cuda:0"):
        profile(cast(StepDriver, cast(Any, work)), "decode", lambda: None)


def test_overlapping_kernels_count_once():
    gaps, busy = kernel_gaps([("d", 8, 9), ("a", 0, 4), ("b", 1, 2), ("c", 3, 6)])
    assert busy == 7 and gaps == [("d", 2, 1)]
    assert kernel_gaps([]) == ([], 0)


def test_launches_of_a_kernel_are_summed():
    found = _by_name([("a", 4.0, 1), ("b", 10.0, 1), ("a", 2.0, 3)], num_steps=2)
    assert found == [{"name": "b", "us": 5.0, "launches": 0.5}, {"name": "a", "us": 3.0, "launches": 2.0}]
