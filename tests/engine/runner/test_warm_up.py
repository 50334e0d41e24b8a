"""The dummy run launches every kernel that the model will launch."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.engine.runner import warm_up
from torchweave.engine.runner.step_buffers import StepBuffers
from torchweave.engine.runner.warm_up import _LENGTHS, _TOKENS, PlaceholderForward, launch_resample
from torchweave.models import load
from torchweave.ops.attention.op import AttentionCall, AttentionMetadata, LayerSpec
from torchweave.ops.slot_state import SlotState
from torchweave.verify import zoo

CPU = torch.device("cpu")


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func._schema.name, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "llama"])
def test_experts_of_each_kind_are_run_once(name: str) -> None:
    module = load(zoo.zoo_model(name).config().to_dict(), load_format="dummy").module
    stand_in = PlaceholderForward(module, module.attention_layers, module.vocab_size, torch.float32)
    attended: list[Any] = []
    ids = torch.zeros(5, dtype=torch.int64)
    with _Ops() as seen:
        logits = stand_in(lambda op, args, kwargs: attended.append(op), ids, ids, ids[:2])
    assert logits.shape == (2, module.vocab_size) and attended
    experts = [args for op, args in seen.calls if op == "torchweave::experts"]
    assert len(experts) == (0 if name == "llama" else 1)
    assert all(x.shape[0] == 5 and index.shape == (5, 2) for x, index, *_ in experts)


def test_experts_beside_a_shared_one_are_run_as_the_compiler_runs_them() -> None:
    module = load(zoo.zoo_model("qwen3_next").config().to_dict() | {"num_experts": 30}, load_format="dummy").module
    stand_in = PlaceholderForward(module, module.attention_layers, module.vocab_size, torch.float32)
    ids = torch.zeros(5, dtype=torch.int64)
    with _Ops() as seen:
        stand_in(lambda op, args, kwargs: None, ids, ids, ids[:2])
    ((_, index, _, up, *_, shared),) = (args for op, args in seen.calls if op == "torchweave::experts")
    assert shared is True and index.shape == (5, 3) and set(index[:, -1].tolist()) == {len(up) - 1}
    assert len(up) % 16 == (30 + 1) % 16, "Triton builds other kernels for sizes that are divisible by 16"


@pytest.mark.parametrize(("quantization", "ops"), [(None, set()), ("int4", {"quantized_experts", "int_linear"})])
def test_traced_launches_include_quantized_weights(quantization: str | None, ops: set[str]) -> None:
    """So that worker processes build their kernels. 16-bit experts index rows by what a kernel wrote, and tracing runs none."""
    loaded = load(zoo.zoo_model("qwen3_moe").config().to_dict(), load_format="dummy", quantization=quantization)
    module, ids = loaded.module, torch.zeros(5, dtype=torch.int64)
    forward = PlaceholderForward(module, module.attention_layers, module.vocab_size, torch.float32, traceable=True)
    with _Ops() as seen:
        forward(lambda op, args, kwargs: None, ids, ids, ids[:2])
    assert {name.removeprefix("torchweave::") for name, _ in seen.calls if name.startswith("torchweave::")} == ops


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_dummy_run_may_run_while_a_graph_is_traced(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.fx catches calls of every module while it traces, those of other threads too."""
    module = load("demo", load_format="dummy", quantization=quantization).module
    stand_in = PlaceholderForward(module, module.attention_layers, module.vocab_size, torch.float32)
    assert len(stand_in._fp8 if quantization == "fp8" else stand_in._integer) == 5, "one of each shape"

    def caught(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NameError("module is not installed as a submodule")

    monkeypatch.setattr(torch.nn.Module, "__call__", caught)
    ids = torch.zeros(5, dtype=torch.int64)
    assert stand_in(lambda op, args, kwargs: None, ids, ids, ids[:2]).shape == (2, module.vocab_size)


@pytest.mark.parametrize("most", [16, 512])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 32])
def test_every_attention_kernel_is_precompiled(kv_heads: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its number of rows, and so where they begin in what the host sends, and however long its sequences are, of which at
    `most` are in flight: building one stops all answers for a second."""
    pytest.importorskip("triton")
    from tests.ops.hopper import hopper
    from torchweave.compiler.precompile.kernel_jobs import kernel_specs
    from torchweave.ops.attention.backends import triton as attention_triton
    from torchweave.ops.kernels import rope
    from torchweave.ops.kernels.attention import paged_decode, paged_prefill

    for module in (attention_triton, rope):
        monkeypatch.setattr(module, "supports_pdl", lambda device: True)
    backend, buffers = attention_triton.TritonBackend(torch.device("cpu"), num_sms=132), StepBuffers(512, 8192, CPU)
    cache = backend.allocate(LayerSpec(kv_heads, 128, 128, 32), 2, 64, torch.bfloat16, CPU)
    table = torch.zeros(512, 2048, dtype=torch.int32)

    def step(rows: int, tokens: int, decode_only: bool, longest: int = 131072) -> None:
        packed = buffers.views(rows, tokens)
        starts = buffers.rows[: rows + 1] if decode_only else packed.query_start
        place = buffers.seq_lens[:rows], table, buffers.slot_mapping[:tokens]
        q = torch.zeros(tokens, 32, 128, dtype=torch.bfloat16)
        k, v = torch.zeros(2, tokens, kv_heads, 128, dtype=torch.bfloat16)
        cos, sin = torch.zeros(2, tokens, 128, dtype=torch.bfloat16)
        meta = AttentionMetadata(packed.slots, starts, *place, rows, tokens, decode_only, longest)
        backend.begin(meta).forward(AttentionCall(q, k, v, torch.empty_like(q), 0, 1.0, cos=cos, sin=sin), cache)

    def kernels(steps: Iterable[tuple[Any, ...]]) -> set[tuple[str, str]]:
        return {(spec.name, spec.key) for each in steps for spec in kernel_specs(lambda each=each: step(*each))}

    def of(sizes: Iterable[int]) -> list[tuple[Any, ...]]:
        return [step for size in sizes for step in ((min(size, most), size, False), (min(size, most),) * 2 + (True,))]

    with hopper(paged_decode, paged_prefill, rope):
        ahead = kernels([*of(_TOKENS), *((1, 1, False, length) for length in _LENGTHS)])
        assert {name for name, _ in ahead} >= {"paged_decode", "paged_prefill"}
        later = kernels(of((3, 4, 5, 7, 8, 17, 24, 31, 33, 67, 100, 129, 192, 255, 300, 511, 1056, 1057, 8192)))
        later |= kernels((rows, 300, False, length) for rows in (1, 5, 16) for length in (3, 70, 300, 1100, 9000))
        assert later <= ahead, f"built when a request needs them: {sorted(name for name, _ in later - ahead)}"


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 32), (8, 128)])
def test_no_step_needs_an_integer_linear_that_was_not_built_ahead(bits: int, group: int) -> None:
    """Samples of one linear build what every step launches, of a linear that it is merged into as well."""
    pytest.importorskip("triton")
    from tests.ops.hopper import hopper
    from torchweave.compiler.precompile.kernel_jobs import kernel_specs
    from torchweave.ops.kernels.quant import int_linear as kernels
    from torchweave.ops.kernels.quant import int_tiles
    from torchweave.ops.quant.int_linear import MAX_TOKENS, IntConfig, choose, configs

    width = 4096

    def launch(config: IntConfig, tokens: int, outputs: int) -> None:
        x, out = torch.empty(tokens, width, dtype=torch.bfloat16), torch.empty(tokens, outputs, dtype=torch.bfloat16)
        w = (
            torch.empty(outputs, width // 8, dtype=torch.int32)
            if bits == 4
            else torch.empty(outputs, width, dtype=torch.int8)
        )
        scale = torch.empty(outputs, width // group, dtype=torch.bfloat16)
        config.run(x, w, scale, None, None, group, out)

    def kernels_of(steps: Iterable[tuple[IntConfig, int, int]]) -> set[tuple[str, str]]:
        return {(spec.name, spec.key) for step in steps for spec in kernel_specs(lambda step=step: launch(*step))}

    with hopper(kernels, int_tiles):
        ahead = kernels_of((config, tokens, 1024) for tokens in _TOKENS for config in configs(tokens, width, bits))
        assert ahead
        wanted = [(tokens, rows) for tokens in range(1, MAX_TOKENS[bits] + 1) for rows in (1024, 6144, 28672)]
        chosen = [(choose(tokens, rows, width, bits), tokens, rows) for tokens, rows in wanted]
        later = kernels_of((config, tokens, rows) for config, tokens, rows in chosen if config is not None)
        assert later <= ahead, f"built when a request needs them: {sorted(name for name, _ in later - ahead)}"


def test_resampling_kernels_are_precompiled() -> None:
    state = SlotState(2, 4)
    launch_resample(state, torch.zeros(1, 40))
    assert state.host_arrays["position"].tolist() == [0, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_builds_are_complete_once_resampling_is_built_or_has_failed(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, errors = threading.Event(), list[str]()
    monkeypatch.setattr(warm_up._log, "exception", errors.append)

    class Workers:
        begun: ClassVar[list[str]] = []

        def begin(self, specs: list[str]) -> None:
            self.begun.extend(specs)

        def finish(self) -> list[str]:
            assert built.wait(60)
            if fails:
                raise OSError("no space is left")
            return []

    monkeypatch.setattr(warm_up, "_build", lambda *_: (Workers(), ["finish_kernel"]))
    builds = warm_up.start(SimpleNamespace(device="cuda:0"), None, None)  # type: ignore[arg-type]
    assert builds.of_steps.wait(60)
    assert not builds.complete.wait(0.1), "a request could still wait for a kernel"
    built.set()
    assert builds.complete.wait(60) and Workers.begun == ["finish_kernel"]
    assert len(errors) == fails
    assert warm_up.start(SimpleNamespace(device="cpu"), None, None).complete.is_set()  # type: ignore[arg-type]
