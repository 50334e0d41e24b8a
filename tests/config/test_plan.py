"""The plan: defaults by device, clamping that adds no size, and a one-line error for each conflict."""

import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweave.config import (
    DEFAULT_TOKEN_BUCKETS,
    AttentionFacts,
    DeviceFacts,
    ModelFacts,
    Plan,
    choose_device,
    default_batch_sizes,
    default_token_buckets,
    format_value,
    resolve,
)
from torchweave.config.options import (
    CudaGraphConfig,
    EngineConfig,
    ServerConfig,
    TorchCompileConfig,
    use_passive_openmp,
)
from torchweave.config.validate import check_config, check_server, config_from

TRITON = AttentionFacts("triton", 16, supports_mixed_cuda_graphs=True)
FA3 = AttentionFacts("fa3", 128, (128,))
TORCH = AttentionFacts("torch", 32)
GPU = DeviceFacts("cuda:0", "NVIDIA H100", (9, 0), (TRITON, FA3, TORCH))
CPU = DeviceFacts("cpu", "CPU", None, (TORCH,))
MODEL = ModelFacts("llama", 4096, "bfloat16")


def plan_of(device: DeviceFacts = GPU, model: ModelFacts = MODEL, **options: Any) -> Plan:
    return resolve(EngineConfig("llama", **options), device, model)


def entry(plan: Plan, name: str):
    (found,) = [item for item in plan.entries if item.name == name]
    return found


def test_backend_in_place_of_the_preferred_one_has_its_reason():
    device = replace(CPU, attention=(AttentionFacts("cpp", 0, refusal="no C++ compiler was found"), TORCH))
    found = entry(plan_of(device), "attention_backend")
    assert (found.effective, found.why) == ("torch", "cpp: no C++ compiler was found")
    assert entry(plan_of(CPU), "attention_backend").why == "preferred on CPU"


def test_defaults_on_a_gpu():
    plan = plan_of()
    assert (plan.dtype, plan.max_batch_size, plan.max_num_tokens, plan.max_model_len) == ("bfloat16", 512, 8192, 4096)
    assert (plan.attention_backend, plan.block_size, plan.device) == ("triton", 16, "cuda:0")
    assert plan.token_buckets == DEFAULT_TOKEN_BUCKETS
    assert plan.batch_sizes[:5] == (1, 2, 4, 8, 16) and plan.batch_sizes[-2:] == (384, 512)
    assert plan.decode_graphs and plan.piecewise_graphs and plan.full_mixed_graphs and plan.inductor and plan.fullgraph


def test_explicit_max_model_len_may_reach_longest_model_len():
    model = replace(MODEL, longest_model_len=16384)
    assert (plan_of(model=model).max_model_len, plan_of(model=model, max_model_len=9000).max_model_len) == (4096, 9000)
    with pytest.raises(ValueError, match="max_model_len=16385 is above the 16384"):
        plan_of(model=model, max_model_len=16385)


def test_a_kv_cache_in_fp8():
    fa3 = AttentionFacts("fa3", 128, (128,), fp8_cache_refusal="fa3 cannot")
    gpu = DeviceFacts("cuda:0", "NVIDIA H100", (9, 0), (fa3, TRITON, TORCH))
    assert plan_of(gpu).attention_backend == "fa3" and plan_of(gpu).kv_cache_dtype == "bfloat16"
    for asked in ({}, {"attention_backend": "fa3"}):
        plan = plan_of(gpu, kv_cache_dtype="fp8", **asked)
        assert (plan.kv_cache_dtype, plan.attention_backend, plan.block_size) == ("fp8_e4m3", "triton", 16)
        assert entry(plan, "attention_backend").why == "fa3 cannot" and "e4m3" in entry(plan, "kv_cache_dtype").why
    assert plan_of(gpu, kv_cache_dtype="fp8_e5m2", attention_backend="torch").attention_backend == "torch"
    stored = ModelFacts("llama", 4096, "bfloat16", None, "fp8_e4m3")
    assert entry(plan_of(model=stored), "kv_cache_dtype").why == "the checkpoint's"
    assert plan_of(model=stored).kv_cache_dtype == plan_of(CPU, stored).kv_cache_dtype == "fp8_e4m3"
    old = DeviceFacts("cuda:0", "NVIDIA A100", (8, 0), (TRITON,))
    assert plan_of(old, stored).kv_cache_dtype == "bfloat16"
    assert plan_of(old, kv_cache_dtype="fp8_e5m2").kv_cache_dtype == "fp8_e5m2"
    with pytest.raises(ValueError, match=r"compute capability 8\.9.*fp8_e5m2"):
        plan_of(old, kv_cache_dtype="fp8")


