"""Conversion of YAML and command-line options to dataclasses, and its one-line errors."""

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweave.cli.arguments import (
    ENGINE_GROUPS,
    Parser,
    config_from_args,
    engine_config,
    engine_parser,
    normalize_argv,
)
from torchweave.cli.commands import generate, serve
from torchweave.cli.options import attribute_docs, build_config, convert, flatten, options_of, read_yaml
from torchweave.cli.output import print_table
from torchweave.config.options import EngineConfig, ServerConfig, SpeculativeConfig, TorchCompileConfig
from torchweave.engine.request import SamplingParams, StructuredOutputs


@dataclass(frozen=True)
class Inner:
    depth: int = 1
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    title: str
    scale: float = 1.0
    on: bool = False
    limit: int | None = None
    kind: Literal["plain", "fancy"] = "plain"
    sizes: tuple[int, ...] | None = None
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("scale", "1e-3", 0.001),
        ("scale", "2", 2.0),
        ("scale", 2, 2.0),
        ("on", "true", True),
        ("on", "OFF", False),
        ("on", True, True),
        ("limit", "12", 12),
        ("limit", "1_000", 1000),
        ("limit", "null", None),
        ("limit", "None", None),
        ("limit", None, None),
        ("limit", "-4", -4),
        ("kind", "fancy", "fancy"),
        ("sizes", "1,2, 4", (1, 2, 4)),
        ("sizes", "[1, 2]", (1, 2)),
        ("sizes", "[]", ()),
        ("sizes", "8", (8,)),
        ("sizes", 8, (8,)),
        ("sizes", [1, 2], (1, 2)),
        ("sizes", "null", None),
        ("title", "none", "none"),
        ("title", "12", "12"),
        ("inner.depth", "3", 3),
        ("inner.names", "a,b", ("a", "b")),
    ],
)
def test_values_convert_to_the_annotated_type(name: str, text: Any, value: Any):
    built: Any = build_config(Outer, {"title": "x", name: text})
    for part in name.split("."):
        built = getattr(built, part)
    assert built == value and type(built) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("scale", "fast", "scale='fast' is not valid: it takes a number"),
        ("scale", True, "scale=True is not valid"),
        ("scale", "nan", "it takes a number"),
        ("on", "maybe", "it takes true or false"),
        ("on", 1, "it takes true or false"),
        ("limit", "3.5", "it takes a whole number or null"),
        ("limit", 3.5, "it takes a whole number or null"),
        ("limit", True, "it takes a whole number or null"),
        ("kind", "facny", "one of plain, fancy; did you mean 'fancy'?"),
        ("sizes", "1,x", "a list of whole numbers or null"),
        ("sizes", [1, True], "a list of whole numbers or null"),
        ("title", 3, "it takes text"),
        ("title", None, "it takes text"),
        ("inner.depth", [3], "inner.depth=[3] is not valid"),
        ("limt", "3", "unknown option limt; did you mean limit?"),
        ("inner.dept", "3", "did you mean inner.depth?"),
        ("depth", "3", "did you mean inner.depth?"),
        ("wholly_else", "3", "`--help-all` lists"),
        ("inner", 3, "inner is a group of options; set one of them, such as inner."),
    ],
)
def test_unknown_names_and_wrong_types_are_rejected(name: str, text: Any, sentence: str):
    with pytest.raises(ValueError) as caught:
        build_config(Outer, {"title": "x", name: text})
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="title must be given"):
        build_config(Outer, {"scale": "2"})


def test_later_sources_override_only_the_options_they_name():
    built = build_config(Outer, {"title": "a", "inner.depth": 2, "scale": 3}, {"title": "b"}, {"inner.names": ["q"]})
    assert built == Outer("b", scale=3.0, inner=Inner(2, ("q",)))


@given(st.dictionaries(st.sampled_from(["limit", "inner.depth"]), st.integers()), st.booleans(), st.floats(-9, 9))
def test_text_and_typed_values_build_the_same_config(numbers: dict[str, int], on: bool, scale: float):
    values: dict[str, Any] = {"title": "t", "on": on, "scale": scale, **numbers}
    texts = {name: str(value) for name, value in values.items()}
    assert build_config(Outer, values) == build_config(Outer, texts)


