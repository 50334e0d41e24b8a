"""Adapters of PEFT in one batch with each other and with base requests, against PEFT's own model in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.engine.adapters.peft_cases import (
    answer,
    ask,
    assert_equal,
    engine,
    engine_config,
    linears,
    make_adapter,
)
from torchweave import LLM, BeamSearchParams, LoRARequest, SamplingParams
from torchweave.config.options import SpeculativeConfig
from torchweave.engine.control.errors import ControlError
from torchweave.models.weights.peft_adapter import TENSORS
from torchweave.report import Report
from torchweave.verify import zoo

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6, 7], list(range(20, 44)), [9, 9, 3], [40, 30, 20, 10, 5]]
ADAPTERS = {
    "all": {"r": 8, "use_rslora": True},
    "attention": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"q_proj": 3},
    },
    "last layer": {"target_modules": r".*\.2\..*(gate|down)_proj"},
}


@dataclass(frozen=True)
class Case:
    """A model, adapters and what PEFT answers with each, by name; "" is the model alone."""

    base: PreTrainedModel
    folder: Path
    requests: dict[str, LoRARequest | None]
    expected: dict[str, list[zoo.Answer]]


def make_case(base: PreTrainedModel, folder: Path, adapters: dict[str, dict]) -> Case:
    expected, requests = {"": zoo.reference_answers(base, PROMPTS, 8)}, {"": None}
    for number, (adapter, options) in enumerate(adapters.items(), 1):
        given = {"target_modules": linears(base)} | options
        expected[adapter] = make_adapter(base, folder / adapter, PROMPTS, number, **given)
        requests[adapter] = LoRARequest(adapter, number, str(folder / adapter))
    return Case(base, folder, requests, expected)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, base = tmp_path_factory.mktemp("adapters"), zoo.build(zoo.zoo_model("llama"))
    zoo.save(base, folder / "model")
    return make_case(base, folder, ADAPTERS)


@pytest.fixture(scope="module")
def llm(case: Case) -> Iterator[LLM]:
    listed = f"attention={case.folder / 'attention'}"
    with engine(case.folder / "model", lora_modules=(listed,)) as llm:
        assert llm.list_lora_adapters() == {"attention": str(case.folder / "attention")}
        yield llm


def check(llm: LLM, case: Case, names: list[str]) -> None:
    """Ask prompt i with adapter i, all at once."""
    outputs = ask(llm, PROMPTS[: len(names)], [case.requests[name] for name in names])
    for number, (output, name) in enumerate(zip(outputs, names, strict=True)):
        assert_equal(output, case.expected[name][number])


def test_adapters_and_base_requests_in_one_batch(llm: LLM, case: Case) -> None:
    assert case.expected["all"][0].tokens != case.expected["attention"][0].tokens != case.expected[""][0].tokens
    check(llm, case, ["", "all", "attention", "all"])
    check(llm, case, ["attention", "", "all", "attention"])  # prefixes of another adapter are in the cache
    check(llm, case, ["last layer", "all", "attention", ""])  # of three, two fit: the third one waits
    check(llm, case, ["", "", "", ""])


def test_base_requests_keep_their_bits(llm: LLM, case: Case) -> None:
    llm.reset_prefix_cache()
    mixed = ask(llm, PROMPTS, [case.requests[name] for name in ("", "all", "", "")])
    with engine(case.folder / "model", enable_lora=False) as plain:
        alone = ask(plain, PROMPTS, [None] * 4)
    assert [answer(mixed[number]) for number in (0, 2, 3)] == [answer(alone[number]) for number in (0, 2, 3)]


def test_streams_and_beams_have_adapters(llm: LLM, case: Case) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    deltas = list(llm.stream(PROMPTS[0], params, lora_request=case.requests["all"]))
    assert [token for delta in deltas for token in delta.token_ids] == case.expected["all"][0].tokens
    beams = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    of_base, of_adapter = (llm.beam_search([PROMPTS[0]], beams, case.requests[name])[0] for name in ("", "all"))
    assert of_base.sequences[0].tokens != of_adapter.sequences[0].tokens


def test_an_adapter_is_replaced_and_unloaded_while_the_engine_serves(llm: LLM, case: Case, tmp_path: Path) -> None:
    where = {name: str(case.folder / name) for name in ADAPTERS}
    changing = LoRARequest("changing", 9, where["all"])
    assert_equal(ask(llm, PROMPTS[:1], [changing])[0], case.expected["all"][0])
    with pytest.raises(ValueError, match=r"loaded already, from .*all; unload it, or replace it"):
        llm.load_lora_adapter("changing", where["attention"])
    with pytest.raises(ValueError, match=r"is loaded from .*all, not from .*attention; use another name"):
        ask(llm, PROMPTS[:1], [LoRARequest("changing", 9, where["attention"])])
    llm.load_lora_adapter("changing", where["attention"], load_inplace=True)
    replaced = ask(llm, PROMPTS[:1], [LoRARequest("changing", 9, where["attention"])])[0]
    assert_equal(replaced, case.expected["attention"][0])
    assert llm.list_lora_adapters()["changing"] == where["attention"]
    llm.unload_lora_adapter("changing")
    assert "changing" not in llm.list_lora_adapters()
    with pytest.raises(ValueError, match="There is no adapter 'changing'; loaded are: "):
        llm.unload_lora_adapter("changing")
    part = llm.engine.runner.parts["adapters"]
    assert len(part.stored) == len(llm.list_lora_adapters()), "the ranks drop what no request has"  # type: ignore[attr-defined]


def test_adapters_of_other_models_are_refused_by_name(llm: LLM, case: Case, tmp_path: Path) -> None:
    tensors = load_file(case.folder / "attention" / TENSORS)
    first = "base_model.model.model.layers.0.self_attn.q_proj."
    for number, (changes, why) in enumerate(
        (
            (
                {first + "lora_A.weight": torch.zeros(4, 5)},
                "of another model: for model.layers.0.self_attn.q_proj it has 5 inputs",
            ),
            (
                {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}
                | {"base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4)},
                "changes model.layers.7.self_attn.q_proj, for which there is no place in this model",
            ),
            (
                {"base_model.model.lm_head.base_layer.weight": torch.zeros(zoo.VOCAB, 64)},
                "changes the model's own lm_head.weight, which all requests share",
            ),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_config.json").write_text((case.folder / "attention" / "adapter_config.json").read_text())
        save_file(tensors | changes, folder / TENSORS)
        with pytest.raises(ValueError, match=why):
            llm.load_lora_adapter("wrong", str(folder))
        assert "wrong" not in llm.list_lora_adapters()
    with pytest.raises(ValueError, match=r"lacks adapter_config\.json"):
        ask(llm, PROMPTS[:1], [LoRARequest("none", 1, str(tmp_path))])
    check(llm, case, ["all", ""])


def test_requests_are_checked(llm: LLM, case: Case) -> None:
    with pytest.raises(ValueError, match="Got 2 prompts but 1 lora_requests"):
        ask(llm, PROMPTS[:2], [case.requests["all"]])
    with pytest.raises(ValueError, match="lora_request must be a LoRARequest"):
        llm.generate([PROMPTS[0]], lora_request="all")  # type: ignore[arg-type]
    for arguments, why in ((("", 1, "x"), "lora_name"), (("a", 0, "x"), "lora_int_id"), (("a", 1, ""), "lora_path")):
        with pytest.raises(ValueError, match=why):
            LoRARequest(*arguments)


def test_listed_adapters_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    for options, why in (
        ({"lora_modules": ("a=/a",)}, "lora_modules needs enable_lora=True"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "lora_modules='a' must be the name and the folder"),
        ({"enable_lora": True, "lora_modules": ("a=/a", "a=/b")}, "lora_modules has two adapters 'a'"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=why):
            LLM("demo", **options)


def test_without_the_option_adapters_are_refused() -> None:
    options = {"cpu_kv_cache_gib": 0.01, "max_batch_size": 2, "torch_compile_config": {"enable_fullgraph": False}}
    with (
        LLM("demo", **options) as llm,
        pytest.raises(ControlError, match="Adapters are off; start the engine with enable_lora"),
    ):
        llm.generate("a", lora_request=LoRARequest("a", 1, "/a"))
    with pytest.raises(ValueError, match=r"enable_lora=True needs torch_compile_config\.enable_fullgraph"):
        LLM("demo", enable_lora=True, **options)


DEFAULT = ("gpt2", "jamba")
WITHOUT_PLACE = {"dt_proj"}
"""Leaves of linears whose weights the hooks of recurrent layers read, instead of calling them."""
SHARED_LAYERS = ("zamba", "zamba2")
"""Their linears of shared layers, whose weights have several names, have no place."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(entry.name, marks=() if entry.name in DEFAULT else pytest.mark.whole)
        for entry in zoo.ZOO_MODELS
        if entry.name != "llama"
    ],
)
def test_architectures(name: str, tmp_path: Path) -> None:
    base = zoo.build(zoo.zoo_model(name))
    zoo.save(base, tmp_path / "model")
    with engine(tmp_path / "model") as llm:
        places = llm.engine.runner.parts["adapters"].slots.places  # type: ignore[attr-defined]
        held = [each for each in linears(base) if each in places]
        without = {each.rpartition(".")[2] for each in linears(base) if each not in places}
        assert held and (without <= WITHOUT_PLACE or name in SHARED_LAYERS)
        sets = {"one": {"r": 4, "target_modules": held}, "two": {"r": 2, "lora_alpha": 5, "target_modules": held}}
        check(llm, make_case(base, tmp_path, sets), ["", "one", "two", "one"])


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": SpeculativeConfig(method="ngram", prompt_lookup_min=1)},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.whole),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.whole),
    ],
    ids=["drafts", "two ranks", "two stages"],
)
def test_drafts_and_ranks(case: Case, options: dict[str, Any]) -> None:
    config = engine_config(case.folder / "model", device="cpu", **options)
    with LLM.from_config(config, Report(show=False)) as llm:
        check(llm, case, ["attention", "all", "", "all"])
        if "speculative_config" in options:  # requests without log-probabilities have drafts
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            names = ["all", "", "attention", "all"]
            outputs = llm.generate(PROMPTS, params, lora_request=[case.requests[name] for name in names])
            for number, (output, name) in enumerate(zip(outputs, names, strict=True)):
                assert list(output.outputs[0].token_ids) == case.expected[name][number].tokens
            assert llm.engine.scheduler.speculation.num_draft_tokens