def test_defaults_on_a_cpu():
    plan = plan_of(CPU)
    assert (plan.dtype, plan.max_batch_size, plan.max_num_tokens, plan.device) == ("float32", 32, 2048, "cpu")
    assert plan.token_buckets == () and plan.batch_sizes == ()
    assert not (plan.decode_graphs or plan.piecewise_graphs or plan.full_mixed_graphs)
    assert "GPU" in entry(plan, "torch_compile_config.enable_piecewise_cuda_graph").why


def test_mixed_steps_have_recorded_sizes():
    assert plan_of().mixed_step_sizes[:4] == (256, 384, 512, 768)
    other = plan_of(mixed_step_tokens=192, max_num_tokens=600)
    assert other.token_buckets[-4:] == (192, 256, 384, 512) and other.mixed_step_sizes == (192, 256, 384, 512, 576)
    asked = plan_of(mixed_step_tokens=192, torch_compile_config=TorchCompileConfig(capture_num_tokens=(64, 256)))
    assert asked.token_buckets == (64, 256) and asked.mixed_step_sizes[:3] == (256, 384, 576), (
        "what was asked for is recorded, and no more; above it a step grows by little too"
    )
    assert plan_of(CPU).mixed_step_sizes == (), "any number"
    assert plan_of(CPU, mixed_step_tokens=100, max_num_tokens=350).mixed_step_sizes == (100, 200, 300)


def test_mixed_steps_are_recorded_whole_where_the_backend_can():
    assert plan_of().full_mixed_graphs
    other = plan_of(attention_backend="torch")
    assert other.piecewise_graphs and not other.full_mixed_graphs
    assert entry(other, "cuda_graph_config.capture_mixed").why == "unsupported by attention backend torch"
    apart = plan_of(cuda_graph_config=CudaGraphConfig(capture_mixed=False))
    assert apart.piecewise_graphs and not apart.full_mixed_graphs


def test_graphs_of_the_encoder_need_a_gpu():
    assert plan_of().max_encoder_graphs == 16
    assert plan_of(cuda_graph_config=CudaGraphConfig(max_encoder_graphs=3)).max_encoder_graphs == 3
    on_cpu = plan_of(CPU)
    assert on_cpu.max_encoder_graphs == entry(on_cpu, "cuda_graph_config.max_encoder_graphs").effective == 0
    assert entry(on_cpu, "cuda_graph_config.max_encoder_graphs").why == "CUDA graphs need a GPU"
    with pytest.raises(ValueError, match="max_encoder_graphs=-1 must be at least 0"):
        plan_of(cuda_graph_config=CudaGraphConfig(max_encoder_graphs=-1))


