"""Random steps of recurrent ops and their answer in float64, token by token, for every test of these ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweave.ops.attention.op import AttentionMetadata
from torchweave.ops.recurrent.op import commit_recurrent_op, read_recurrent_op, run_recurrent_op, state_shape

OPS = torch.ops.torchweave
STATE, STATES = 1, 3  # the op's state and how many the engine holds
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A step of `op`: `rows` are `(new tokens, tokens before)`; None is a padding row. `sizes` and `options` depend on the op.

    With `kept`, it is a step with drafts, of which each row keeps so many tokens.
    """

    op: str
    rows: tuple[tuple[int, int] | None, ...]
    sizes: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    padded_tokens: int = 0
    kept: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    strided: bool = False
    seed: int = 0

    @property
    def decode_only(self) -> bool:
        return all(row is None or row[0] == 1 for row in self.rows) and not self.padded_tokens and self.kept is None


@dataclass
class Built:
    """Inputs of one step, and what must come out."""

    meta: AttentionMetadata
    states: list[Tensor]
    op: Any
    args: dict[str, Any]
    expected: Tensor
    expected_state: Tensor
    position: Tensor | None = None

    @property
    def out(self) -> Tensor:
        return self.args["out"]

    def run(self) -> None:
        if self.position is None:
            run_recurrent_op(self.meta, self.states, self.op, (), self.args)
            return
        before = self.states[STATE].clone()
        self.run_drafts(lambda: torch.testing.assert_close(self.states[STATE], before, rtol=0, atol=0, equal_nan=True))

    def run_drafts(self, check_read: Callable[[], None] = lambda: None) -> None:
        """Run a step with drafts, and `check_read` before the states advance."""
        assert self.position is not None
        held = read_recurrent_op(self.meta, self.states, self.op, (), self.args)
        check_read()
        self.overwrite_inputs()
        commit_recurrent_op(self.meta, self.states, held, self.position)

    def overwrite_inputs(self) -> None:
        """Write NaN into the inputs with a row per token, as later operations of a step may."""
        for name in KINDS[self.op.name().split("::")[1]][2]:
            if self.args[name] is not None and self.args[name].stride(0):
                self.args[name].fill_(NAN)

    def check(self, tolerance: float) -> None:
        """`out`, padding included, and the states: those of other slots and other calls as they were."""
        got, state = self.out.double().cpu(), self.states[STATE].double().cpu()
        close(got, self.expected, tolerance)
        close(state, self.expected_state, tolerance)
        for index in {0, 2}:
            assert self.states[index].isnan().all()


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance`, relative to each number or to the standard deviation of all."""
    known = wanted[~wanted.isnan()]
    scale = max(known.std().item(), 1e-3) if known.numel() > 1 else 1.0
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def draw_conv(case: Case, draw: Callable[..., Tensor], tokens: int) -> dict[str, Any]:
    channels, width = case.sizes
    bias = draw(channels) if case.options.get("bias", True) else None
    x, out = draw(tokens, channels), draw(tokens, channels)
    return {"x": x, "weight": draw(channels, width), "bias": bias, "out": out, **activation(case)}


def activation(case: Case) -> dict[str, str]:
    return {"activation": case.options.get("activation", "silu")}


def draw_delta(case: Case, draw: Callable[..., Tensor], tokens: int) -> dict[str, Any]:
    heads, value_heads, key, value = case.sizes
    g_shape = (tokens, value_heads, key) if case.options.get("by_channel") else (tokens, value_heads)
    normalize = case.options.get("normalize", True)
    k, g = draw(tokens, heads, key), draw(*g_shape).float()
    if case.options.get("alike"):  # keys that repeat are what makes the triangular systems hard
        k = k[:1].expand(tokens, heads, key) if tokens else k
        g = g - 4
    gates = case.options.get("gates", False)
    beta = draw(tokens, value_heads)
    return {
        "q": draw(tokens, heads, key),
        "k": k if normalize else k * key**-0.5,
        "v": draw(tokens, value_heads, value),
        # Most states live longer than a chunk.
        "g": g.to(case.dtype) if gates else -F.softplus((g - 2) * case.options.get("decay", 2.0)),
        "beta": beta if gates else beta.sigmoid(),
        "out": draw(tokens, value_heads, value),
        "normalize": normalize,
        "A_log": draw(value_heads).float() - 2 if gates else None,
        "dt_bias": draw(value_heads) if gates else None,
    }


def draw_ssd(case: Case, draw: Callable[..., Tensor], tokens: int) -> dict[str, Any]:
    heads, head_dim, groups, state = case.sizes
    lightning, gates = case.options.get("lightning", False), case.options.get("gates", False)
    dt = torch.ones(1, 1).expand(tokens, heads) if lightning else draw(tokens, heads)
    return {
        "x": draw(tokens, heads, head_dim),
        "dt": dt,
        "A": draw(heads).float() - 3 if gates else -(draw(heads).float() - 3).exp(),
        "B": (draw(tokens, groups, state) * state**-0.5).to(case.options.get("keys", case.dtype)),
        "C": draw(tokens, groups, state).to(case.options.get("keys", case.dtype)),
        "D": None if lightning else draw(heads).float(),
        "dt_bias": None if lightning else draw(heads),
        "out": draw(tokens, heads, head_dim).to(case.options.get("out", case.dtype)),
        "softplus": not lightning,
        "dt_min": 0.0,
        "dt_max": case.options.get("dt_max", float("inf")),
        "z": draw(tokens, heads, head_dim) if gates else None,
        "log_rate": gates,
    }


def draw_scan(case: Case, draw: Callable[..., Tensor], tokens: int) -> dict[str, Any]:
    channels, state = case.sizes
    plain, log_rate = case.options.get("plain", False), case.options.get("log_rate", False)
    return {
        "x": draw(tokens, channels),
        "dt": draw(tokens, channels) * 3,
        "A": draw(channels, state).float() - 2 if log_rate else -(draw(channels, state).float() - 2).exp(),
        "B": draw(tokens, state),
        "C": draw(tokens, state) * state**-0.5,
        "D": None if plain else draw(channels).float(),
        "z": None if plain else draw(tokens, channels),
        "dt_bias": None if plain else draw(channels),
        "out": draw(tokens, channels),
        "log_rate": log_rate,
    }


def draw_lru(case: Case, draw: Callable[..., Tensor], tokens: int) -> dict[str, Any]:
    (channels,) = case.sizes
    return {"a": draw(tokens, channels).sigmoid(), "x": draw(tokens, channels), "out": draw(tokens, channels)}


def conv_oracle(args: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = args["x"], args["weight"]
    inputs = torch.cat([state.T, x])
    result = torch.stack([(inputs[t : t + weight.shape[1]].T * weight).sum(1) for t in range(len(x))])
    result = result if args["bias"] is None else result + args["bias"]
    return F.silu(result) if args["activation"] else result, inputs[len(x) :].T


def delta_oracle(args: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (args[name] for name in ("q", "k", "v", "g", "beta"))
    if args["A_log"] is not None:
        g, beta = -args["A_log"].exp() * F.softplus(g + args["dt_bias"]), beta.sigmoid()
    if args["normalize"]:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group, results = v.shape[1] // k.shape[1], []
    q, k = q.repeat_interleave(group, 1) * q.shape[-1] ** -0.5, k.repeat_interleave(group, 1)
    for t in range(len(q)):
        state = state * (g[t] if g.ndim == 3 else g[t, :, None]).exp()[..., None]
        correction = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t, :, None]
        state = state + k[t, :, :, None] * correction[:, None]
        results.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(results), state


def _rate(args: dict[str, Any]) -> Tensor:
    return -args["A"].exp() if args["log_rate"] else args["A"]


def ssd_oracle(args: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, B, C = (args[name] for name in ("x", "dt", "B", "C"))
    group, results = x.shape[1] // B.shape[1], []
    B, C = B.repeat_interleave(group, 1), C.repeat_interleave(group, 1)
    dt = dt if args["dt_bias"] is None else dt + args["dt_bias"]
    dt = (F.softplus(dt) if args["softplus"] else dt).clamp(args["dt_min"], args["dt_max"])
    for t in range(len(x)):
        state = state * (dt[t] * _rate(args)).exp()[:, None, None] + (dt[t, :, None] * x[t])[:, :, None] * B[t, :, None]
        result = torch.einsum("hpn,hn->hp", state, C[t])
        result = result if args["D"] is None else result + args["D"][:, None] * x[t]
        results.append(result if args["z"] is None else result * F.silu(args["z"][t]))
    return torch.stack(results), state


def scan_oracle(args: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    x, dt, results = args["x"], args["dt"], []
    dt = F.softplus(dt if args["dt_bias"] is None else dt + args["dt_bias"])
    for t in range(len(x)):
        state = state * (dt[t, :, None] * _rate(args)).exp() + (dt[t] * x[t])[:, None] * args["B"][t]
        result = (state * args["C"][t]).sum(1)
        result = result if args["D"] is None else result + args["D"] * x[t]
        results.append(result if args["z"] is None else result * F.silu(args["z"][t]))
    return torch.stack(results), state


def lru_oracle(args: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    results = []
    for a, x in zip(args["a"], args["x"], strict=True):
        state = a * state + x
        results.append(state)
    return torch.stack(results), state


KINDS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., tuple[Tensor, Tensor]], frozenset[str]]] = {
    "causal_conv": (draw_conv, conv_oracle, frozenset({"x"})),
    "gated_delta": (draw_delta, delta_oracle, frozenset({"q", "k", "v", "g", "beta"})),
    "ssd": (draw_ssd, ssd_oracle, frozenset({"x", "dt", "B", "C", "z"})),
    "selective_scan": (draw_scan, scan_oracle, frozenset({"x", "dt", "B", "C", "z"})),
    "rg_lru": (draw_lru, lru_oracle, frozenset({"a", "x"})),
}
"""For each op: its inputs, its oracle for one row, and the inputs with a row per token."""


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers in rows of a wider tensor, as slices of a merged projection are."""
    wide = torch.full((x.shape[0], *x.shape[1:-1], x.shape[-1] + 16), NAN, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def build(case: Case, device: str = "cpu") -> Built:
    """Draw the tensors of `case`. Slots that no row continues hold NaN, so do `out`, padded tokens and other states."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    draw_inputs, oracle, by_token = KINDS[case.op]
    new = [row[0] if row else 0 for row in case.rows]
    real = len(case.rows) if case.decode_only else sum(new)
    tokens = real + case.padded_tokens
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    slots = torch.randperm(len(case.rows) + 2, generator=generator)[: len(case.rows)].int()
    op = getattr(OPS, case.op).default
    args = draw_inputs(case, draw, tokens)
    shape, dtype = state_shape(op, (), {"state": STATE, **args})
    states = [torch.full((len(case.rows) + 2, *shape), NAN, dtype=dtype) for _ in range(STATES)]
    args["out"].fill_(NAN)
    expected = torch.zeros(args["out"].shape, dtype=torch.float64)
    for i, row in enumerate(case.rows):
        if row and row[1]:
            states[STATE][slots[i]] = draw(*shape).to(dtype) * 0.5
    expected_state = states[STATE].double()
    for i, row in enumerate(case.rows):
        begin = i if case.decode_only else starts[i]
        if not row or not row[0]:
            continue
        mine = {
            name: value[begin : begin + row[0]].double()
            if name in by_token and value is not None
            else (value.double() if isinstance(value, Tensor) else value)
            for name, value in args.items()
        }
        before = expected_state[slots[i]] if row[1] else torch.zeros(shape, dtype=torch.float64)
        expected[begin : begin + row[0]], after = oracle(mine, before)
        if case.kept is not None:
            kept = {
                name: value[: case.kept[i]] if name in by_token and value is not None else value
                for name, value in mine.items()
            }
            _, after = oracle(kept, before)
        expected_state[slots[i]] = after
    padding = torch.tensor([row is None for row in case.rows])
    meta = AttentionMetadata(
        slots=slots.masked_fill(padding, -1).to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([sum(row) if row else 0 for row in case.rows], dtype=torch.int32, device=device),
        block_table=torch.empty(0, 0, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        num_rows=len(case.rows),
        num_tokens=tokens,
        decode_only=case.decode_only,
        max_seq_len=max((sum(row) for row in case.rows if row), default=0),
    )
    position = None
    if case.kept is not None:
        position = torch.full((len(case.rows) + 2,), -1, dtype=torch.int32, device=device)
        for slot, row, kept in zip(slots.tolist(), case.rows, case.kept, strict=True):
            position[slot] = row[1] + kept if row else -1
    for name in by_token:
        value = args[name]
        if value is None or value.stride(0) == 0:
            continue
        value = value.clone()
        if case.padded_tokens:
            value[real:] = NAN
        args[name] = with_gaps(value) if case.strided else value
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in args.items()}
    if case.strided:
        for name in by_token:
            if moved[name] is not None and moved[name].stride(0):
                moved[name] = with_gaps(moved[name].cpu()).to(device)[..., : moved[name].shape[-1]]
    args = {"state": STATE, **moved}
    return Built(meta, [each.to(device) for each in states], op, args, expected, expected_state, position)


SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "conv": ((40, 4), {}),
    "conv_wide": ((300, 4), {}),
    "conv_plain": ((24, 3), {"activation": "", "bias": False}),
    "delta": ((2, 4, 16, 32), {}),
    "delta_unnormalized": ((3, 3, 32, 16), {"normalize": False}),
    "delta_alike": ((1, 2, 16, 16), {"alike": True}),
    "delta_by_channel": ((2, 2, 16, 16), {"by_channel": True}),
    "delta_gates": ((2, 4, 16, 16), {"gates": True}),
    "delta_strong_decay": ((1, 2, 16, 16), {"decay": 40.0}),
    "ssd": ((4, 16, 2, 32), {"dt_max": 2.0}),
    "ssd_float_out": ((2, 16, 1, 16), {"out": torch.float32}),
    "ssd_float_keys": ((2, 16, 1, 32), {"keys": torch.float32}),
    "ssd_lightning": ((2, 16, 2, 16), {"lightning": True}),
    "ssd_gates": ((4, 16, 2, 16), {"gates": True}),
    "scan": ((20, 4), {}),
    "scan_plain": ((8, 5), {"plain": True}),
    "scan_log_rate": ((12, 4), {"log_rate": True}),
    "lru": ((40,), {}),
}
NAMES = {"conv": "causal_conv", "delta": "gated_delta", "scan": "selective_scan", "lru": "rg_lru", "ssd": "ssd"}
STEPS: dict[str, dict[str, Any]] = {
    "decode": {"rows": ((1, 5), (1, 0), None, (1, 70), None)},
    "prefill": {"rows": ((70, 0),)},
    "continued": {"rows": ((130, 3),)},
    "mixed": {"rows": ((1, 9), (1, 0), (33, 20), (2, 0), (0, 4), (65, 0), (2, 1), None), "padded_tokens": 21},
    "drafts": {
        "rows": ((4, 9), (1, 6), (3, 0), (4, 70), (0, 4), None, (4, 2), (2, 1)),
        "kept": (2, 1, 2, 4, 0, 0, 1, 2),
        "padded_tokens": 14,
    },
    "padding_only": {"rows": (None, None), "padded_tokens": 3},
}


def case(name: str, step: str, **changes: Any) -> Case:
    sizes, options = SIZES[name]
    return Case(NAMES[name.split("_")[0]], sizes=sizes, options=options, **(STEPS[step] | changes))
