"""`LLM` as scripts written for vLLM use it: outputs, metrics, beams, and vLLM's spellings of options."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from torchweave import LLM, BeamSearchParams, Logprob, SamplingParams, TorchCompileConfig
from torchweave.config.model_source import BUILT_IN, resolve
from torchweave.config.peer_options import EAGER, compilation_options, engine_config, options_of_file
from torchweave.engine.outputs import Counter, Gauge
from torchweave.report import Report

GREEDY = SamplingParams(temperature=0, max_tokens=20)
PROMPT = "sort: pear fig apple"
DEMO = resolve("demo").folder


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"enforce_eager": True, "max_logprobs": -1, "block_size": 4}
    with LLM("demo", device="cpu", report=Report(show=False), **options) as engine:
        yield engine


def test_a_logprob_is_a_number_with_vllms_attributes() -> None:
    entry = Logprob(-0.5, rank=2, decoded_token="a")
    assert (entry.logprob, entry.rank, entry.decoded_token) == (-0.5, 2, "a")
    assert entry + 1 == 0.5 and entry == -0.5 and math.exp(Logprob(0.0)) == 1.0
    for twin in (pickle.loads(pickle.dumps(entry)), copy.deepcopy(entry)):
        assert (twin.logprob, twin.rank, twin.decoded_token) == (-0.5, 2, "a")


def test_log_probabilities_of_the_vocabulary_equal_the_plain_model(llm: LLM) -> None:
    assert DEMO is not None
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
    (output,) = llm.generate([{"prompt": PROMPT}], params)
    answer = output.outputs[0]
    ids = torch.tensor([output.prompt_token_ids + answer.token_ids])
    with torch.inference_mode():
        expected = model(ids).logits[0].log_softmax(-1)
    assert answer.logprobs is not None and output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    found = [*output.prompt_logprobs[1:], *answer.logprobs]
    for row, entries, token in zip(expected, found, ids[0, 1:].tolist(), strict=False):
        assert entries is not None and next(iter(entries)) == token and len(entries) == expected.shape[1]
        assert entries[token].rank == int((row > row[token]).sum()) + 1
        assert [entries[other].logprob for other in range(len(row))] == pytest.approx(row.tolist(), abs=1e-4)
    by_rank = sorted(answer.logprobs[0].values(), key=lambda entry: entry.rank or 0)
    assert by_rank == sorted(by_rank, reverse=True)
    texts = [entries[token].decoded_token for entries, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert "".join(filter(None, texts)) == answer.text


def test_more_log_probabilities_than_the_engine_allows_are_refused() -> None:
    with LLM("demo", device="cpu", report=Report(show=False), enforce_eager=True, max_logprobs=5) as small:
        small.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=5))
        for asked in ({"logprobs": 6}, {"prompt_logprobs": -1}):
            with pytest.raises(ValueError, match="must be at most 5, the engine's max_logprobs, but is"):
                small.generate(PROMPT, SamplingParams(max_tokens=1, **asked))


def test_outputs_have_times_cached_tokens_and_a_textual_id(llm: LLM) -> None:
    llm.generate(PROMPT, GREEDY)
    begin, began = time.time(), time.monotonic()
    first, second = llm.generate(
        [PROMPT, {"prompt_token_ids": llm.get_tokenizer().encode(PROMPT)}], replace(GREEDY, n=2)
    )
    assert isinstance(first.request_id, str) and first.request_id != second.request_id
    assert first.finished and first.outputs[0].finished()
    assert (
        first.num_cached_tokens
        == second.num_cached_tokens
        == (len(llm.get_tokenizer().encode(PROMPT)) - 1) // 4 * 4
        > 0
    )
    metrics = first.metrics
    assert metrics is not None and begin <= metrics.arrival_time <= time.time()
    times = [began, metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
    assert times == sorted(times) and times[-1] <= time.monotonic()
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts > 0
    assert metrics.num_generation_tokens == sum(len(answer.token_ids) for answer in first.outputs)
    assert not llm._client.metrics and not llm._client._prompt_lengths  # nothing is kept of requests that have ended


def test_without_statistics_outputs_have_no_times() -> None:
    with LLM("demo", device="cpu", report=Report(show=False), enforce_eager=True, disable_log_stats=True) as silent:
        assert silent.generate(PROMPT, GREEDY)[0].metrics is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"generation_config": "/nowhere"}, r"has no generation_config\.json; give auto, vllm or a folder"),
        ({"override_generation_config": {"num_beams": 2}}, "has num_beams, which is no default here"),
        ({"override_generation_config": {"top_k": 0.5}}, "expected a whole number"),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, "llguidance is the only backend"),
        ({"quantization": "awq"}, "is a format of checkpoints"),
        ({"logprobs_mode": "raw_logits"}, "before temperature and processors"),
        ({"disable_log_stats": "x"}, "must be True or False"),
    ],
)
def test_an_option_of_vllm_is_refused_with_what_to_do(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LLM("demo", device="cpu", report=Report(show=False), **options)


def test_a_keyword_or_prompt_of_vllm_is_refused_with_what_to_do(llm: LLM) -> None:
    unknown: Any = {"prompt_token_ids": [[1]]}
    with pytest.raises(TypeError, match="pass token ids as prompts"):
        llm.generate([], GREEDY, **unknown)
    unknown = {"priority": [1]}
    with pytest.raises(TypeError, match="a field of the server's requests"):
        llm.generate(PROMPT, GREEDY, **unknown)
    with pytest.raises(ValueError, match=r'or \{"prompt_token_ids": ids\}; this one has \'prompt_embeds\''):
        llm.generate({"prompt_embeds": 1}, GREEDY)


def test_without_detokenization_there_are_only_ids(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    ids = llm.generate(PROMPT, replace(GREEDY, detokenize=False, logprobs=0))[0].outputs[0]
    assert whole.text and ids.text == "" and ids.token_ids == whole.token_ids and ids.logprobs is not None
    assert ids.logprobs[0][ids.token_ids[0]].decoded_token is None
    with pytest.raises(ValueError, match="stop strings are looked for in the text; set detokenize=True"):
        SamplingParams(detokenize=False, stop="a")


def test_a_clone_is_another_object() -> None:
    params = SamplingParams(stop_token_ids=[5])
    twin = params.clone()
    assert twin == params and twin is not params and twin.stop_token_ids is not params.stop_token_ids


def test_beams_are_those_of_transformers(llm: LLM) -> None:
    assert DEMO is not None
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    prompts = [PROMPT, "12+30="]
    found = llm.beam_search(
        [{"prompt": prompt} for prompt in prompts], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    )
    for prompt, output in zip(prompts, found, strict=True):
        ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
        expected = model.generate(
            ids, num_beams=3, num_return_sequences=3, max_new_tokens=6, do_sample=False, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert [each.tokens for each in output.sequences] == expected.sequences.tolist()
        scores = [each.cum_logprob / 6 for each in output.sequences]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        assert all(
            each.text == llm.get_tokenizer().decode(each.tokens, skip_special_tokens=True) for each in output.sequences
        )
        assert all(len(each.logprobs) == 6 and each.finish_reason == "length" for each in output.sequences)


def test_the_end_token_of_a_beam_is_left_out_unless_asked_for(llm: LLM) -> None:
    short, whole = (
        llm.beam_search("12+30=", BeamSearchParams(1, 8, include_stop_str_in_output=keep))[0].sequences[0]
        for keep in (False, True)
    )
    assert short.stop_reason == whole.tokens[-1] == 2 and whole.tokens[:-1] == short.tokens
    with pytest.raises(ValueError, match="A beam search does not sample"):
        llm.beam_search("1", BeamSearchParams(2, 4, temperature=0.7))


def test_metrics_count_what_the_engine_did(llm: LLM) -> None:
    def values() -> dict[str, Any]:
        found = llm.get_metrics()
        assert {type(each) for each in found} == {Counter, Gauge}
        return {each.name.removeprefix("torchweave_"): each.value for each in found}

    assert llm.reset_prefix_cache()
    before = values()
    outputs = [llm.generate(PROMPT, replace(GREEDY, ignore_eos=True))[0] for _ in range(2)]
    after = values()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["prompt_tokens"] == 2 * len(outputs[0].prompt_token_ids) and grown["generation_tokens"] == 40
    assert grown["prefix_cache_hits"] == outputs[1].num_cached_tokens > 0 == outputs[0].num_cached_tokens
    assert after["num_requests_running"] == 0 and after["kv_cache_usage_perc"] == 0


def test_the_prefix_cache_is_reset_between_requests_only(llm: LLM) -> None:
    llm.generate(PROMPT, GREEDY)
    stream = llm.stream("copy: ab c", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    assert not llm.reset_prefix_cache()
    assert {each.name: each.value for each in llm.get_metrics()}["torchweave_num_requests_running"] == 1
    del stream
    while not llm.reset_prefix_cache():
        time.sleep(0.005)
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(PROMPT, GREEDY)[0].num_cached_tokens > 0


def test_metrics_of_an_engine_that_has_ended_say_so() -> None:
    engine = LLM("demo", device="cpu", report=Report(show=False), enforce_eager=True)
    engine.shutdown()
    with pytest.raises(RuntimeError, match="it was shut down"):
        engine.get_metrics()


def test_tools_reach_the_template(llm: LLM) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}={{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    question = [{"role": "user", "content": "1"}]
    output = llm.chat(question, GREEDY, chat_template=template, tools=tools)[0]
    assert output.prompt_token_ids == llm.get_tokenizer().encode("add=1")[1:]
    with pytest.raises(ValueError, match="set add_generation_prompt=False to continue"):
        llm.chat(question, GREEDY, continue_final_message=True)


def test_default_parameters_have_vllms_name(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == llm.default_sampling_params()


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"enforce_eager": True}, {"compilation_config": 0}, {"compilation_config": '{"level": 0}'},
                                   {"compilation_config": {"mode": "NONE"}}])  # fmt: skip
def test_eager_execution_has_several_spellings(given: dict[str, Any]) -> None:
    config = engine_config({"model": "demo", **given})
    asked = {"torch_compile_config": config.torch_compile_config, "cuda_graph_config": config.cuda_graph_config}
    for path, value in EAGER.items():
        section, _, name = path.partition(".")
        assert getattr(asked[section], name) == value


def test_vllms_compilation_config_has_equivalents() -> None:
    config = engine_config(
        {
            "model": "demo",
            "dtype": torch.float16,
            "compilation_config": {
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "compile_sizes": [1, 2],
                "cudagraph_capture_sizes": [1, 2, 4],
                "dynamic_shapes_config": {"type": "unbacked"},
                "compile_cache_save_format": "unpacked",
                "backend": "eager",
                "level": 3,
            },
            "torch_compile_config": {"max_num_streams": 2},
        }
    )
    compiled, graphs = config.torch_compile_config, config.cuda_graph_config
    assert compiled == TorchCompileConfig(
        enable_inductor=False, enable_piecewise_cuda_graph=False, capture_num_tokens=(1, 2, 4), compile_sizes=(1, 2),
        dynamic_shapes="unbacked", compile_cache_format="unpacked", max_num_streams=2,
    )  # fmt: skip
    assert (graphs.batch_sizes, graphs.max_batch_size, graphs.capture_mixed) == ((1, 2, 4), 0, False)
    assert config.dtype == "float16" and engine_config({"model": "demo", "dtype": "half"}).dtype == "float16"
    mixed = engine_config({"model": "demo", "compilation_config": 3, "torch_compile_config": TorchCompileConfig()})
    assert mixed == engine_config({"model": "demo"})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"compilation_config": 2}, "levels 1 and 2, whole graphs without cuts, do not exist here; use 0 or 3"),
        ({"compilation_config": "{"}, "is not valid JSON"),
        ({"compilation_config": [1]}, "must be a dict, a level, or either in JSON"),
        ({"compilation_config": {"cudagraph_mod": 1}}, "did you mean compilation_config.cudagraph_mode?"),
        ({"compilation_config": {"cudagraph_mode": "SOME"}}, "it is one of NONE, PIECEWISE, FULL"),
        ({"compilation_config": {"dynamic_shapes_config": {"guards": 1}}}, "unknown option compilation_config.dynamic_sha"),
        ({"compilation_config": 0, "torch_compile_config": {"enable_inductor": True}}, "enable_inductor is given twice"),
        ({"enforce_eager": "yes"}, "enforce_eager='yes' must be True or False"),
    ],
    ids=repr,
)  # fmt: skip
def test_spellings_without_an_equivalent_are_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        engine_config({"model": "demo", **given})
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_graphs_of_the_encoder_have_vllms_option() -> None:
    option = "cuda_graph_config.max_encoder_graphs"
    assert compilation_options({"cudagraph_mm_encoder": False}) == {option: 0}
    assert compilation_options({"cudagraph_mm_encoder": True}) == {option: 16}
    assert compilation_options({"cudagraph_mode": "NONE"})[option] == compilation_options({"level": 0})[option] == 0
    with pytest.raises(ValueError, match=r"cudagraph_mm_encoder='some' has no equivalent: it is true or false"):
        compilation_options({"cudagraph_mm_encoder": "some"})


def test_a_level_is_refined_whatever_the_order() -> None:
    one, other = ({"level": 0, "cudagraph_mode": "FULL"}, {"cudagraph_mode": "FULL", "level": 0})
    assert compilation_options(one) == compilation_options(other)
    assert compilation_options(one)["cuda_graph_config.capture_mixed"] is True


# -- tokenizer, revision, download folder --------------------------------------------------------------------------------


def test_another_tokenizer_encodes_prompts_and_texts(tmp_path: Path, llm: LLM) -> None:
    assert DEMO is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (DEMO / name).is_file():
            text = (DEMO / name).read_text(encoding="utf-8")
            (tmp_path / name).write_text(text.replace('"4"', '"\N{FULLWIDTH DIGIT FOUR}"'), encoding="utf-8")
    with LLM("demo", device="cpu", report=Report(show=False), enforce_eager=True, tokenizer=str(tmp_path)) as other:
        ids = llm.get_tokenizer().encode("12+30=")
        (output,) = other.generate([{"prompt_token_ids": ids}], GREEDY)
        assert output.outputs[0].text == "\N{FULLWIDTH DIGIT FOUR}2"
        assert other.get_tokenizer().name_or_path == str(tmp_path)


def test_bad_tokenizers_and_revisions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: Any) -> None:
        LLM("demo", device="cpu", report=Report(show=False), enforce_eager=True, **options)

    with pytest.raises(ValueError, match=r"has no tokenizer\.json or other tokenizer files"):
        start(tokenizer=str(tmp_path))
    with pytest.raises(ValueError, match="is of a model on the hub, but 'demo' is here; leave revision out"):
        start(revision="v1")


def test_revision_and_folder_reach_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(hub_id: str, **given: Any) -> str:
        asked.update(given, hub_id=hub_id)
        return str(DEMO)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    options: dict[str, Any] = {"revision": "v2", "download_dir": str(tmp_path), "enforce_eager": True}
    with LLM("someone/demo", device="cpu", report=Report(show=False), **options) as engine:
        assert engine.generate("12+30=", GREEDY)[0].outputs[0].text == "42"
    assert (asked["hub_id"], asked["revision"], asked["cache_dir"]) == ("someone/demo", "v2", tmp_path)
    assert "demo" in BUILT_IN


def test_many_threads_read_metrics_while_requests_run(llm: LLM) -> None:
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(20):
                assert len(llm.get_metrics()) == 10
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    answers = llm.generate([PROMPT] * 8, GREEDY)
    for thread in threads:
        thread.join()
    assert not failures and len({answer.outputs[0].text for answer in answers}) == 1


@pytest.mark.parametrize(("policy", "order"), [(None, 1), ("priority", -1), ("fcfs", 0)])
def test_scheduling_policies_have_vllms_meaning(policy: str | None, order: int) -> None:
    with LLM("demo", device="cpu", report=Report(show=False), enforce_eager=True, scheduling_policy=policy) as engine:
        assert engine.engine.scheduler.limits.priority_order == order


def test_an_unknown_scheduling_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="scheduling_policy='lifo' is not known: it is one of fcfs, priority"):
        LLM("demo", device="cpu", scheduling_policy="lifo")


def test_configs_of_vllms_module_are_those_of_the_dict() -> None:
    from torchweave.config.compilation import CompilationConfig, DynamicShapesConfig, DynamicShapesType

    shapes = DynamicShapesConfig(type=DynamicShapesType.UNBACKED)
    config = CompilationConfig(dynamic_shapes_config=shapes, compile_sizes=[1, 2])
    asked = engine_config({"model": "demo", "compilation_config": config}).torch_compile_config
    assert asked == TorchCompileConfig(dynamic_shapes="unbacked", compile_sizes=(1, 2))
    with pytest.raises(ValueError, match=r"did you mean compilation_config\.level"):
        engine_config({"model": "demo", "compilation_config": CompilationConfig(levle=3)})


def test_drafts_by_an_engine_of_their_own_are_refused() -> None:
    for name in ("mtp_eagle_one_model", "eagle3_one_model"):
        assert options_of_file({f"speculative_config.{name}": True}) == {}
        with pytest.raises(ValueError, match=f"{name}=False has no equivalent: drafts are proposed in the step"):
            options_of_file({f"speculative_config.{name}": False})


def test_mtp_as_tensorrt_llm_names_it() -> None:
    given = {"decoding_type": "MTP", "num_nextn_predict_layers": 2}
    options = options_of_file({f"speculative_config.{name}": value for name, value in given.items()})
    assert options == {"speculative_config.method": "mtp", "speculative_config.num_speculative_tokens": 2}