@settings(deadline=None)
@given(st.integers(1, 2000))
def test_default_batch_sizes_follow_the_rule(largest: int):
    sizes = default_batch_sizes(largest)
    assert sizes[-1] == largest and list(sizes) == sorted(set(sizes)) and min(sizes) == 1
    rule = {1, 2, 4} | set(range(8, 129, 8)) | set(range(128, 385, 64)) | set(range(384, 2048, 128)) | {largest}
    assert set(sizes) == {size for size in rule if size <= largest}


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=20), st.integers(1, 4096))
def test_token_buckets_are_clamped_without_new_sizes(asked: list[int], budget: int):
    config = TorchCompileConfig(capture_num_tokens=tuple(asked))
    plan = plan_of(max_num_tokens=budget, torch_compile_config=config)
    assert list(plan.token_buckets) == sorted({size for size in asked if size <= budget})
    assert plan.piecewise_graphs == bool(plan.token_buckets)


@settings(deadline=None)
@given(st.integers(3073, 40000), st.integers(64, 1024))
def test_small_models_record_the_whole_token_budget(budget: int, width: int):
    sizes = default_token_buckets(budget, width)
    assert sizes[: len(DEFAULT_TOKEN_BUCKETS)] == DEFAULT_TOKEN_BUCKETS and sizes[-1] == budget
    assert all(
        low < high <= low * 1.125 for low, high in pairwise(sizes[-(len(sizes) - len(DEFAULT_TOKEN_BUCKETS)) - 1 :])
    )


def test_recorded_sizes_end_where_kernels_take_longer_than_launches():
    def largest(width: int | None, budget: int = 8192, **options: Any) -> int:
        return plan_of(model=replace(MODEL, hidden_size=width), max_num_tokens=budget, **options).token_buckets[-1]

    assert [largest(width) for width in (1024, 2048, 2560, 3072, 4096, 8192)] == [8192, 8192, 7168, 5120, 3072, 3072]
    assert largest(None) == 3072, "without a width nothing is known"
    assert (largest(1024, 16384), largest(1024, 6000), largest(1024, 1000)) == (16384, 6000, 1000)
    gpus = replace(GPU, num_gpus=2)
    two = resolve(EngineConfig("llama", tensor_parallel_size=2), gpus, replace(MODEL, hidden_size=4096))
    assert two.token_buckets[-1] == 5632, "each rank has half of a layer's work"
    assert plan_of(model=replace(MODEL, hidden_size=1024)).mixed_step_sizes[-2:] == (7680, 8192)


def test_batch_sizes_above_the_limit_are_dropped_and_reported():
    plan = plan_of(max_batch_size=64, cuda_graph_config=CudaGraphConfig(batch_sizes=(8, 100, 1)))
    assert plan.batch_sizes == (1, 8)
    assert "1 above max_batch_size=64 left out" in entry(plan, "cuda_graph_config.batch_sizes").why


def test_negative_graph_batch_size_means_none():
    plan = plan_of(cuda_graph_config=CudaGraphConfig(max_batch_size=-1))
    assert plan.batch_sizes == () and not plan.decode_graphs and plan.piecewise_graphs


def test_every_option_has_one_entry_in_the_order_of_the_config():
    def names(config: Any, prefix: str = "") -> list[str]:
        found: list[str] = []
        for item in fields(config):
            value = getattr(config, item.name)
            found += names(value, f"{item.name}.") if is_dataclass(value) else [prefix + item.name]
        return found

    plan = plan_of()
    assert [item.name for item in plan.entries] == names(EngineConfig("llama"))
    assert all(item.why for item in plan.entries)
    assert len(plan.table().splitlines()) == len(plan.entries) + 1


def test_batch_and_token_budget_follow_each_other_when_only_one_is_asked():
    assert plan_of(max_num_tokens=16).max_batch_size == 16
    assert plan_of(CPU, max_batch_size=4000).max_num_tokens == 4000


def test_steps_over_pipeline_stages_are_shorter_where_prompts_are_split():
    two, model = replace(GPU, num_gpus=2), replace(MODEL, num_layers=2)

    def max_num_tokens(**options: Any) -> int:
        return plan_of(two, model, pipeline_parallel_size=2, **options).max_num_tokens

    staged = plan_of(two, model, pipeline_parallel_size=2)
    assert (staged.max_num_tokens, staged.max_batch_size) == (2048, 512)
    assert "pipeline stages" in entry(staged, "max_num_tokens").why
    assert max_num_tokens(enable_chunked_context=False) == 8192
    assert max_num_tokens(max_num_tokens=4096) == 4096


