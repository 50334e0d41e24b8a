"""What `torchweave collect-env` says."""

from __future__ import annotations

import json

import pytest
import torch

import torchweave
from torchweave.cli.main import main


def test_the_machine_is_described(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert facts["torchweave"] == torchweave.__version__ and facts["torch"].startswith(
        torch.__version__.partition("+")[0]
    )
    assert facts["cores"] >= 1 and facts["memory"].endswith(" GiB") and "VLLM_API_KEY" in facts["variables"]
    assert "secret" not in text
    assert main(["collect-env"]) == 0
    assert "processor" in capsys.readouterr().out and main(["collect-env", "--nothing"]) == 2
