"""Train an EAGLE-3 head of the built-in model: 7 minutes on a GPU.

    python scripts/demo/train_demo_eagle.py --out torchweave/models/demo_eagle --seconds 420 --tokens-per-step 16384

The head learns what `demo` would answer: its loss is the cross entropy to the model's distributions, after the head's first step
and, as in EAGLE-3's training-time test, after steps that take its own hidden states. It is saved in the form of `speculators`.
"""

# ruff: noqa: E402  (the project's folders come first, so that no installation is needed)

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
from demo_data import Stream
from demo_tasks import TASKS
from demo_training import CAUSAL, learning_rate
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TAKEN = (1, 3, 5)
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 32, 192
STEPS = 3  # of the head after each position
PEAK, WARMUP = 3e-3, 0.05
ROW_LENGTH = 128


class Head(nn.Module):
    """The head over whole rows, with the names of `speculators`; the engine has one over flattened tokens."""

    def __init__(self, hidden: int, vocab_size: int) -> None:
        super().__init__()

        def linear(rows: int, columns: int) -> nn.Linear:
            layer = nn.Linear(columns, rows, bias=False)
            nn.init.normal_(layer.weight, std=columns**-0.5)
            return layer

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden, eps=1e-6)

        self.fc = linear(hidden, len(TAKEN) * hidden)
        layer = nn.Module()
        layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm = norm(), norm(), norm()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        for name, rows in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            setattr(layer.self_attn, name, linear(rows * HEAD_DIM, 2 * hidden))
        layer.self_attn.o_proj = linear(hidden, HEADS * HEAD_DIM)
        layer.mlp.gate_proj, layer.mlp.up_proj = linear(INNER, hidden), linear(INNER, hidden)
        layer.mlp.down_proj = linear(hidden, INNER)
        self.layers = nn.ModuleList([layer])
        self.norm, self.lm_head = norm(), linear(vocab_size, hidden)

    def start_from(self, model: nn.Module) -> None:
        """Begin as the model's last hidden state and its own output layers, to which the layer adds little yet."""
        layer, hidden = self.layers[0], self.norm.weight.numel()
        with torch.no_grad():
            self.fc.weight *= 0.1
            self.fc.weight[:, -hidden:] += torch.eye(hidden, device=self.fc.weight.device)
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.lm_head.weight)

    def forward(self, states: Tensor, embedded: Tensor, rotary: nn.Module) -> list[Tensor]:
        """Logits `[B, L, V]` of each of `STEPS` steps after every position.

        Args:
            states: concatenated hidden states of the model, `[B, L, 3 H]`.
            embedded: embeddings `[B, L + STEPS, H]` of the tokens; a step at position t takes that of token t + 1.
            rotary: the model's rotary embedding, whose head dimension is the head's.
        """
        length = states.shape[1]
        out, keys, values, logits = self.fc(states), [], [], []
        for step in range(STEPS):
            out = self._step(out, embedded[:, 1 + step : 1 + step + length], step, rotary, keys, values)
            logits.append(self.lm_head(self.norm(out)))
        return logits

    def _step(
        self, hidden: Tensor, token: Tensor, step: int, rotary: nn.Module, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """A step at positions t + step for all t: attention to the first step's positions up to t, then to its own steps."""
        layer, (rows, length, _) = self.layers[0], hidden.shape
        wide = torch.cat([layer.input_layernorm(token), layer.hidden_norm(hidden)], -1)
        q, k, v = (
            getattr(layer.self_attn, name)(wide).view(rows, length, heads, HEAD_DIM).transpose(1, 2)
            for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS))
        )
        positions = torch.arange(step, step + length, device=hidden.device)[None]
        q, k = apply_rotary_pos_emb(q, k, *rotary(hidden, positions))
        keys.append(k.repeat_interleave(HEADS // KV_HEADS, 1))
        values.append(v.repeat_interleave(HEADS // KV_HEADS, 1))
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        scores = [(q @ keys[0].transpose(2, 3)).masked_fill(mask, float("-inf"))]
        scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
        shares = (torch.cat(scores, -1) * HEAD_DIM**-0.5).softmax(-1).split([length, *[1] * step], -1)
        attended = shares[0] @ values[0]
        for share, own in zip(shares[1:], values[1:], strict=True):
            attended = attended + share * own
        out = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        inner = layer.post_attention_layernorm(out)
        return out + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner))


def loss_of(
    head: Head, model: nn.Module, states: dict[int, Tensor], tokens: Tensor, learnt: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Mean cross entropy to the model's distributions over answers, and the share of right tokens by step (scalars).

    Args:
        states: receives the model's hidden states by the number of layers.
        tokens, learnt: `[B, L]`; `learnt` marks answers.
    """
    with torch.no_grad():
        targets = model(input_ids=tokens, use_cache=False).logits
        taken = torch.cat([states[number] for number in TAKEN], -1)
        embedded = model.get_input_embeddings()(tokens)
    length = tokens.shape[1] - STEPS - 1
    total, right = tokens.new_zeros((), dtype=torch.float32), []
    for step, logits in enumerate(head(taken[:, :length], embedded[:, : length + STEPS], model.model.rotary_emb)):
        target = targets[:, 1 + step : 1 + step + length]
        weight = learnt[:, 2 + step : 2 + step + length].float()
        losses = -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        total = total + (losses * weight).sum() / weight.sum().clamp(min=1) * 0.8**step
        same = (logits.argmax(-1) == target.argmax(-1)).float()
        right.append((same * weight).sum() / weight.sum().clamp(min=1))
    return total, right


def save(head: Head, folder: Path, model_config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("hidden_size", "vocab_size", "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings")
    layer = {name: model_config[name] for name in names} | {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": layer["vocab_size"],
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": TAKEN,
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("torchweave/models/demo"), help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--steps", type=int, help="maximum number of training steps")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that make training data")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model = model.to(options.device).eval().requires_grad_(False)
    model.config._attn_implementation = CAUSAL
    states: dict[int, Tensor] = {}  # those of the last forward, by the number of layers
    for number in TAKEN:
        keep = functools.partial(states.__setitem__, number)
        model.model.layers[number - 1].register_forward_hook(lambda _module, _args, output, keep=keep: keep(output))
    head = Head(model.config.hidden_size, model.config.vocab_size).to(options.device)
    head.start_from(model)
    optimizer = torch.optim.AdamW(head.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.05)
    stream = Stream(options.seed, options.tokens_per_step, (ROW_LENGTH,), TASKS)
    batches = iter(DataLoader(stream, batch_size=None, num_workers=options.workers))
    begin, step = time.monotonic(), 0
    while True:
        progress = max((time.monotonic() - begin) / options.seconds, step / options.steps if options.steps else 0.0)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(PEAK, progress, WARMUP)
        tokens, learnt = (each.to(options.device, non_blocking=True) for each in next(batches))
        loss, right = loss_of(head, model, states, tokens.long(), learnt)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0:
            shares = " ".join(f"{share.item():.2f}" for share in right)
            print(f"{progress:4.0%}  step {step}  loss {loss.item():.3f}  right {shares}", file=sys.stderr, flush=True)
    save(head, options.out, model.config.to_dict())


if __name__ == "__main__":
    main()