def test_inductor_is_disabled_with_a_reason():
    plan = plan_of(torch_compile_config=TorchCompileConfig(enable_fullgraph=False))
    assert not plan.inductor and entry(plan, "torch_compile_config.enable_inductor").why == "needs enable_fullgraph"
    plan = plan_of(replace(CPU, inductor_refusal="no C++ compiler was found"))
    assert not plan.inductor and "C++" in entry(plan, "torch_compile_config.enable_inductor").why


def test_streams_need_a_gpu_and_a_graph():
    asked = TorchCompileConfig(max_num_streams=2)
    assert plan_of(torch_compile_config=asked).max_num_streams == 2
    plan = plan_of(CPU, torch_compile_config=asked)
    assert plan.max_num_streams == 1
    assert entry(plan, "torch_compile_config.max_num_streams").why == "streams need a GPU"
    plan = plan_of(torch_compile_config=replace(asked, enable_fullgraph=False))
    assert entry(plan, "torch_compile_config.max_num_streams").why == "needs enable_fullgraph"


def test_userbuffers_are_on_where_several_gpus_share_layers() -> None:
    name = "torch_compile_config.enable_userbuffers"
    two = plan_of(device=replace(GPU, num_gpus=2), tensor_parallel_size=2)
    assert two.userbuffers and entry(two, name).effective is True and entry(two, name).why == "default"
    off = TorchCompileConfig(enable_userbuffers=False)
    assert not plan_of(device=replace(GPU, num_gpus=2), tensor_parallel_size=2, torch_compile_config=off).userbuffers
    for options, why in (
        ({}, "a single rank has no collectives"),
        ({"device": CPU, "tensor_parallel_size": 2}, "CPUs have no symmetric memory"),
    ):
        plan = plan_of(**options)
        assert not plan.userbuffers and entry(plan, name).why == why


def test_dtype_by_capability():
    old = replace(GPU, title="Tesla T4", capability=(7, 5))
    assert plan_of(old).dtype == "float16"
    with pytest.raises(ValueError, match="use dtype=float16"):
        plan_of(old, dtype="bfloat16")


def test_attention_backend_is_the_first_that_is_able():
    refused = replace(TRITON, refusal="it has no sinks")
    assert plan_of(replace(GPU, attention=(refused, TORCH))).attention_backend == "torch"
    assert plan_of(attention_backend="fa3").block_size == 128


