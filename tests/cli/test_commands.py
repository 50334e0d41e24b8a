"""Commands of the command line on a tiny model."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

from torchweave.cli.commands import generate
from torchweave.cli.main import main
from torchweave.cli.output import write_output
from torchweave.compiler.explain.facts import schema
from torchweave.config.model_source import resolve
from torchweave.distributed.worker_group import RankFailure
from torchweave.engine.outputs import CompletionOutput
from torchweave.verify.hf_baseline import TransformersBaseline

Lines = pytest.MonkeyPatch


def test_one_prompt_prints_only_its_output(tiny_args: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["generate", *tiny_args, "ab", "--max_tokens", "5", "--ignore_eos"]) == 0
    alone = capsys.readouterr().out
    assert alone.endswith("\n") and len(alone.rstrip("\n")) == 5
    assert main(["generate", *tiny_args, "ab", "cd", "--max_tokens", "5", "--ignore_eos"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "ab → " + alone.rstrip("\n") and second.startswith("cd → ")


def test_generate_json_from_stdin(tiny_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Lines):
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\ncd\n"))
    assert main(["generate", *tiny_args, "--json", "--max_tokens", "4", "--ignore_eos", "-n", "2"][:-2]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(row["prompt"] for row in rows) == ["ab", "cd"]
    assert all(len(row["outputs"][0]["token_ids"]) == 4 for row in rows)
    assert all(row["outputs"][0]["finish_reason"] == "length" for row in rows)


def test_logprobs_need_json_output(tiny_args: list[str], capsys: pytest.CaptureFixture[str]):
    asked = ["generate", *tiny_args, "ab", "--max_tokens", "6", "--ignore_eos", "--logprobs", "2"]
    assert main([*asked, "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    told = output["logprobs"]
    assert len(told) == 6 and all(len(each) == 2 for each in told)  # greedy: the token is the first of the two
    drawn = [each[str(token)] for each, token in zip(told, output["token_ids"], strict=True)]
    assert drawn == [max(each.values()) for each in told]
    assert output["cumulative_logprob"] == pytest.approx(sum(drawn))
    assert main(asked) == 2
    assert "--logprobs needs --json" in capsys.readouterr().err


def test_characters_outside_stdout_encoding_are_escaped(tiny_args: list[str], monkeypatch: Lines):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    asked = ["generate", *tiny_args, "\N{EURO SIGN}", "ab", "--allowed_token_ids", "3", "--max_tokens", "1"]
    assert main(asked) == main([*asked, "--json"]) == 0
    out.seek(0)
    first, second, *rows = out.read().splitlines()
    assert (first, second) == (r"\u20ac \u2192 a", r"ab \u2192 a")
    assert sorted(json.loads(row)["prompt"] for row in rows) == ["ab", "\N{EURO SIGN}"]


def test_closed_standard_streams_are_treated_as_empty(
    tiny_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Lines
):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", *tiny_args]) == 2
    assert "there is no prompt" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdout", None)
    assert main(["generate", *tiny_args, "ab", "--max_tokens", "2"]) == 0


def test_n_prints_every_output_of_a_prompt(tiny_args: list[str], capsys: pytest.CaptureFixture[str]):
    options = ["--n", "3", "--temperature", "1", "--seed", "5", "--max_tokens", "3", "--json"]
    assert main(["generate", *tiny_args, *options, "ab"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [output["index"] for output in row["outputs"]] == [0, 1, 2]
    first = row
    assert main(["generate", *tiny_args, *options, "ab"]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_beam_search_ignores_sampling_defaults_of_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = shutil.copytree(resolve("demo").folder, tmp_path / "demo")
    asked = {"do_sample": True, "temperature": 3.0, "top_k": 20, "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    assert (
        main(["generate", str(folder), "12+30=", "--device", "cpu", "-O0", "--quiet", "--json", "--beam_width", "3"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == "42"


def test_chat_keeps_the_turns(tiny_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Lines):
    turns = iter(["ab", "", "cd", "/new", "ab", "/bye"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(turns))
    assert main(["chat", *tiny_args, "--max_tokens", "4", "--ignore_eos"]) == 0
    first, second, again = capsys.readouterr().out.splitlines()
    assert first == again != second


def test_chat_continues_after_a_turn_that_exceeds_max_model_len(
    tiny_args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Lines
):
    def turns(prompt: str = "") -> str:
        if not texts:
            raise EOFError
        return texts.pop(0)

    texts = ["a" * 600, "ab"]
    monkeypatch.setattr("builtins.input", turns)
    assert main(["chat", *tiny_args, "--max_tokens", "4", "--ignore_eos"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 and "/new starts a new conversation" in captured.err


def test_explain_shows_the_plan_and_compiled_pieces(
    tiny_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked = ["-O2", "--torch_compile_config.enable_inductor=false", "--torch_compile_config.no_compile_cache"]
    asked += ["--dump-dir", str(tmp_path / "dump"), "--html", str(tmp_path / "page.html")]
    assert main(["explain", *tiny_args, *asked, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(facts)
    assert "CUDA graphs need a GPU" in (tmp_path / "page.html").read_text()
    for name in ("report.html", "explain.json", "timeline.jsonl"):
        assert (tmp_path / "dump" / name).exists()
    plan = {row["name"]: row for row in facts["plan"]}
    assert plan["torch_compile_config.enable_inductor"]["effective"] is False
    assert plan["num_kv_blocks"]["effective"] > 0
    assert 1 < len(facts["pieces"]) < sum(piece["shared_by"] for piece in facts["pieces"])
    assert all(row["matches"] >= 0 for row in facts["passes"]) and facts["passes"]
    assert main(["explain", *tiny_args, *asked[:3]]) == 0
    text = capsys.readouterr().out
    for word in ("Plan", "asked", "effective", "why", "Pieces", "Passes", "Start-up", "CUDA graphs need a GPU"):
        assert word in text


def test_explain_lists_near_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from torchweave.verify.zoo import build, zoo_model

    build(zoo_model("cohere2")).save_pretrained(tmp_path / "model")
    options = ["--quiet", "--cpu_kv_cache_gib", "0.02", "-cc.enable_inductor=false", "-cc.no_compile_cache"]
    assert main(["explain", str(tmp_path / "model"), *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema()).validate(facts)
    merged = next(row for row in facts["passes"] if row["name"] == "merge_linears")
    assert merged["matches"] > 0
    assert any("boundary op attention lies between" in miss for miss in merged["near_misses"])


def test_models_list(capsys: pytest.CaptureFixture[str]):
    assert main(["models", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "demo" in found["built_in"] and "llama" in found["architectures"] and "shape:llama-1b" in found["shapes"]


FAULTS = [
    (["genrate"], "unknown command 'genrate'; did you mean generate?"),
    (["generate"], "are required: MODEL; usage: torchweave generate MODEL [PROMPT...] [OPTION...]"),
    (["models"], "are required: ACTION; usage: torchweave models list|verify [NAME...] [OPTION...]"),
    (["cache"], "are required: ACTION; usage: torchweave cache list|inspect|verify|"),
    (["bench", "suite"], "are required: --model; usage: torchweave bench suite --model MODEL [OPTION...]"),
    (["generate", "demo", "x", "--temperature", "-1"], "temperature must be"),
    (["generate", "demo", "x", "--temprature", "1"], "unknown option --temprature; did you mean --temperature?"),
    (["generate", "demo", "x", "--config", "/nowhere.yaml"], "config file /nowhere.yaml cannot be read"),
    (["generate", "/nowhere/at/all", "x"], "/nowhere/at/all"),
    (["generate", "demo-eagle", "x"], "add --speculative_config.method eagle3 --speculative_config.model demo-eagle"),
    (["explain", "demo-eagle"], "demo-eagle is an EAGLE-3 draft head and no model"),
    (["generate", "demo", "x", "-cc.enable_inducter=1"], "did you mean --torch_compile_config.enable_inductor?"),
    (["generate", "demo", "x", "--max_model_len", "0"], "max_model_len=0 must be at least 1"),
    (["generate", "demo", "x", "--tp", "0"], "tensor_parallel_size=0 must be at least 1"),
    (["serve", "demo", "--tp", "2", "--executor", "torchrun"], "executor=torchrun is for scripts"),
    (
        ["serve", "demo", "--api_key_file", "/nowhere"],
        "api_key_file /nowhere cannot be read: No such file or directory",
    ),
    (["serve", "demo", "--chat_template", "/"], "chat_template / cannot be read: Is a directory"),
    (["chat", "demo", "--runner", "pooling", "-O0"], "computes embeddings, no text"),
    (["doctor", "demo", "--tp", "2"], "Leave out --tp and --pp"),
    (["models", "verify"], "give --all"),
    (["models", "list", "llama"], "`torchweave models list` takes no llama; remove it"),
    (["models", "list", "--write", "x"], "`torchweave models list` takes no --write"),
    (["cache", "list", "0186"], "`torchweave cache list` applies to all entries; remove '0186'"),
    (["cache", "import", "a", "b"], "`torchweave cache import` takes one file; remove 'b'"),
    (["cache", "export", "a", "--all"], "--all is an option of `torchweave cache prune`; remove it"),
    (["models", "verfy"], "invalid choice: 'verfy'"),
    (["models", "verify", "lama"], "Unknown architecture 'lama'; did you mean llama?"),
    (["bench", "lateny", "--model", "demo"], "unknown scenario 'lateny'; did you mean latency?"),
    (["models", "verify", "llama", "--pipeline_parallel_size", "2", "--write", "x"], "no column for stages"),
    (
        ["models", "verify", "llama", "--write", "/nowhere/models.md"],
        "--write /nowhere/models.md: there is no such folder",
    ),
    (["models", "verify", "llama", "--write", "/"], "--write /: this is a folder; name a file in it"),
    (["explain", "demo", "--html", "/"], "--html /: this is a folder; name a file in it"),
    (["explain", "demo", "--html", "~nobody-of-this-name/a.html"], "there is no home folder ~nobody-of-this-name"),
    (["explain", "demo", "--dump-dir", "~nobody-of-this-name/a"], "there is no home folder ~nobody-of-this-name"),
    (
        ["bench", "latency", "--model", "demo", "--batch_sizes", "4,0"],
        "batch_sizes holds 0; every number must be at least",
    ),
    (["bench", "latency", "--model", "demo", "--ttft_lens", "0"], "ttft_lens holds 0; every number must be at least 1"),
    (["bench", "suite", "--model", "demo", "--num_requests", "-1"], "num_requests=-1 must be at least 0"),
    (["bench", "host", "--output", "/"], "--output /: this is a folder; name a file in it"),
    (["bench", "host", "--output", f"{__file__}/a.json"], "is not a folder; name another file"),
    (["bench", "host", "--output", f"/{'a' * 300}.json"], "File name too long; name another file"),
    (["bench", "host", "--output", "a.md"], "name the JSON file, such as a.json"),
    (["models", "verify", "llama", "--tensor_parallel_size", "2;4"], "expected a number of ranks, or a list"),
]


@pytest.mark.parametrize(("argv", "sentence"), FAULTS)
def test_invalid_input_prints_one_line_and_exits_with_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: Lines
):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "[Errno" not in captured.err and len(captured.err.splitlines()) == 1
    assert captured.err.startswith("torchweave: ") and captured.out == ""


def test_broken_chat_template_is_refused_before_the_server_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "chat.jinja").write_text("a\n{% if b %}")
    assert main(["serve", "demo", "--port", "0", "--chat_template", str(tmp_path / "chat.jinja")]) == 2
    assert "chat.jinja is not valid Jinja: line 2: Unexpected end of template" in capsys.readouterr().err


def test_dead_rank_prints_one_line_and_exits_with_1(monkeypatch: Lines, capsys: pytest.CaptureFixture[str]):
    def run(argv: list[str]) -> int:
        ended = RankFailure("Rank 1 (process 7)\nhas ended")
        if argv[0] == "building":
            raise ended
        raise RuntimeError(f"The engine failed: {ended}") from (ended if argv[0] == "answering" else None)

    monkeypatch.setattr(generate, "run", run)
    for when, said in (("building", ""), ("answering", "The engine failed: ")):
        assert main(["generate", when]) == 1
        assert capsys.readouterr().err == f"torchweave: {said}Rank 1 (process 7) has ended\n"
        with pytest.raises(RuntimeError, match="Rank 1"):
            main(["generate", when, "--traceback"])
    with pytest.raises(RuntimeError):  # a fault of ours keeps its traceback
        main(["generate", "otherwise"])


def test_result_is_printed_when_the_output_file_is_not_writable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Lines
):
    def full(result: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchweave.cli.commands.bench._host", lambda scenario, args: {"steps": 7})
    monkeypatch.setattr("torchweave.bench.result.save", full)
    assert main(["bench", "host", "--json", "--output", str(tmp_path / "a.json")]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"steps": 7}
    assert captured.err.endswith("a.json cannot be written: No space left on device; the result is printed above\n")


def test_unwritable_report_page_gives_a_one_line_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--html .* cannot be written: Is a directory; name another file"):
        write_output("--html", tmp_path, "a page")


def test_reference_model_loads_without_a_progress_bar(tiny_model: Path, capfd: pytest.CaptureFixture[str]):
    TransformersBaseline(str(tiny_model), torch.float32, "cpu").close()
    assert capfd.readouterr() == ("", "")


def test_prompt_longer_than_max_model_len_is_rejected(tiny_args: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["generate", *tiny_args, "a" * 600]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_stdin_that_is_not_utf8_is_rejected(tiny_args: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["generate", *tiny_args, "ab\udcff"]) == 2
    assert capsys.readouterr().err == (
        "torchweave: The text holds half of a surrogate pair at character 2; send whole characters.\n"
    )


def test_folder_without_weights_is_rejected(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    assert main(["generate", str(tmp_path), "ab", "--quiet"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "missing", "sentence"),
    [
        (["generate", "ab"], "tokenizer*", "has no tokenizer, and this command takes text; pass --tokenizer"),
        (["chat"], "tokenizer*", "has no tokenizer, and this command takes text; pass --tokenizer"),
        (["chat"], "chat_template*", "has no chat template; complete plain text by `torchweave generate"),
    ],
)
def test_missing_tokenizer_or_template_is_named_before_the_engine_starts(
    command: list[str],
    missing: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Lines,
):
    folder = shutil.copytree(resolve("demo").folder, tmp_path / "demo")
    for file in folder.glob(missing):
        file.unlink()
    monkeypatch.setattr("torchweave.cli.session.start_llm", lambda *_: pytest.fail("an engine starts"))
    assert main([command[0], str(folder), *command[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_traceback_flag_prints_the_traceback():
    with pytest.raises(ValueError, match="max_model_len"):
        main(["generate", "demo", "x", "--max_model_len", "0", "--traceback"])


def test_help_does_not_import_torch():
    code = "import sys; from torchweave.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "generate" in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "demo", "a", "--gpu_memory_utilization", "2"],
        ["chat", "demo", "--max_batch_size", "0"],
        ["explain", "demo", "--block_size", "0"],
        ["generate", "demo", "a", "--structured_outputs.regex", "["],
        ["generate", "nope", "a"],
        ["chat", "./nope"],
        ["explain", "nope"],
        ["serve", "nope"],
    ],
    ids=" ".join,
)
def test_an_invalid_option_or_model_name_is_refused_before_torch_is_imported(argv: list[str]):
    code = f"import sys; from torchweave.cli.main import main; sys.exit(main({argv}) != 2 or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", ["generate", "chat", "explain", "models", "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0 and "usage: torchweave" in capsys.readouterr().out


def delta(text: str, reason: str | None = None, index: int = 0) -> CompletionOutput:
    return CompletionOutput(index, text, [len(text)], reason)


def test_outputs_are_printed_in_prompt_order():
    out = io.StringIO()
    deltas = [
        (1, delta("B")),
        (0, delta("A")),
        (1, delta("b", "stop")),
        (0, delta("a", "stop")),
        (2, delta("C", "stop")),
    ]
    generate.print_in_order(["x", "y", "z"], iter(deltas), 1, out)
    assert out.getvalue() == "x → Aa\ny → Bb\nz → C\n"


def test_json_line_is_written_when_all_outputs_of_a_prompt_finished():
    deltas = [(0, delta("A", "stop", 1)), (0, delta("b")), (0, delta("c", "length"))]
    (line,) = generate.json_lines(["x"], iter(deltas), 2)
    assert [output["text"] for output in json.loads(line)["outputs"]] == ["bc", "A"]
