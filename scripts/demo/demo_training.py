"""Training loop of the built-in models."""

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

CAUSAL = "torchweave_demo_causal"


def _causal_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value, None, **{**options, "is_causal": True})


# Causal attention over the whole row without a mask, which fused kernels do not need.
AttentionInterface.register(CAUSAL, _causal_attention)
AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)


@dataclass(frozen=True)
class Recipe:
    """Model sizes and training parameters; `share` is the fraction of the total training time."""

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
    warmup: float = 0.02  # fraction of the training
    prompt_weight: float = 0.0  # loss weight of prompt tokens, which are unpredictable


@dataclass
class Outcome:
    """A trained model and facts about its training."""

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
    """The loss compiled for every row length; the eager loss if compilation fails."""
    compiled = torch.compile(loss, dynamic=False)
    begin = time.monotonic()
    try:
        for length in sorted(set(recipe.row_lengths)):
            shape = (recipe.tokens_per_step // length, length)
            tokens = torch.ones(shape, dtype=torch.uint8, device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                value = compiled(tokens, torch.ones_like(tokens))
            value.backward()
    except Exception as error:  # continue without the compiler
        say(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return loss
    say(f"compiled in {time.monotonic() - begin:.0f} s")
    return compiled


@dataclass(frozen=True)
class Run:
    """Device, duration and progress callbacks of a training run."""

    device: torch.device
    seed: int
    seconds: float
    max_steps: int | None
    workers: int
    compile_step: bool
    names: Sequence[str]
    quick_questions: int
    say: Callable[[str], None]
    advance: Callable[[float, str], None]  # progress from 0 to 1, note

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def train(recipe: Recipe, run: Run) -> Outcome:
    """Train for `run.seconds` (or `run.max_steps`) with a time-based learning rate; returns the best snapshot.

    Compilation and the first batch precede the clock. Ctrl-C ends the training early and keeps the result.
    """
    torch.manual_seed(run.seed)
    model = build_model(recipe, run.device)
    optimizer = _optimizer(model, recipe, run.device)
    stream = DataLoader(
        Stream(run.seed, recipe.tokens_per_step, recipe.row_lengths, run.names),
        batch_size=None,
        num_workers=run.workers,
        pin_memory=run.on_gpu,
        prefetch_factor=4 if run.workers else None,
    )
    batches: Iterator[tuple[Tensor, Tensor]] = iter(stream)
    next(batches)

    def step_loss(tokens: Tensor, learnt: Tensor) -> Tensor:
        return answer_loss(model, tokens, learnt, recipe.prompt_weight)

    compute = _compiled(step_loss, recipe, run.device, run.say) if run.compile_step else step_loss
    optimizer.zero_grad(set_to_none=True)
    keeper = _Keeper(model, run)
    begin = time.monotonic()
    steps, history = _loop(recipe, run, model, optimizer, batches, compute, keeper)
    spent = time.monotonic() - begin
    del batches, stream
    keeper.check(f"the end, step {steps}")
    run.advance(1.0, f"step {steps}")
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


def _loop(
    recipe: Recipe,
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    compute: Callable[[Tensor, Tensor], Tensor],
    keeper: _Keeper,
) -> tuple[int, list[dict[str, float]]]:
    """Train until the time or steps are used up; returns the number of steps and 20 samples of the loss."""
    steps, history = 0, []
    next_log, next_check = 0.0, 0.3
    begin = time.monotonic()
    with suppress(KeyboardInterrupt):
        while True:
            elapsed = time.monotonic() - begin
            progress = max(elapsed / run.seconds, steps / run.max_steps if run.max_steps else 0.0)
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe.learning_rate, progress, recipe.warmup)
            tokens, learnt = (tensor.to(run.device, non_blocking=True) for tensor in next(batches))
            with torch.autocast(run.device.type, torch.bfloat16, enabled=run.on_gpu):
                loss = compute(tokens, learnt)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
            if run.on_gpu and steps % 16 == 0:
                torch.cuda.synchronize()  # the host clock must not run far ahead of the device
            if progress >= next_log:
                next_log = progress + 0.05
                history.append({"step": steps, "seconds": round(elapsed, 1), "loss": round(loss.item(), 4)})
                speed = steps * recipe.tokens_per_step / max(elapsed, 1e-9) / 1e6
                run.advance(progress, f"step {steps}  loss {history[-1]['loss']:.4f}  {speed:.2f} M tokens/s")
            if progress >= next_check:
                next_check = progress + (0.3 if progress < 0.5 else 0.15)
                keeper.check(f"{progress:.0%} of the training, loss {loss.item():.4f}")
    return steps, history


class _Keeper:
    """Evaluates held-out questions periodically and keeps the best weights."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.model, self.run = model, run
        self.tokenizer = build_tokenizer()
        self.kept = ""
        self._best = -1.0
        self._weights: dict[str, Tensor] = {}

    def check(self, when: str) -> None:
        self.model.eval()
        # Seed 1: other questions than for the final grade.
        found = evaluate(self.model, self.tokenizer, self.run.quick_questions, seed=1, names=self.run.names)["accuracy"]
        self.model.train()
        self.run.say(f"{when}: " + "  ".join(f"{task} {min(forms.values()):.0%}" for task, forms in found.items()))
        if score(found) >= self._best:
            self._best, self.kept = score(found), when
            self._weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def restore(self) -> None:
        self.model.load_state_dict(self._weights)
        self.model.eval()