FAULTS = [
    ({"max_model_len": 5000}, "max_model_len=5000 is above the 4096"),
    ({"max_model_len": 0}, "max_model_len=0 must be at least 1"),
    ({"max_batch_size": -3}, "max_batch_size=-3 must be at least 1"),
    ({"max_num_tokens": 8, "max_batch_size": 16}, "raise max_num_tokens or lower max_batch_size"),
    ({"block_size": 0}, "block_size=0 must be at least 1"),
    ({"attention_backend": "fa3", "block_size": 16}, "use one of 128"),
    ({"num_kv_blocks": 0}, "num_kv_blocks=0 must be at least 1"),
    ({"run_ahead": -1}, "run_ahead=-1 must be at least 0"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan"),
    ({"cpu_kv_cache_gib": 0}, "cpu_kv_cache_gib=0"),
    ({"dtype": "bflot16"}, "did you mean 'bfloat16'"),
    ({"load_format": "dumy"}, "did you mean 'dummy'"),
    ({"capacity_scheduler_policy": "fair"}, "is not known: it is one of guaranteed_no_evict"),
    ({"capacity_scheduler_policy": "max_utilization", "enable_chunked_context": False}, "needs enable_chunked_context"),
    ({"batch_wait_max_tokens_ratio": 1.5}, "must be from 0 to 1"),
    ({"attention_backend": "tritn"}, "did you mean 'triton'"),
    ({"torch_compile_config": TorchCompileConfig(capture_num_tokens=(4, 0))}, "capture_num_tokens holds 0"),
    ({"torch_compile_config": TorchCompileConfig(max_padding_ratio=0.5)}, "max_padding_ratio=0.5"),
    (
        {"torch_compile_config": TorchCompileConfig(compile_cache_dir="none")},
        "set compile_cache=False to keep no cache, or write ./none for a folder of that name",
    ),
    ({"torch_compile_config": TorchCompileConfig(compile_cache_dir=" ")}, "compile_cache_dir=' ' is not the name of a"),
    (
        {"torch_compile_config": TorchCompileConfig(dump_dir="")},
        "dump_dir='' is not the name of a folder; leave it out",
    ),
    ({"torch_compile_config": TorchCompileConfig(max_num_streams=0)}, "max_num_streams=0 must be at least 1"),
    ({"torch_compile_config": TorchCompileConfig(dynamic_shapes="baked")}, "did you mean 'backed'"),  # pyright: ignore
    ({"cuda_graph_config": CudaGraphConfig(batch_sizes=(-1,))}, "batch_sizes holds -1"),
]


@pytest.mark.parametrize(("options", "sentence"), FAULTS)
def test_each_conflict_gives_a_one_line_error(options: dict[str, Any], sentence: str):
    with pytest.raises(ValueError) as caught:
        plan_of(**options)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_pass_names_are_refused_when_the_names_are_known():
    config = EngineConfig("llama", torch_compile_config=TorchCompileConfig(disabled_passes=("merge_linear",)))
    with pytest.raises(ValueError, match="did you mean 'merge_linears'"):
        resolve(config, GPU, MODEL, passes=("merge_linears",))
    assert resolve(config, GPU, MODEL).config is config


def test_no_backend_at_all():
    refused = replace(TORCH, refusal="it is broken")
    with pytest.raises(ValueError, match="torch: it is broken"):
        plan_of(replace(CPU, attention=(refused,)))
    with pytest.raises(ValueError, match="available: none"):
        plan_of(replace(CPU, attention=(refused,)), attention_backend="torch")


@pytest.mark.parametrize(
    ("asked", "gpus", "device"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda:0"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_choose_device(asked: str, gpus: int, device: str):
    assert choose_device(asked, gpus) == device


@pytest.mark.parametrize(("asked", "gpus"), [("cuda", 0), ("cuda:2", 2), ("gpu", 1), ("cuda:x", 1), ("cuda:", 1)])
def test_choose_device_refuses(asked: str, gpus: int):
    with pytest.raises(ValueError, match="use"):
        choose_device(asked, gpus)


def test_with_effective_returns_a_new_plan():
    plan = plan_of()
    settled = plan.with_effective("max_model_len", 100, "the KV cache holds no more", max_model_len=100)
    assert settled.max_model_len == 100 and plan.max_model_len == 4096
    assert entry(settled, "max_model_len").why == "the KV cache holds no more"
    with pytest.raises(FrozenInstanceError):
        plan.device = "cpu"  # pyright: ignore


def test_format_value_shortens_runs_of_sizes():
    assert format_value(DEFAULT_TOKEN_BUCKETS) == "1 2 4 8 16 32 64 128-512/128 768-3072/256"
    assert (
        format_value((1, 5)) == "1 5"
        and format_value(()) == "none"
        and format_value(None) == "-"
        and format_value(True) == "yes"
    )


def test_compile_sizes_are_clamped_and_need_inductor():
    config = TorchCompileConfig(compile_sizes=(8, 1, 100_000))
    plan = plan_of(GPU, torch_compile_config=config)
    assert plan.compile_sizes == (1, 8) and "1 above" in entry(plan, "torch_compile_config.compile_sizes").why
    plan = plan_of(GPU, torch_compile_config=replace(config, enable_inductor=False))
    assert plan.compile_sizes == () and entry(plan, "torch_compile_config.compile_sizes").why == "needs Inductor"
    with pytest.raises(ValueError, match="compile_sizes holds 0"):
        plan_of(GPU, torch_compile_config=TorchCompileConfig(compile_sizes=(0,)))


# -- quantization ------------------------------------------------------------------------------------------------------


def test_fp8_is_per_tensor_unless_said_otherwise_or_the_checkpoint_is_fp8() -> None:
    assert resolve(EngineConfig("m"), CPU, MODEL).quantization is None
    plan = resolve(EngineConfig("m", quantization="fp8"), CPU, MODEL)
    assert plan.quantization == "fp8_per_tensor" and "fp8_per_tensor" in plan.table()
    stored = replace(MODEL, quantization="fp8_per_block")
    plan = resolve(EngineConfig("m"), CPU, stored)
    assert plan.quantization == "fp8_per_block" and "the checkpoint's" in plan.table()
    assert resolve(EngineConfig("m", quantization="fp8_per_block"), CPU, stored).quantization == "fp8_per_block"


def test_quantization_that_cannot_be() -> None:
    stored = replace(MODEL, quantization="fp8_per_block")
    with pytest.raises(ValueError, match="fp8_per_block already"):
        resolve(EngineConfig("m", quantization="fp8"), CPU, stored)
    with pytest.raises(ValueError, match=r"quantization='fp9' is not known.*did you mean 'fp8'"):
        resolve(EngineConfig("m", quantization="fp9"), CPU, MODEL)  # type: ignore[arg-type]
    old = replace(GPU, capability=(8, 0))
    with pytest.raises(ValueError, match=r"needs compute capability 8\.9"):
        resolve(EngineConfig("m", quantization="fp8"), old, MODEL)


def test_several_ranks_need_as_many_gpus() -> None:
    two = replace(GPU, num_gpus=2)
    with pytest.raises(
        ValueError, match=r"needs 4 GPUs, but this machine has 2 from cuda:0 on; lower it, or use executor=ray"
    ):
        plan_of(two, tensor_parallel_size=4)
    plan = plan_of(two, tensor_parallel_size=2, torch_compile_config=TorchCompileConfig(tune=True))
    assert entry(plan, "executor").effective == "local" and entry(plan, "rank_timeout").effective == 8.0
    assert not plan.tune and entry(plan, "torch_compile_config.tune").why == "candidates are timed on one rank"
    for executor in ("ray", "torchrun"):  # which know of GPUs that this machine does not have
        assert entry(plan_of(two, tensor_parallel_size=4, executor=executor), "tensor_parallel_size").effective == 4
    assert plan_of(CPU, tensor_parallel_size=4).device == "cpu"  # as many processes as are asked for
    with pytest.raises(ValueError, match=r"kv_offload_gb=1\.0 is not supported on 2 ranks"):
        plan_of(two, tensor_parallel_size=2, kv_offload_gb=1.0)


def test_single_rank_disables_multi_rank_options() -> None:
    plan = plan_of(executor="ray", enable_expert_parallel=True)
    for name in ("executor", "rank_timeout", "enable_expert_parallel"):
        assert not entry(plan, name).effective and entry(plan, name).why == "there is one rank"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch_size": "4"}, "max_batch_size='4' must be a whole number"),
        ({"max_batch_size": True}, "max_batch_size=True must be a whole number"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"device": 5}, "device=5 must be a text"),
        ({"rank_timeout": "8"}, "rank_timeout='8' must be a number"),
        ({"enable_chunked_context": "no"}, "enable_chunked_context='no' must be True or False"),
        ({"torch_compile_config": 5}, "torch_compile_config=5 must be a TorchCompileConfig, or a dict"),
        ({"cuda_graph_config": {"batch_sizes": 4}}, "cuda_graph_config.batch_sizes=4 must be a list"),
        ({"torch_compile_config": {"compile_sizes": [1, "2"]}}, "torch_compile_config.compile_sizes="),
    ],
)
def test_option_of_a_wrong_type_is_rejected(options: dict[str, Any], words: str) -> None:
    config = config_from(EngineConfig, {"model": "demo", **options})
    with pytest.raises(ValueError, match=re.escape(words)):
        check_config(config)


