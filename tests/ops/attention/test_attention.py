"""The attention op and the torch backend against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.attention.attention_cases import CASES, Case, build, in_fp8, reference
from torchweave.ops.attention.choose import available_backends, get_backend
from torchweave.ops.attention.kv_cache_dtype import FP8_DTYPES, dequantize_kv, quantize_kv
from torchweave.ops.attention.op import (
    AttentionCall,
    LayerSpec,
    attention,
    run_attention,
)
from torchweave.ops.registry import boundary_ops, define, op_info


def run(case: Case) -> None:
    built = build(case)
    step = get_backend("torch", "cpu").begin(built.meta)
    built.run(step)
    built.check(1e-5 if case.dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", CASES)
def test_torch_backend_equals_float64(name: str) -> None:
    run(CASES[name])


@pytest.mark.parametrize("name", ["decode", "mixed", "mixed_sinks"])
def test_torch_backend_in_bfloat16(name: str) -> None:
    run(dataclasses.replace(CASES[name], dtype=torch.bfloat16))


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
@pytest.mark.parametrize("name", ["decode_padded", "decode_all", "context", "mixed", "mixed_sinks", "mixed_value_dim"])
def test_torch_backend_over_an_fp8_cache(name: str, cache_dtype: torch.dtype) -> None:
    run(in_fp8(CASES[name], cache_dtype))
    run(dataclasses.replace(in_fp8(CASES[name], cache_dtype), dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", FP8_DTYPES.values(), ids=FP8_DTYPES)
def test_fp8_cache_keeps_within_half_a_step_and_saturates(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).exp()
    finfo = torch.finfo(dtype)
    got = dequantize_kv(quantize_kv(x, dtype, 0.25), 0.25, x.dtype)
    assert ((got - x).abs() <= x * finfo.eps / 2 + finfo.smallest_normal * finfo.eps / 2).all()
    assert dequantize_kv(quantize_kv(torch.tensor([-1e9, 1e9]), dtype, 0.5), 0.5, x.dtype).tolist() == [
        -finfo.max / 2,
        finfo.max / 2,
    ]
    assert quantize_kv(torch.tensor([float("nan")]), dtype, 1.0).float().isnan().all()


@pytest.mark.parametrize("seed", range(30))
def test_torch_backend_on_random_steps(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    decode = [(1, pick(0, 1, 15, 16, 17, 40)) for _ in range(pick(0, 1, 3))]
    context = [(pick(2, 3, 16, 33), pick(0, 0, 7, 20)) for _ in range(pick(0, 1, 4))]
    padding = [None] * pick(0, 2)
    kv_heads, group = pick(1, 2), pick(1, 3)
    dim = pick(16, 24)
    spec = LayerSpec(
        kv_heads, dim, pick(16, dim), kv_heads * group, window=pick(0, 0, 9), chunk=pick(0, 0, 8),
        softcap=pick(0, 0, 2), sinks=bool(pick(0, 0, 1)),
    )  # fmt: skip
    rows = tuple(decode + context + padding) or ((1, 3),)
    run(Case(rows, spec, block_size=pick(4, 16), padded_tokens=pick(0, 3), seed=seed))


def test_decode_dispatches_do_not_grow_with_rows() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def count(rows: int) -> tuple[int, int]:
        built = build(Case(tuple((1, 10 + i) for i in range(rows))))
        with Count() as begin:
            step = get_backend("torch", "cpu").begin(built.meta)
            step.forward(built.call, built.cache)
        with Count() as layer:
            step.forward(built.call, built.cache)
        return begin.calls, layer.calls

    few, many = count(2), count(32)
    assert few == many
    assert many[1] <= 26, "a decode layer takes more torch calls than it should"


def test_prompts_of_similar_length_share_a_row_group() -> None:
    """Prompts of similar length share a group, so a batch of new requests is not attended row by row."""
    built = build(Case(tuple((20 + i % 8, 0) for i in range(24))))
    step = get_backend("torch", "cpu").begin(built.meta)
    assert len(step.groups) == 1


@pytest.mark.parametrize(
    "name", ["context", "mixed_window", "mixed_softcap", "mixed_sinks", "mixed_chunk", "mixed_alibi"]
)
def test_eager_op_is_causal_attention_over_one_sequence(name: str) -> None:
    built = build(Case(((19, 0),), CASES[name].spec))
    call = built.call
    attention(
        call.q,
        call.k,
        call.v,
        call.out,
        0,
        call.scale,
        call.window,
        call.softcap,
        call.sinks,
        call.chunk,
        alibi_slopes=call.alibi_slopes,
    )
    expected = reference(call.q, call.k, call.v, call)
    torch.testing.assert_close(built.out.double(), expected, rtol=1e-5, atol=1e-5)


def test_op_accepts_the_strides_that_models_produce() -> None:
    built = build(Case(((19, 0),)))
    call = built.call
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (call.q, call.k, call.v))
    assert not q.is_contiguous()
    step = get_backend("torch", "cpu").begin(built.meta)
    run_attention(step, AttentionCall(q, k, v, call.out, 0, call.scale), built.cache)
    built.check(1e-5)


def test_opcheck() -> None:
    call = build(Case(((7, 0),))).call
    torch.library.opcheck(attention, (call.q, call.k, call.v, call.out.zero_(), 3, 0.2))
    torch.library.opcheck(
        attention,
        (call.q, call.k, call.v, call.out, 3, 0.2),
        {"window": 3, "softcap": 1.0, "sinks": torch.randn(4), "chunk": 4},
    )


def test_call_has_the_arguments_of_both_ops() -> None:
    """`run_attention_op` hands an op's positional arguments to `AttentionCall`; the schemas are those that caches hold."""
    fields = [field.name for field in dataclasses.fields(AttentionCall)]
    schemas = torch.ops.torchweave.attention.default._schema, torch.ops.torchweave.attention_fp8.default._schema
    names = [[argument.name for argument in schema.arguments] for schema in schemas]
    assert names[0] == fields[:-1]
    assert " ".join(fields[:10]) == "q k v out layer scale window softcap sinks chunk"
    assert (
        " ".join(fields[10:-1])
        == "cos sin q_weight k_weight norm_eps norm_offset norm_wide alibi_slopes gate given_scale"
    )
    assert names[1] == [*fields[:4], "out_scale", *fields[4:-2]]
    defaults = {
        argument.name: argument.default_value for argument in schemas[0].arguments if argument.has_default_value()
    }
    blank = torch.empty(0)
    assert all(getattr(AttentionCall(blank, blank, blank, blank, 0, 1.0), name) == it for name, it in defaults.items())


def test_registry_marks_attention_as_boundary() -> None:
    assert "torchweave::attention" in boundary_ops()
    assert op_info("torchweave::attention").mutates == ("out",)


def test_registry_refuses_a_boundary_with_an_output() -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(AssertionError, match="must only write"):
        define("torchweave::not_a_boundary", fake=torch.empty_like, boundary=True)(op)


def test_unknown_and_unavailable_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="available: triton, torch, fa3, cpp"):
        get_backend("flash", "cpu")
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        get_backend("triton", "cpu")
    assert available_backends("cpu")["torch"] is None
    assert available_backends("cuda")["cpp"] == "it runs only on a CPU"


def test_auto_selects_an_available_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_backend("auto", "cpu").name == "cpp"
    monkeypatch.setattr("torchweave.ops.attention.choose.has_compiler", lambda: False)
    assert get_backend("auto", "cpu").name == "torch"
    with pytest.raises(ValueError, match=r"no C\+\+ compiler"):
        get_backend("cpp", "cpu")
