"""EAGLE-3 heads with random weights, in both published forms, and what they compute in plain torch in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchweave.config.model_source import resolve

TAKEN = (1, 3, 4)
SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
}
ROPE = {"rope_theta": 5000.0, "rope_type": "default"}


def random_head(
    hidden_size: int, vocab_size: int, draft_vocab_size: int | None = None, width: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Weights by their names in `speculators`; with `draft_vocab_size` the head predicts so many random tokens."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim, inner = (SIZES[name] for name in list(SIZES)[:4])

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    layer = {f"{name}.weight": norm(hidden_size) for name in names} | {
        "self_attn.q_proj.weight": matrix(heads * dim, 2 * hidden_size),
        "self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * hidden_size),
        "self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * hidden_size),
        "self_attn.o_proj.weight": matrix(hidden_size, heads * dim),
        "mlp.gate_proj.weight": matrix(inner, hidden_size),
        "mlp.up_proj.weight": matrix(inner, hidden_size),
        "mlp.down_proj.weight": matrix(hidden_size, inner),
    }
    head = {f"layers.0.{name}": tensor for name, tensor in layer.items()} | {
        "fc.weight": matrix(hidden_size, 3 * (width or hidden_size)),
        "norm.weight": norm(hidden_size),
        "lm_head.weight": 3 * matrix(draft_vocab_size or vocab_size, hidden_size),
    }
    if draft_vocab_size is not None:
        ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        head["d2t"] = ids - torch.arange(draft_vocab_size)
        head["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return head


def write_head(folder: Path, head: dict[str, Tensor], form: str = "speculators", **options: Any) -> Path:
    """Write a head in the form of `speculators` or of `eagle`; `options` go into its config."""
    folder.mkdir(exist_ok=True)
    hidden_size = head["norm.weight"].numel()
    vocab_size = head["t2d"].numel() if "t2d" in head else len(head["lm_head.weight"])
    layer = SIZES | {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_parameters": ROPE,
    }
    own = {"draft_vocab_size": len(head["lm_head.weight"])}
    if form == "speculators":
        config = own | {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        config |= {"eagle_aux_hidden_state_layer_ids": TAKEN, "transformer_layer_config": layer} | options
        names = {name: name for name in head}
    else:
        nested = {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in TAKEN]}
        config = layer | own | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested} | options
        names = {name: name.replace("layers.0.", "midlayer.") for name in head}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({names[name]: tensor.contiguous() for name, tensor in head.items()}, folder / "model.safetensors")
    return folder


def demo_model() -> Any:
    """transformers' own model of `demo`, in float64."""
    from transformers import AutoModelForCausalLM

    folder = resolve("demo").folder
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def hidden_states_of(model: Any, tokens: list[int], taken: tuple[int, ...] = TAKEN) -> Tensor:
    """Concatenated hidden states `[T, 3 H]` after the layers `taken`."""
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert max(taken) < len(states) - 1, "the last of them is normed"
    return torch.cat([states[number][0] for number in taken], -1)


def reference_drafts(
    head: dict[str, Tensor],
    embedding: Tensor,
    states: Tensor,
    tokens: list[int],
    num_drafts: int,
    norm_before_residual: bool = False,
) -> tuple[list[int], list[Tensor]]:
    """Greedy drafts behind `tokens`, and the logits of each over the whole vocabulary.

    Args:
        states: `[T - 1, 3 H]` of the model for the tokens but the last.
    """
    head = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in head.items()}
    fed = states @ head["fc.weight"].T
    keys: list[Tensor] = []
    values: list[Tensor] = []
    ids, drafts, all_logits, out = tokens[1:], [], [], fed
    for _ in range(num_drafts):
        for token, hidden in zip(ids, fed, strict=True):
            out = _position(head, embedding[token], hidden, keys, values, norm_before_residual)
        logits = _norm(out, head["norm.weight"]) @ head["lm_head.weight"].T
        whole = torch.full((len(embedding),), float("-inf"), dtype=torch.float64)
        offsets = head.get("d2t", torch.zeros(len(logits), dtype=torch.int64))
        whole[torch.arange(len(logits)) + offsets] = logits
        drafts.append(int(whole.argmax()))
        all_logits.append(whole)
        ids, fed = drafts[-1:], out[None]
    return drafts, all_logits


def _position(
    head: dict[str, Tensor], embedded: Tensor, hidden: Tensor, keys: list[Tensor], values: list[Tensor], normed: bool
) -> Tensor:
    """The head's output at the next position, after entering its key and value."""
    heads, kv_heads, dim, _ = (SIZES[name] for name in list(SIZES)[:4])
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in head.items()}
    wide = torch.cat([_norm(embedded, layer["input_layernorm.weight"]), _norm(hidden, layer["hidden_norm.weight"])])
    q, k, v = (layer[f"self_attn.{name}_proj.weight"] @ wide for name in "qkv")
    keys.append(_rotate(k.view(kv_heads, dim), len(keys)))
    values.append(v.view(kv_heads, dim))
    q = _rotate(q.view(heads, dim), len(keys) - 1).view(kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("hgd,thd->hgt", q, torch.stack(keys)) * dim**-0.5
    attended = torch.einsum("hgt,thd->hgd", scores.softmax(-1), torch.stack(values)).flatten()
    residual = _norm(hidden, layer["hidden_norm.weight"]) if normed else hidden
    out = residual + layer["self_attn.o_proj.weight"] @ attended
    inner = _norm(out, layer["post_attention_layernorm.weight"])
    gate, up = layer["mlp.gate_proj.weight"] @ inner, layer["mlp.up_proj.weight"] @ inner
    return out + layer["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + SIZES["rms_norm_eps"]).sqrt() * weight


def _rotate(x: Tensor, position: int) -> Tensor:
    half = x.shape[1] // 2
    angles = position * ROPE["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)  # type: ignore[operator]
    one, other = x[:, :half], x[:, half:]
    return torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], 1)
