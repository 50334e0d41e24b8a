"""Options that a program for vLLM or TensorRT-LLM gives: what they become, what is said about them, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.test_plan import CPU
from torchweave.cli.arguments import config_from_args, engine_config, engine_parser
from torchweave.cli.commands import serve
from torchweave.config import ModelFacts, resolve
from torchweave.config.model_source import override
from torchweave.config.options import EngineConfig, ServerConfig
from torchweave.config.other_options import ALL, own_value, read_variables
from torchweave.config.peer_options import read_options
from torchweave.config.validate import check_config, check_server, flatten
from torchweave.models.weights.quantized_checkpoint import quantization_config

# Of vLLM's `LLM`, each with a value that scripts give, and the start of what is said about it.
KEYWORDS: list[tuple[str, Any, str]] = [
    ("runner", "generate", ""), ("convert", "auto", ""), ("task", "generate", ""), ("tokenizer", None, ""),
    ("tokenizer_mode", "auto", ""), ("skip_tokenizer_init", True, "has no effect; SamplingParams(detokenize=False)"),
    ("trust_remote_code", True, ""), ("allowed_local_media_path", "", ""),
    ("allowed_media_domains", ["a.example"], "has no effect; it is an option of `torchweave serve`"),
    ("tensor_parallel_size", 1, ""), ("pipeline_parallel_size", 1, ""), ("data_parallel_size", 1, ""),
    ("distributed_executor_backend", "mp", ""), ("dtype", torch.bfloat16, ""), ("quantization", None, ""),
    ("revision", None, ""), ("code_revision", None, ""), ("tokenizer_revision", None, ""), ("seed", 0, ""),
    ("gpu_memory_utilization", 0.92, ""), ("swap_space", 4, ""), ("cpu_offload_gb", 0, ""),
    ("kv_offloading_size", 2, ""), ("enforce_eager", False, ""), ("max_seq_len_to_capture", 8192, ""),
    ("disable_custom_all_reduce", True, ""), ("disable_async_output_proc", False, ""), ("hf_token", None, ""),
    ("hf_overrides", {"rope_theta": 1e6}, ""), ("rope_scaling", None, ""), ("rope_theta", None, ""),
    ("mm_processor_kwargs", None, ""), ("limit_mm_per_prompt", {"image": 2, "video": 0}, ""),
    ("mm_processor_cache_gb", 8, "has no effect; prepared images are not kept"), ("pooler_config", None, ""),
    ("override_pooler_config", None, ""), ("structured_outputs_config", {"backend": "auto"}, ""),
    ("guided_decoding_backend", "xgrammar", "has no effect; llguidance"), ("compilation_config", 3, ""),
    ("attention_config", {"backend": "FLASH_ATTN"}, "has no effect; this is decided"),
    ("kv_cache_memory_bytes", 1 << 30, ""), ("kv_cache_dtype", "auto", ""), ("calculate_kv_scales", False, ""),
    ("logits_processors", None, ""), ("max_model_len", "4k", ""), ("max_num_seqs", 256, ""),
    ("max_num_batched_tokens", 8192, ""), ("max_num_partial_prefills", 1, ""), ("block_size", 16, ""),
    ("enable_prefix_caching", None, ""), ("prefix_caching_hash_algo", "sha256", ""), ("enable_chunked_prefill", None, ""),
    ("num_gpu_blocks_override", None, ""), ("max_logprobs", 20, ""), ("logprobs_mode", "raw_logprobs", ""),
    ("disable_sliding_window", False, ""), ("disable_cascade_attn", True, ""), ("load_format", "safetensors", ""),
    ("model_impl", "transformers", ""), ("generation_config", "vllm", ""),
    ("override_generation_config", {"temperature": 0.6}, ""), ("enable_sleep_mode", False, ""), ("enable_lora", False, ""),
    ("max_lora_rank", 16, ""),
    ("cudagraph_capture_sizes", [1, 2], ""), ("speculative_config", None, ""), ("async_scheduling", True, ""),
    ("served_model_name", "demo", ""), ("enable_expert_parallel", False, ""), ("worker_cls", "auto", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said"), KEYWORDS, ids=[name for name, *_ in KEYWORDS])
def test_a_keyword_of_vllms_llm_is_taken(name: str, value: Any, said: str) -> None:
    config, advice = read_options({"model": "demo", name: value})
    check_config(config)
    assert [sentence.startswith(said) for _, sentence in advice] == ([True] if said else [])


def test_the_keywords_are_at_least_those_of_vllm() -> None:
    assert len({name for name, *_ in KEYWORDS}) >= 67


# Of `vllm serve`, as published commands have them, with what they become: an option of the engine or of the server.
COMMANDS: list[tuple[str, dict[str, Any], str]] = [
    ("--host 0.0.0.0", {"host": "0.0.0.0"}, ""), ("--port 8001", {"port": 8001}, ""),
    ("--uds /tmp/s.sock", {"uds": "/tmp/s.sock"}, ""), ("--root-path /llm", {"root_path": "/llm"}, ""),
    ("--api-key a b", {"api_key": ("a", "b")}, ""), ("--served-model-name x y", {"served_model_name": ("x", "y")}, ""),
    ("--ssl-keyfile k --ssl-certfile c", {"ssl_keyfile": "k", "ssl_certfile": "c"}, ""),
    ("--ssl-keyfile k --ssl-certfile c --ssl-ca-certs a --ssl-cert-reqs 2", {"ssl_ca_certs": "a", "ssl_cert_reqs": 2}, ""),
    ("--middleware a.B c:d", {"middleware": ("a.B", "c:d")}, ""), ('--allowed-origins ["*"]', {"allowed_origins": ("*",)}, ""),
    ("--enable-auto-tool-choice", {}, ""), ("--tool-call-parser hermes", {"tool_call_parser": "hermes"}, ""),
    ("--reasoning-parser qwen3", {"reasoning_parser": "qwen3"}, ""), ("--chat-template t.jinja", {"chat_template": "t.jinja"}, ""),
    ("--chat-template-content-format auto", {}, ""), ("--response-role assistant", {}, ""),
    ('--default-chat-template-kwargs {"enable_thinking":false}', {"default_chat_template_kwargs": {"enable_thinking": False}}, ""),
    ("--disable-log-requests", {}, ""), ("--no-enable-log-requests", {}, ""), ("--disable-log-stats", {}, ""),
    ("--enable-log-requests", {}, "requests are counted"), ("--max-log-len 100", {}, ""), ("--uvicorn-log-level info", {}, ""),
    ("--disable-uvicorn-access-log", {}, ""), ("--enable-request-id-headers", {}, ""), ("--enable-prompt-tokens-details", {}, ""),
    ("--enable-server-load-tracking", {}, ""), ("--disable-frontend-multiprocessing", {}, ""),
    ("--api-server-count 2", {"api_server_count": 2}, ""), ("-tp 2", {"tensor_parallel_size": 2}, ""),
    ("-pp 2", {"pipeline_parallel_size": 2}, ""), ("-dp=2", {"data_parallel_size": 2}, ""), ("-q awq", {"quantization": "awq"}, ""),
    ("--quantization awq_marlin", {"quantization": "awq"}, ""), ("--enable-expert-parallel", {"enable_expert_parallel": True}, ""),
    ("--distributed-executor-backend ray", {"executor": "ray"}, ""), ("--dtype half", {"dtype": "float16"}, ""),
    ("--max-model-len 4k", {"max_model_len": 4000}, ""), ("--max-model-len 32K", {"max_model_len": 32768}, ""),
    ("--max-model-len auto", {"max_model_len": None}, ""), ("--gpu-memory-utilization .95", {"gpu_memory_utilization": 0.95}, ""),
    ("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}, ""), ("--kv-cache-memory-bytes 2G", {"kv_cache_memory_bytes": 2**31}, ""),
    ("--swap-space 16", {}, "kv_offload_gb keeps"), ("--cpu-offload-gb 0", {}, ""), ("--block-size 32", {"block_size": 32}, ""),
    ("--max-num-seqs 64", {"max_batch_size": 64}, ""), ("--max-num-batched-tokens 8k", {"max_num_tokens": 8000}, ""),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}, ""), ("--enable-chunked-prefill", {}, ""),
    ("--enforce-eager", {"torch_compile_config.enable_inductor": False}, ""), ("--seed 7", {"seed": 7}, ""),
    ("--trust-remote-code", {"trust_remote_code": True}, ""), ("--tokenizer t", {"tokenizer": "t"}, ""),
    ("--tokenizer-mode slow", {}, ""), ("--revision main", {"revision": "main"}, ""),
    ("--download-dir /d", {"download_dir": "/d"}, ""),
    ("--load-format safetensors", {}, ""), ("--generation-config vllm", {"generation_config": "vllm"}, ""),
    ('--override-generation-config {"temperature":0.5}', {"override_generation_config": {"temperature": 0.5}}, ""),
    ("--override-generation-config.top_k 5", {"override_generation_config": {"top_k": 5}}, ""),
    ('--hf-overrides {"rope_theta":5} --rope-scaling {"rope_type":"yarn"}',
     {"hf_overrides": {"rope_theta": 5, "rope_scaling": {"rope_type": "yarn"}}}, ""),
    ('--limit-mm-per-prompt {"image":2,"video":0}', {"limit_mm_per_prompt.image": 2}, ""),
    ("--limit-mm-per-prompt image=3", {"limit_mm_per_prompt.image": 3}, ""),
    ("--allowed-local-media-path /images", {"allowed_local_media_path": "/images"}, ""),
    ("--allowed-media-domains a.example b.example", {"allowed_media_hosts": ("a.example", "b.example")}, ""),
    ("--cudagraph-capture-sizes 1 2 4", {"torch_compile_config.capture_num_tokens": (1, 2, 4)}, ""),
    ("--max-cudagraph-capture-size 64", {"cuda_graph_config.max_batch_size": 64}, ""),
    ("-O0", {"torch_compile_config.enable_fullgraph": False}, ""),
    ("--scheduling-policy priority", {"scheduling_policy": "priority"}, ""),
    ("--async-scheduling", {"run_ahead": 2}, ""), ("--no-async-scheduling", {"run_ahead": 0}, ""),
    ("--task embed", {"runner": "pooling"}, ""), ("--max-logprobs 5", {"max_logprobs": 5}, ""),
    ("--attention-backend auto", {}, ""), ("--model-impl vllm", {}, "transformers' own class"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "options", "said"), COMMANDS, ids=[command for command, *_ in COMMANDS])
@pytest.mark.parametrize("model_first", [True, False])
def test_an_option_of_vllm_serve_is_taken(command: str, options: dict[str, Any], said: str, model_first: bool) -> None:
    words = command.split()
    args = serve.parser().parse_argv(["demo", *words] if model_first else [*words, "demo"])
    config, settings = engine_config(args), config_from_args(ServerConfig, args)
    assert args.model == config.model == "demo"
    values = dict(flatten(config)) | dict(flatten(settings))
    assert {name: values[name] for name in options} == options
    assert [said in sentence for _, sentence in args.advice] == ([True] if said else [])


def test_the_options_are_at_least_sixty_of_vllm_serve() -> None:
    assert len({command.split()[0] for command, *_ in COMMANDS}) >= 60


@pytest.mark.parametrize("argv", [[], ["--host", "0.0.0.0"], ["--api-key"]])
def test_a_command_without_a_model_or_value_says_so(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"the following arguments are required: MODEL|expected one argument"):
        serve.parser().parse_argv(argv)


def test_a_model_is_named_by_an_option_or_by_the_file(tmp_path: Path) -> None:
    assert serve.parser().parse_argv(["--model", "demo", "--api-key", "a", "b"]).api_key == ["a", "b"]
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: demo\nserved-model-name: [a]\nmax-model-len: 4k\ntensor-parallel-size: 2\nenable-auto-tool-choice: true\n"
        "disable-log-requests: true\nswap-space: 8\noverride-generation-config: {temperature: 0.5}\n"
        "hf-overrides:\n  rope_theta: 5\n"
    )
    args = serve.parser().parse_argv(["--config", str(path)])
    config = engine_config(args)
    assert (args.model, config.max_model_len, config.tensor_parallel_size) == ("demo", 4000, 2)
    assert config.override_generation_config == {"temperature": 0.5} and config.hf_overrides == {"rope_theta": 5}
    assert [what for what, _ in args.advice] == ["swap_space=8"]
    path.write_text(
        "model: demo\nbackend: pytorch\nmax_batch_size: 8\nkv_cache_config:\n  free_gpu_memory_fraction: 0.8\n  dtype: auto\n"
        "  host_cache_size: 1073741824\nmoe_config:\n  backend: CUTLASS\nenable_attention_dp: false\nprint_iter_log: true\n"
        "cuda_graph_config:\n  batch_sizes: [1, 8]\ndisable_overlap_scheduler: true\n"
    )
    args = serve.parser().parse_argv(["--config", str(path)])
    config = engine_config(args)
    assert (config.gpu_memory_utilization, config.kv_offload_gb, config.run_ahead) == (0.8, 1.0, 0)
    assert [what for what, _ in args.advice] == ["moe_config.backend=CUTLASS", "print_iter_log=true"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logprobs_mode": "processed_logprobs"}, "log-probabilities are those before temperature"),
        ({"tokenizer_mode": "mistral"}, "may give other tokens"),
        ({"enable_prompt_embeds": True}, "embeddings are not taken"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "not exchanged with other engines"),
        ({"mm_processor_kwargs": {"max_pixels": 1}}, "images are prepared"),
        ({"data_parallel_size": 2}, "replicas are those of `torchweave serve`"),
        ({"task": "transcribe"}, "it is one of auto, generate"),
        ({"distributed_executor_backend": "dask"}, "it is mp, uni, ray"),
        ({"runner": "generate", "task": "embed"}, "runner is given twice, once as task"),
        ({"hf_overrides": 5}, "must be a dict"),
        ({"hf_overrides": len}, "must be a dict"),
        ({"optimization_level": 7}, "must be one of 0, 1, 2, 3"),
    ],
)
def test_what_would_give_another_answer_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_config(read_options({"model": "demo", **options})[0])


def test_every_advice_is_a_clause_and_no_own_option_is_in_the_table() -> None:
    engine, server = dict(flatten(EngineConfig(""))), dict(flatten(ServerConfig()))
    shadowed = {
        "served_model_name",
        "reasoning_parser",
        "data_parallel_size",
        "chat_template",
        "allowed_local_media_path",
    }  # of LLM, where they are the server's
    assert not {*engine, *server} & ALL.keys() - shadowed
    for option in ALL.values():
        for text in (option.advice, option.refusal):
            assert not text.endswith(".") and "vLLM's own" not in text


def test_variables_are_read_or_named() -> None:
    variables = {
        "VLLM_API_KEY": "k", "VLLM_ATTENTION_BACKEND": "FLASHINFER", "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_USE_V1": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_SOMETHING": "x", "VLLM_LOGGING_LEVEL": "",
    }  # fmt: skip
    read = read_variables(variables, (), ("api_key", "cpu_kv_cache_gib", "attention_backend"))
    assert read.options == {"api_key": "k", "cpu_kv_cache_gib": "4"}
    assert dict(read.advice)["VLLM_API_KEY"] == "is read as the option api_key"
    assert {"VLLM_SOMETHING", "VLLM_USE_V1", "VLLM_ATTENTION_BACKEND"} < {name for name, _ in read.advice}
    assert "VLLM_NO_USAGE_STATS" not in dict(read.advice)
    assert not read_variables({"VLLM_API_KEY": "k"}, ("api_key",), ("api_key",)).options


def test_the_command_line_reads_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    args = serve.parser().parse_argv(["demo"])
    assert config_from_args(ServerConfig, args).api_key == ("k",)
    args = serve.parser().parse_argv(["demo", "--api-key", "mine"])
    assert config_from_args(ServerConfig, args).api_key == ("mine",)
    assert not engine_parser("explain", "").parse_argv(["demo"]).advice


@pytest.mark.parametrize(
    ("text", "size"), [("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1m", 10**6), ("2.5K", "2.5K"), ("x", "x")]
)
def test_sizes_have_units(text: str, size: Any) -> None:
    assert own_value("max_model_len", text) == size and own_value("tokenizer", text) == text


def test_the_checkpoints_own_format_may_be_named() -> None:
    facts = ModelFacts("m", 64, quantization="int4_g128", quantization_method="awq")
    plan = resolve(EngineConfig("m", quantization="awq"), CPU, facts)
    assert plan.quantization == "int4_g128"
    with pytest.raises(ValueError, match="contradicts m, which is int4_g128 already"):
        resolve(EngineConfig("m", quantization="gptq"), CPU, facts)


def test_fields_of_a_config_are_replaced_as_if_they_stood_there() -> None:
    config = {"a": 1, "text_config": {"b": 2, "c": 3}, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert override(config, {"text_config": {"b": 4}})["text_config"] == {"b": 4, "c": 3}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert override(config, {"rope_scaling": yarn})["rope_parameters"] == {"rope_theta": 5.0, **yarn}
    both = override(config, {"rope_theta": 7.0, "rope_scaling": yarn})
    assert both["rope_parameters"] == override(config, {"rope_scaling": yarn, "rope_theta": 7.0})["rope_parameters"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5.0}
    from torchweave.config.model_source import resolve as find

    assert quantization_config(find("demo", overrides={"quantization_config": {"quant_method": "x"}})) == {
        "quant_method": "x"
    }


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ssl_certfile": "c"}, "belong together"),
        ({"ssl_cert_reqs": 2}, "give ssl_certfile and ssl_keyfile, too"),
        ({"uds": "/s", "ssl_certfile": "c", "ssl_keyfile": "k"}, "needs no TLS"),
        ({"uds": "/s", "api_server_count": 2}, "api_server_count=2 is not supported with uds"),
        ({"middleware": ("name",)}, "expected module:Name"),
    ],
)
def test_addresses_of_a_server_are_checked(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_server(EngineConfig("demo"), ServerConfig(**settings))
