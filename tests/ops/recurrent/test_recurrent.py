"""Recurrent ops on a CPU against float64, and against transformers' functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.recurrent.recurrent_cases import KINDS, OPS, SIZES, STATE, STEPS, Built, Case, build, case, close
from torchweave.ops.recurrent.op import RECURRENT_OPS, RecurrentSpec, run_recurrent_op
from torchweave.ops.registry import boundary_ops

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SIZES)
def test_equals_float64(name: str, step: str) -> None:
    built = build(case(name, step))
    built.run()
    built.check(TOLERANCE[torch.float32])


@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("name", SIZES)
def test_strided_bfloat16_inputs(name: str, step: str) -> None:
    built = build(case(name, step, dtype=torch.bfloat16, strided=True))
    built.run()
    built.check(TOLERANCE[torch.bfloat16])


def cut(built: Built, start: int, end: int, past: int) -> None:
    """Run tokens `start:end` of a one-row step whose row had `past` tokens before."""
    meta = dataclasses.replace(
        built.meta,
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=torch.tensor([past + end], dtype=torch.int32),
        num_tokens=end - start,
        decode_only=end - start == 1,
    )
    by_token = KINDS[built.op.name().split("::")[1]][2] | {"out"}
    args = {
        name: each[start:end] if name in by_token and each is not None else each for name, each in built.args.items()
    }
    run_recurrent_op(meta, built.states, built.op, (), args)


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("name", SIZES)
def test_cut_anywhere_equals_uncut(name: str, past: int) -> None:
    """Tokens read in two steps give the results and the state of one step, wherever the prompt is cut."""
    tokens = 71
    for border in (1, 2, 3, 15, 16, 17, 63, 64, 65, 70):
        built = build(case(name, "prefill", rows=((tokens, past),)))
        cut(built, 0, border, past)
        cut(built, border, tokens, past)
        built.check(TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["conv", "delta", "ssd", "scan", "lru"])
def test_token_by_token_equals_one_prefill(name: str) -> None:
    built = build(case(name, "prefill", rows=((20, 0),)))
    for token in range(20):
        cut(built, token, token + 1, 0)
    built.check(TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", SIZES)
def test_without_an_engine_tokens_are_one_new_sequence(name: str) -> None:
    built = build(case(name, "prefill"))
    built.op(**built.args)
    close(built.out.double(), built.expected, TOLERANCE[torch.float32])
    assert not torch.equal(built.states[STATE].double(), built.expected_state)


@pytest.mark.parametrize("name", SIZES)
def test_ops_follow_their_schemas(name: str) -> None:
    built = build(case(name, "prefill", rows=((5, 0),)))
    torch.library.opcheck(built.op, (), built.args)


def test_all_are_boundary_ops() -> None:
    assert {op.name() for op in RECURRENT_OPS} <= boundary_ops()
    assert len(RECURRENT_OPS) == 5


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("conv", (40, 3), torch.bfloat16),
        ("delta", (4, 16, 32), torch.float32),
        ("delta_by_channel", (2, 16, 16), torch.float32),
        ("ssd", (4, 16, 32), torch.float32),
        ("scan", (20, 4), torch.float32),
        ("lru", (40,), torch.float32),
    ],
)
def test_spec_of_meta_tensors(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    built = build(case(name, "prefill", dtype=torch.bfloat16))
    order = [argument.name for argument in built.op._schema.arguments]
    args = [built.args[each] for each in order]
    meta = [each.to("meta") if isinstance(each, Tensor) else each for each in args]
    spec = RecurrentSpec.of(built.op, meta, built.args["out"].shape[0])
    assert (spec.shape, spec.dtype) == (shape, dtype)
    again = RecurrentSpec.of(built.op, spec.zeros(7, 0, torch.device("cpu")), 7)
    assert (again.shape, again.dtype) == (shape, dtype)


def test_unknown_activations_are_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="gelu"):
        OPS.causal_conv(x, torch.zeros(3, 4), None, torch.empty_like(x), 0, "gelu")


def transformers_result(case: Case, args: dict) -> tuple[Tensor, Tensor | None]:
    """Result and last state (None where it is not returned) of transformers' function for one new sequence."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.mamba import modeling_mamba as mamba
    from transformers.models.mamba2 import modeling_mamba2 as mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    batched = {name: each[None] for name, each in args.items() if isinstance(each, Tensor)}
    if case.op == "causal_conv":
        x, activation = batched["x"].transpose(1, 2), args["activation"] or None
        return qwen.causal_conv1d_fn(x, args["weight"], args["bias"], activation=activation)[0].T, None
    if case.op == "gated_delta":
        function = kimi.chunk_kimi_delta_attention if args["g"].ndim == 3 else qwen.torch_chunk_gated_delta_rule
        inputs = [batched[name] for name in ("q", "k", "v")]
        g, beta = batched["g"], batched["beta"]
        if args["A_log"] is not None:
            g, beta = -args["A_log"].exp() * F.softplus(g + args["dt_bias"]), beta.sigmoid()
        out, state = function(
            *inputs, g=g, beta=beta, output_final_state=True,
            use_qk_l2norm_in_kernel=args["normalize"],
        )  # fmt: skip
        return out[0], state[0]
    A = -args["A"].exp() if args["log_rate"] else args["A"]
    if case.op == "ssd":
        out, state = mamba2.mamba2_chunk_scan(
            batched["x"], batched["dt"], A, batched["B"], batched["C"], 32, D=args["D"], dt_bias=args["dt_bias"],
            dt_softplus=args["softplus"], dt_limit=(args["dt_min"], args["dt_max"]), return_final_states=True,
        )  # fmt: skip
        return out[0] if args["z"] is None else out[0] * F.silu(args["z"]), state[0]
    x, dt, B, C = (batched[name].transpose(1, 2) for name in ("x", "dt", "B", "C"))
    z = None if args["z"] is None else batched["z"].transpose(1, 2)
    out, state = mamba.mamba_selective_scan(
        x,
        dt,
        A,
        B,
        C,
        D=args["D"],
        z=z,
        delta_bias=args["dt_bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    return out[0].T, state[0]


@pytest.mark.parametrize("name", [name for name in SIZES if name != "lru" and name != "ssd_float_out"])
def test_equals_transformers(name: str) -> None:
    chosen = case(name, "prefill")
    built = build(chosen)
    out, state = transformers_result(chosen, built.args)
    built.run()
    close(built.out.double(), out.double(), 2e-4)
    if state is not None:
        slot = int(built.meta.slots[0])
        close(built.states[STATE][slot].double(), state.double(), 2e-4)


def test_rg_lru_equals_transformers() -> None:
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    built = build(case("lru", "prefill"))
    reset = (torch.arange(70) == 0)[None, :, None]
    scan = RecurrentGemmaRglru._rnn_scan
    out, state = scan(None, built.args["x"][None], built.args["a"][None], reset, None)  # pyright: ignore
    built.run()
    close(built.out.double(), out[0].double(), 1e-5)
    close(built.states[STATE][int(built.meta.slots[0])].double(), state[0].double(), 1e-5)