def test_vllm_option_names_are_accepted() -> None:
    options = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 40,
        "enable_chunked_prefill": False,
        "num_gpu_blocks_override": 9,
        "torch_compile_config": {"cudagraph_capture_sizes": (1, 2)},
    }
    config = config_from(EngineConfig, {"model": "demo", **options})
    assert (config.max_batch_size, config.max_num_tokens, config.num_kv_blocks) == (3, 40, 9)
    assert not config.enable_chunked_context and config.torch_compile_config.capture_num_tokens == (1, 2)
    with pytest.raises(
        ValueError, match="max_batch_size is given twice; max_batch_size and max_num_seqs are one option"
    ):
        config_from(EngineConfig, {"model": "demo", "max_batch_size": 2, "max_num_seqs": 3})


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_body_bytes": 0}, "max_body_bytes=0 must be at least 1"),
        ({"max_request_tokens": 0}, "max_request_tokens=0 must be at least 1"),
        ({"max_request_sequences": 0}, "max_request_sequences=0 must be at least 1"),
        ({"max_waiting_requests": -1}, "max_waiting_requests=-1 must be at least 0"),
        ({"request_timeout": -1.0}, "request_timeout=-1.0 must be at least 0"),
        ({"drain_timeout": float("nan")}, "drain_timeout=nan must be at least 0"),
        ({"api_key": "secret"}, "api_key='secret' must be a list"),
    ],
)
def test_limits_that_admit_no_request_are_rejected(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_server(EngineConfig("demo"), ServerConfig(**limits))
    check_server(EngineConfig("demo"), ServerConfig(max_waiting_requests=0, drain_timeout=0))


@pytest.mark.parametrize(
    ("heads", "sentence"),
    [
        (8, "tensor_parallel_size=3 does not divide the 8 attention heads of llama; choose among 2, 4, 8"),
        (1, "use one rank"),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_ranks_start(heads: int, sentence: str):
    config = EngineConfig("llama", tensor_parallel_size=3)
    with pytest.raises(ValueError, match=sentence):
        resolve(config, CPU, replace(MODEL, num_heads=heads))
    for kept in (None, 6):  # unknown here; sharding the model raises the error
        assert resolve(config, CPU, replace(MODEL, num_heads=kept)).config.tensor_parallel_size == 3


# -- OpenMP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "1"}, {}])
def test_waiting_openmp_threads_sleep_unless_the_user_chose(
    chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    use_passive_openmp()
    assert os.environ.get("OMP_WAIT_POLICY") == (chosen.get("OMP_WAIT_POLICY") if chosen else "passive")


_WAITING = """
import sys, time
from torchweave import LLM
try:
    LLM("/no/such/model", device="cpu")
except ValueError:
    pass
import torch
torch.set_num_threads(2)
x = torch.randn(1 << 20)
spent = []
for _ in range(9):
    (x + x).sum()
    begin = time.process_time()
    time.sleep(0.05)
    spent.append(time.process_time() - begin)
print(sorted(spent)[4])
"""


def test_an_engine_in_a_new_process_has_threads_that_sleep() -> None:
    """A worker that spins after a loop uses processor time while the program sleeps."""
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    command = [sys.executable, "-c", _WAITING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert float(done.stdout) < 0.0005, "1.5 ms of a loop's wait with GNU OpenMP's default"
