"""Adapters over HTTP: models of their own, loaded and unloaded while two HTTP processes serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.serving.running import ServerProcess, serving
from torchweave.models.load import load

GREEDY = {"prompt": "1+1=", "max_tokens": 6, "temperature": 0}
CAPTURED = ("-cc.enable_fullgraph=true", "-cc.enable_inductor=false")


def save_adapter(folder: Path, seed: int) -> None:
    """Save an adapter of the built-in model with random matrices."""
    model: Any = load("demo", torch.float32).module.model
    targets = ["q_proj", "v_proj", "gate_proj"]
    whole = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    torch.manual_seed(seed)
    for name, parameter in whole.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    whole.save_pretrained(str(folder))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("first", "second")):
        save_adapter(folder / name, number)
    return {name: folder / name for name in ("first", "second")}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[ServerProcess]:
    options = ("--enable_lora", "--enable_control_routes", "--api_server_count", "2", *CAPTURED)
    with serving(*options, "--lora_modules", f"first={folders['first']}") as running:
        yield running


def text(server: ServerProcess, model: str) -> str:
    answer = server.client().completions.create(model=model, **GREEDY)  # type: ignore[call-overload]
    assert answer.model == model
    return answer.choices[0].text


def post(server: ServerProcess, action: str, **body: Any) -> Any:
    return server.post(f"/v1/{action}_lora_adapter", body)


def test_adapters_are_models(server: ServerProcess, folders: dict[str, Path]) -> None:
    base, first = text(server, "demo"), text(server, "first")
    assert base != first
    client = server.client()
    chat = {
        model: client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "1+1="}], max_tokens=6, temperature=0
        )
        for model in ("demo", "first")
    }
    assert chat["demo"].choices[0].message.content != chat["first"].choices[0].message.content
    assert chat["first"].model == "first"
    responses = {
        model: client.responses.create(model=model, input="1+1=", max_output_tokens=6, temperature=0).output_text
        for model in ("demo", "first")
    }
    assert responses["demo"] != responses["first"]
    loaded = post(server, "load", lora_name="second", lora_path=str(folders["second"]))
    assert loaded.status_code == 200 and loaded.text == "The adapter second is loaded."
    for _ in range(4):  # either HTTP process
        assert len({base, first, text(server, "second")}) == 3
        assert text(server, "first") == first and text(server, "demo") == base
        models = {each["id"]: each["parent"] for each in server.get("/v1/models").json()["data"]}
        assert models == {"demo": None, "first": "demo", "second": "demo"}
    assert server.get("/v1/models/second").json()["root"] == "second", "the folder's path is private"
    assert post(server, "unload", lora_name="second").status_code == 200
    for _ in range(4):
        refused = server.post("/v1/completions", GREEDY | {"model": "second"})
        assert refused.status_code == 404 and "'demo' or 'first'" in refused.json()["error"]["message"]


def test_invalid_loads_are_refused(server: ServerProcess, folders: dict[str, Path], tmp_path: Path) -> None:
    cases = [
        ("load", {"lora_name": "first", "lora_path": str(folders["first"])}, 400, "is loaded already"),
        ("load", {"lora_name": "demo", "lora_path": str(folders["first"])}, 400, "is the model's own name"),
        ("load", {"lora_name": "none", "lora_path": str(tmp_path)}, 400, "lacks adapter_config.json"),
        ("load", {"lora_name": "none"}, 400, "lora_path"),
        ("unload", {"lora_name": "none"}, 404, "There is no adapter 'none'"),
    ]
    for action, body, status, why in cases:
        refused = post(server, action, **body)
        assert refused.status_code == status and why in refused.json()["error"]["message"], refused.text
    assert {each["id"] for each in server.get("/v1/models").json()["data"]} == {"demo", "first"}