@given(st.text())
def test_any_text_converts_or_gives_a_one_line_error(text: str):
    for option in options_of(Outer).values():
        try:
            convert(option.hint, text, option.name)
        except ValueError as error:
            assert str(error).startswith(f"{option.name}=")


def test_every_annotation_of_the_configs_is_supported():
    for config in (EngineConfig, SamplingParams):
        for option in options_of(config).values():
            assert "VALUE" not in option.metavar, option
            assert option.text, f"the docstring of {config.__name__} does not say what {option.name} is"


def test_option_help_comes_from_the_docstring():
    class Documented:
        """Something.

        Attributes:
            one: first line
                and more: of it.
            two, three: both.

        Raises:
            four: nothing.
        """

    assert attribute_docs(Documented) == {"one": "first line and more: of it.", "two": "both.", "three": "both."}


def test_nested_and_dotted_yaml_keys_are_equal(tmp_path: Path):
    nested, dotted = tmp_path / "nested.yaml", tmp_path / "dotted.yaml"
    nested.write_text("max_model_len: 64\ntorch_compile_config:\n  capture_num_tokens: [1, 2]\n  debug: true\n")
    dotted.write_text(
        "max_model_len: 64\ntorch_compile_config.capture_num_tokens: [1, 2]\ntorch_compile_config.debug: on\n"
    )
    assert read_yaml(nested) == read_yaml(dotted)
    assert build_config(EngineConfig, {"model": "m"}, read_yaml(nested)) == EngineConfig(
        "m", max_model_len=64, torch_compile_config=TorchCompileConfig(capture_num_tokens=(1, 2), debug=True)
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a: [1", "line 1 is not valid YAML"),
        (b"- 1\n- 2\n", "must hold options as `name: value`, but holds a list"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (None, "cannot be read: No such file"),
    ],
)
def test_malformed_yaml_gives_a_one_line_error(tmp_path: Path, content: bytes | None, sentence: str):
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_yaml(path)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_empty_yaml_sets_no_option(tmp_path: Path):
    (tmp_path / "x.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "x.yaml") == {} and flatten({"a": {}}) == {}


def test_empty_yaml_section_sets_no_option(tmp_path: Path):
    (tmp_path / "x.yaml").write_text("torch_compile_config:\n  # debug: true\nmax_model_len: null\n")
    assert parse_argv("--config", str(tmp_path / "x.yaml")) == EngineConfig("demo")


def test_yaml_accepts_every_option_of_the_command(tmp_path: Path):
    (tmp_path / "serve.yaml").write_text("max_batch_size: 4\nport: 8123\nserved_model_name: [a, b]\ndp: 2\n")
    args = serve.parser().parse_argv(["demo", "--config", str(tmp_path / "serve.yaml"), "--port", "0"])
    assert engine_config(args) == EngineConfig("demo", max_batch_size=4)
    assert config_from_args(ServerConfig, args) == ServerConfig(
        port=0, served_model_name=("a", "b"), data_parallel_size=2
    )

    (tmp_path / "generate.yaml").write_text(
        "temperature: 0.5\nlogit_bias: {25: -2}\nstructured_outputs:\n  json: {type: object}\n"
    )
    args = generate.parser().parse_argv(["demo", "--config", str(tmp_path / "generate.yaml"), "--max_tokens", "5"])
    params = config_from_args(SamplingParams, args, temperature=0.0, max_tokens=9)
    assert (params.temperature, params.max_tokens, params.logit_bias) == (0.5, 5, {25: -2.0})
    assert params.structured_outputs is not None and params.structured_outputs.json == {"type": "object"}

    with pytest.raises(ValueError, match=r"serve.yaml: unknown option port; `--help-all` lists all options"):
        generate.parser().parse_argv(["demo", "--config", str(tmp_path / "serve.yaml")])


def parse_argv(*argv: str) -> EngineConfig:
    parser = engine_parser("explain", "")
    args = parser.parse_argv(["demo", *argv])
    return engine_config(args) if args.model == "demo" else pytest.fail("MODEL was swallowed")


@pytest.mark.parametrize(
    "argv",
    [
        ["--torch_compile_config.enable_inductor=false"],
        ["--torch-compile-config.enable-inductor", "false"],
        ["-cc.enable_inductor=false"],
        ["-cc.enable_inductor", "false"],
        ["--torch_compile_config.no_enable_inductor"],
        ["-cc.no-enable-inductor"],
    ],
)
def test_every_spelling_of_an_option_is_accepted(argv: list[str]):
    assert parse_argv(*argv) == EngineConfig("demo", torch_compile_config=TorchCompileConfig(enable_inductor=False))


@pytest.mark.parametrize(
    "argv",
    [
        ["--speculative_config", '{"method": "ngram", "num_speculative_tokens": 4}'],
        ['--speculative-config={"method": "ngram", "max_draft_len": 4}'],
        ["--speculative_config.method=ngram", "--max-draft-len", "4"],
    ],
)
def test_a_section_is_an_object_in_json_or_its_options(argv: list[str]):
    assert parse_argv(*argv).speculative_config == SpeculativeConfig("ngram", num_speculative_tokens=4)


def test_a_section_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="is not valid JSON"):
        parse_argv("--speculative_config", "{method: ngram}")
    with pytest.raises(ValueError, match=r"did you mean --speculative_config\.method"):
        parse_argv("--speculative_config", '{"metod": "ngram"}')


def test_flag_before_the_prompt_does_not_consume_it():
    assert parse_argv("--trust-remote-code").trust_remote_code
    parser = engine_parser("generate", "")
    parser.add_argument("prompts", nargs="*")
    args = parser.parse_argv(["demo", "--trust_remote_code", "1+1=", "--max-model-len", "64", "2+2="])
    assert args.prompts == ["1+1=", "2+2="] and engine_config(args).max_model_len == 64


def test_arguments_after_double_dash_are_positional():
    parser = engine_parser("generate", "")
    parser.add_argument("prompts", nargs="*")
    assert parser.parse_argv(["demo", "--", "--max-model-len", "-5+3="]).prompts == ["--max-model-len", "-5+3="]


def test_explicit_options_override_optimization_levels(tmp_path: Path):
    plain = parse_argv("-O0")
    assert not plain.torch_compile_config.enable_fullgraph and plain.cuda_graph_config.max_batch_size == -1
    assert parse_argv("-O1").torch_compile_config == TorchCompileConfig()
    assert not parse_argv("-O1").cuda_graph_config.capture_mixed
    assert parse_argv("-O2") == parse_argv() == EngineConfig("demo")
    most = parse_argv("-O3", "-cc.max_num_streams=2").torch_compile_config
    assert most == TorchCompileConfig(pass_numerics="tolerance", compile_sizes=(1, 2, 4, 8), max_num_streams=2)
    assert parse_argv("-O3", "-cc.compile_sizes=16").torch_compile_config.compile_sizes == (16,)
    path = tmp_path / "x.yaml"
    path.write_text("torch_compile_config: {enable_fullgraph: true, debug: true}\n")
    mixed = parse_argv("-O0", "--config", str(path), "-cc.debug=false").torch_compile_config
    assert mixed.enable_fullgraph and not mixed.enable_inductor and not mixed.debug


def test_repeated_list_options_and_vllm_aliases(tmp_path: Path):
    assert parse_argv(
        "--cudagraph-capture-sizes", "1,2", "-cc.capture_num_tokens=4"
    ).torch_compile_config == TorchCompileConfig(capture_num_tokens=(1, 2, 4))
    assert parse_argv("--max-num-seqs", "8", "--max_num_batched_tokens=99") == EngineConfig(
        "demo", max_batch_size=8, max_num_tokens=99
    )
    (tmp_path / "x.yaml").write_text("cudagraph_capture_sizes: [8]\n")
    assert parse_argv("--config", str(tmp_path / "x.yaml")).torch_compile_config.capture_num_tokens == (8,)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--max_modle_len=5"], "unknown option --max_modle_len; did you mean --max_model_len?"),
        (["--max_model"], "did you mean --max_model_len?"),
        (["--capture_num_tokens", "4"], "did you mean --torch_compile_config.capture_num_tokens?"),
        (["--capture_num_tokns=4"], "did you mean --torch_compile_config.capture_num_tokens?"),
        (["--batch_sizes", "4"], "did you mean --cuda_graph_config.batch_sizes?"),
        (["-cc.enable_inducter=false"], "did you mean --torch_compile_config.enable_inductor?"),
        (["-O7"], "invalid choice: 7"),
        (["--max_model_len"], "expected one argument"),
        (["--max_model_len", "long"], "max_model_len='long' is not valid"),
        (["-5+3="], "goes after `--`"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_command_line_errors_are_one_line(argv: list[str], sentence: str):
    with pytest.raises(ValueError) as caught:
        parse_argv(*argv)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_sampling_options_fill_the_dataclass():
    parser = Parser(prog="x")
    parser.add_config(SamplingParams, "sampling")
    args = parser.parse_argv(
        ["--stop", "a,b", "--stop", "c", "--temperature", "0.5", "--ignore-eos", "--stop_token_ids=1,2"]
    )
    params = config_from_args(SamplingParams, args, max_tokens=99)
    assert params.stop_strings == ("a,b", "c") and params.ignore_eos and params.max_tokens == 99
    assert tuple(params.stop_token_ids or ()) == (1, 2) and params.temperature == 0.5
    assert config_from_args(SamplingParams, parser.parse_argv(["--stop", "a,b"])).stop_strings == ("a,b",)
    with pytest.raises(ValueError, match="temperature"):
        config_from_args(SamplingParams, parser.parse_argv(["--temperature", "-1"]))


def test_mapping_list_and_structured_output_options():
    parser = Parser(prog="x")
    parser.add_config(SamplingParams, "sampling")
    schema = '{"type": "integer"}'
    argv = ["--logit_bias", '{"5": -100, "7": 1.5}', "--bad_words", "a b,c", "--allowed_token_ids", "3,4"]
    params = config_from_args(SamplingParams, parser.parse_argv([*argv, "--structured_outputs.json", schema]))
    assert params.logit_bias == {5: -100.0, 7: 1.5} and tuple(params.bad_words or ()) == ("a b", "c")
    assert tuple(params.allowed_token_ids or ()) == (3, 4)
    assert params.structured_outputs == StructuredOutputs(json=schema)
    assert config_from_args(SamplingParams, parser.parse_argv(argv)).structured_outputs is None
    for wrong in ('{"x": 1}', "{", "25:-2", "[1]"):
        with pytest.raises(ValueError, match=r"^logit_bias=.* is not valid: it takes an object in JSON, such as '"):
            config_from_args(SamplingParams, parser.parse_argv(["--logit_bias", wrong]))
    with pytest.raises(ValueError, match="exactly one"):
        config_from_args(SamplingParams, parser.parse_argv(["--structured_outputs.json_object", "false"]))


def test_every_engine_option_is_on_the_command_line():
    parser = engine_parser("explain", "")
    assert set(parser.options) == set(options_of(EngineConfig)) - {"model"}
    assert {item.name for item in fields(EngineConfig)} - {"model"} <= {name.split(".")[0] for name in parser.options}


@given(st.lists(st.text(max_size=8), max_size=6))
def test_normalize_argv_is_idempotent(argv: list[str]):
    options = options_of(EngineConfig)
    try:
        once = normalize_argv(argv, options)
    except ValueError as error:  # such as -cc without its JSON
        assert str(error).count("\n") == 0
        return
    assert normalize_argv(once, options) == once


def test_yaml_accepts_tensorrt_llm_names(tmp_path: Path):
    (tmp_path / "x.yaml").write_text(
        "torch_compile_config: {enable_fullgraph: true, enable_inductor: true, enable_piecewise_cuda_graph: true,\n"
        "  capture_num_tokens: null, enable_userbuffers: true, max_num_streams: 1}\n"
        "cuda_graph_config: {enable_padding: true, max_batch_size: 0, batch_sizes: null}\n"
    )
    assert parse_argv("--config", str(tmp_path / "x.yaml")) == EngineConfig("demo")


@pytest.mark.parametrize(
    "argv",
    [
        ["--compilation-config", '{"compile_sizes": [1, 2], "cudagraph_capture_sizes": [1, 2, 4], "level": 3, '
         '"dynamic_shapes_config": {"type": "unbacked"}, "compile_cache_save_format": "unpacked"}'],
        ["-cc.compile_sizes=1,2", "-cc.cudagraph_capture_sizes=[1,2,4]", "-cc.dynamic_shapes_config.type=unbacked",
         "-cc.compile_cache_save_format=unpacked"],
        ["-O.level=3", "-O.compile_sizes", "1,2", "--compilation-config.cudagraph_capture_sizes=1,2,4",
         "-O.dynamic_shapes_config.type", "unbacked", "--compilation_config.compile-cache-save-format", "unpacked"],
    ],
)  # fmt: skip
def test_vllms_compilation_config_on_the_command_line(argv: list[str]):
    config = engine_config(engine_parser("explain", "").parse_argv(["demo", *argv]))
    assert config.torch_compile_config == TorchCompileConfig(
        compile_sizes=(1, 2), capture_num_tokens=(1, 2, 4), dynamic_shapes="unbacked", compile_cache_format="unpacked"
    )
    assert config.cuda_graph_config.batch_sizes == (1, 2, 4) and config.model == "demo"


@pytest.mark.parametrize(
    ("value", "ops"),
    [
        ('["vllm::unified_attention_with_output", "mylib::mixer"]', ("mylib::mixer",)),
        ('["vllm.unified_attention", "mylib.mixer"]', ("mylib::mixer",)),
        ("mylib::mixer,aten::silu", ("mylib::mixer", "aten::silu")),
        ("null", ()),
    ],
)
def test_vllms_splitting_ops_on_the_command_line(value: str, ops: tuple[str, ...]):
    for argv in (
        ["--compilation-config", f'{{"splitting_ops": {value if value[0] in "[n" else json.dumps(value)}}}'],
        [f"-cc.splitting_ops={value}"],
    ):
        config = engine_config(engine_parser("explain", "").parse_argv(["demo", *argv]))
        assert config.torch_compile_config.splitting_ops == ops


@pytest.mark.parametrize("argv", [["-O.level=0"], ["-O0"], ["--enforce-eager"], ["-cc", "0"], ["--enforce_eager=true"]])
def test_eager_execution_on_the_command_line(argv: list[str]):
    config = engine_config(engine_parser("explain", "").parse_argv(["demo", *argv]))
    assert not config.torch_compile_config.enable_fullgraph and config.cuda_graph_config.max_batch_size == -1
    assert engine_config(engine_parser("explain", "").parse_argv(["demo", "--enforce-eager=false"])).num_ranks == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["-O.level=2"], "levels 1 and 2"),
        (["--compilation-config", "{"], "is not valid JSON"),
        (["-cc.cudagraph_mode=SOME"], "it is one of NONE"),
        (["--compilation-config", '{"levle": 3}'], "did you mean compilation_config.level?"),
        (["-cc.splitting_ops=[]"], "graphs are always split at attention"),
        (["--compilation-config", '{"splitting_ops": ["vllm::moe_forward"]}'], "an op of vLLM's own models"),
        (["-cc.levle=3"], "unknown option --torch_compile_config.levle"),
    ],
)
def test_compilation_configs_without_an_equivalent_are_refused(argv: list[str], sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        engine_config(engine_parser("explain", "").parse_argv(["demo", *argv]))


def test_tensorrt_llms_options_file(tmp_path: Path):
    file = tmp_path / "extra.yml"
    file.write_text(
        "torch_compile_config:\n  capture_num_tokens: [1, 2, 4]\n  enable_userbuffers: false\n"
        "cuda_graph_config:\n  enable_padding: true\n  max_batch_size: 8\n"
        "kv_cache_config:\n  enable_block_reuse: false\n  tokens_per_block: 32\n"
        "scheduler_config:\n  capacity_scheduler_policy: MAX_UTILIZATION\n"
        "speculative_config:\n  decoding_type: NGram\n  max_draft_len: 4\n"
        "enable_chunked_prefill: false\nmax_seq_len: 512\n"
    )
    base = tmp_path / "base.yml"
    base.write_text("max_seq_len: 64\ncompilation_config:\n  mode: VLLM_COMPILE\n  cudagraph_mode: piecewise\n")
    argv = ["demo", "--config", str(base), "--extra_llm_api_options", str(file), "--max_batch_size", "4"]
    config = engine_config(engine_parser("explain", "").parse_argv(argv))
    assert config.torch_compile_config == TorchCompileConfig(capture_num_tokens=(1, 2, 4), enable_userbuffers=False)
    assert config.cuda_graph_config.max_batch_size == 8 and not config.cuda_graph_config.capture_mixed
    assert not config.enable_prefix_caching and config.block_size == 32 and config.max_model_len == 512
    assert config.capacity_scheduler_policy == "max_utilization" and not config.enable_chunked_context
    assert (config.speculative_config.method, config.speculative_config.num_speculative_tokens) == ("ngram", 4)
    assert config.max_batch_size == 4
    file.write_text("kv_cache_config:\n  free_gpu_memory_portion: 0.8\n")
    with pytest.raises(ValueError, match=r"unknown option kv_cache_config\.free_gpu_memory_portion"):
        engine_parser("explain", "").parse_argv(["demo", "--extra-llm-api-options", str(file)])


def test_compile_cache_location_and_switch():
    assert parse_argv("--compile-cache-dir", "/x").torch_compile_config.compile_cache_dir == "/x"
    assert not parse_argv("--no-compile-cache").torch_compile_config.compile_cache


def test_help_shows_common_options_and_help_all_every_option(capsys: pytest.CaptureFixture[str]):
    texts = {}
    for option in ("--help", "--help-all", "--help_all", "-h"):
        with pytest.raises(SystemExit) as ended:
            serve.parser().parse_argv([option])
        assert ended.value.code == 0
        texts[option] = capsys.readouterr().out
    assert texts["--help"] == texts["-h"] and texts["--help-all"] == texts["--help_all"]
    shown = re.findall(r"^  (?:--)?(\w[\w.]*)", texts["--help"], flags=re.MULTILINE)
    assert shown[:3] == ["MODEL", "host", "port"] and "api_key" in shown and "max_num_tokens" in shown
    assert "run_ahead" not in shown and "more options: torchweave serve --help-all" in texts["--help"]
    everything = re.findall(r"^  --([\w.]+)", texts["--help-all"], flags=re.MULTILINE)
    assert {*options_of(EngineConfig), *options_of(ServerConfig)} - {"model"} <= set(everything)
    titles = [title for title in ENGINE_GROUPS if f"\n{title}:" in texts["--help-all"]]
    assert titles == list(ENGINE_GROUPS)


def test_tables_wrap_between_words_and_become_records_when_words_do_not_fit(capsys: pytest.CaptureFixture[str]):
    columns, rows = ("option", "value", "why"), [("enable_piecewise_cuda_graph", "no", "CUDA graphs need a GPU")]
    print_table("Plan", columns, rows, width=45)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Plan" and all(len(line) <= 45 for line in lines)
    assert [line.split()[0] for line in lines[3:4]] == ["enable_piecewise_cuda_graph"] and len(lines) > 5
    print_table("Plan", columns, rows, width=30)
    assert capsys.readouterr().out.splitlines() == [
        "Plan", "enable_piecewise_cuda_graph", "  value  no", "  why    CUDA graphs need a GPU", "",
    ]  # fmt: skip
    print_table("Empty", columns, [])
    assert capsys.readouterr().out == ""
