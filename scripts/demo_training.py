"""The training loop of the built-in models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from demo_data import Stream
from demo_eval import evaluate, score
from demo_folder import build_config, build_tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torchweave.models import tasks

CAUSAL = "torchweave_demo_causal"


def _causal_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value, None, **{**options, "is_causal": True})


# Causal attention over the whole row, with no mask built: the fused kernels need none.
AttentionInterface.register(CAUSAL, _causal_attention)
AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)


@dataclass(frozen=True)
class Recipe:
    """Sizes of a model and how it is trained. `share` is its part of the seconds that are spent on both models."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    learning_rate: float
    share: float
    tokens_per_step: int = 65536
    row_lengths: tuple[int, ...] = (256, 256, 256, 512)
    weight_decay: float = 0.1
    warmup: float = 0.02  # part of the training
    prompt_weight: float = 0.0  # weight in the loss of tokens that are given, which nobody can foretell


@dataclass
class Outcome:
    """A trained model and what its training took."""

    model: LlamaForCausalLM
    facts: dict[str, Any] = field(default_factory=dict)


def learning_rate(peak: float, progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero; `progress` runs from 0 to 1."""
    if progress < warmup:
        return peak * max(progress / warmup, 0.02)
    return peak * 0.5 * (1 + math.cos(math.pi * min((progress - warmup) / (1 - warmup), 1.0)))


def build_model(recipe: Recipe, device: torch.device) -> LlamaForCausalLM:
    config = build_config(
        hidden=recipe.hidden,
        layers=recipe.layers,
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        intermediate=recipe.intermediate,
    )
    config._attn_implementation = CAUSAL
    return LlamaForCausalLM(config).to(device)


def answer_loss(model: nn.Module, tokens: Tensor, learnt: Tensor, prompt_weight: float) -> Tensor:
    """Mean cross entropy of the tokens marked in `learnt`; tokens and learnt are uint8 [rows, length]."""
    ids = tokens.long()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    losses = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="none")
    target = tokens[:, 1:].reshape(-1)
    weight = learnt[:, 1:].reshape(-1).float()
    if prompt_weight:
        weight = weight.clamp(min=prompt_weight) * (target != 0)  # padding is id 0
    return (losses * weight).sum() / weight.sum().clamp(min=1)


def _optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def _compiled(
    loss: Callable[..., Tensor], recipe: Recipe, device: torch.device, say: Callable[[str], None]
) -> Callable[..., Tensor]:
    """The loss compiled for every row length, or as it is where the compiler fails."""
    compiled = torch.compile(loss, dynamic=False)
    begin = time.monotonic()
    try:
        for length in sorted(set(recipe.row_lengths)):
            shape = (recipe.tokens_per_step // length, length)
            tokens = torch.ones(shape, dtype=torch.uint8, device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                value = compiled(tokens, torch.ones_like(tokens))
            value.backward()
    except Exception as error:  # whatever the compiler trips over, training goes on without it
        say(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return loss
    say(f"compiled in {time.monotonic() - begin:.0f} s")
    return compiled


def train(
    recipe: Recipe,
    *,
    device: torch.device,
    seed: int,
    seconds: float,
    max_steps: int | None,
    workers: int,
    compile_step: bool,
    say: Callable[[str], None],
    advance: Callable[[float, str], None],
    names: Sequence[str] = tasks.TASKS,
    quick_questions: int = 128,
) -> Outcome:
    """Train for `seconds` (or `max_steps`), the learning rate following the clock. Returns the best snapshot.

    Compilation and the first batches come before the clock starts. Ctrl-C ends the training early and keeps what is there.
    """
    torch.manual_seed(seed)
    model = build_model(recipe, device)
    tokenizer = build_tokenizer()
    optimizer = _optimizer(model, recipe, device)
    stream = DataLoader(
        Stream(seed, recipe.tokens_per_step, recipe.row_lengths, names),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if workers else None,
    )
    batches: Iterator[tuple[Tensor, Tensor]] = iter(stream)
    next(batches)

    def loss_of(tokens: Tensor, learnt: Tensor) -> Tensor:
        return answer_loss(model, tokens, learnt, recipe.prompt_weight)

    step_loss = _compiled(loss_of, recipe, device, say) if compile_step else loss_of
    optimizer.zero_grad(set_to_none=True)

    keeper = _Keeper(model, tokenizer, quick_questions, names, say)
    steps, recent, history = 0, None, []
    begin = time.monotonic()
    next_log, next_check = 0.0, 0.25
    with suppress(KeyboardInterrupt):
        while True:
            elapsed = time.monotonic() - begin
            progress = max(elapsed / seconds, steps / max_steps if max_steps else 0.0)
            if progress >= 1:
                break
            rate = learning_rate(recipe.learning_rate, progress, recipe.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate
            tokens, learnt = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = step_loss(tokens, learnt)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
            if progress >= next_log:
                recent = loss.item()  # also keeps the host from running far ahead of the clock
                history.append({"step": steps, "seconds": round(elapsed, 1), "loss": round(recent, 4)})
                speed = steps * recipe.tokens_per_step / max(elapsed, 1e-9) / 1e6
                advance(progress, f"step {steps}  loss {recent:.4f}  {speed:.2f} M tokens/s")
                next_log = progress + 0.01
            elif steps % 16 == 0 and device.type == "cuda":
                torch.cuda.synchronize()
            if progress >= next_check:
                keeper.check(f"{progress:.0%} of the training, loss {recent:.4f}")
                next_check = progress + (0.25 if progress < 0.7 else 0.1)
    spent = time.monotonic() - begin
    del batches, stream
    keeper.check(f"the end, step {steps}")
    advance(1.0, f"step {steps}")
    keeper.restore()
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": steps,
        "tokens": steps * recipe.tokens_per_step,
        "seconds": round(spent, 1),
        "tokens_per_second": round(steps * recipe.tokens_per_step / max(spent, 1e-9)),
        "kept": keeper.kept,
        "loss": history,
    }
    return Outcome(model, facts)


class _Keeper:
    """Asks a few held-out questions now and then, and keeps the weights that answered best."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, questions: int, names: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self.model, self.tokenizer, self.questions, self.names, self.say = model, tokenizer, questions, names, say
        self.kept = ""
        self._best = -1.0
        self._weights: dict[str, Tensor] = {}

    def check(self, when: str) -> None:
        self.model.eval()
        # Seed 1: the questions that choose a snapshot are not those that grade it.
        accuracy = evaluate(self.model, self.tokenizer, self.questions, seed=1, names=self.names)["accuracy"]
        self.model.train()
        found = score(accuracy)
        self.say(f"{when}: " + "  ".join(f"{task} {min(forms.values()):.0%}" for task, forms in accuracy.items()))
        if found >= self._best:
            self._best, self.kept = found, when
            self._weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def restore(self) -> None:
        self.model.load_state_dict(self._weights)
        self.model.eval()
