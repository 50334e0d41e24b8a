"""Serve random requests by engines with random options: `python -m tests.engine.fuzz --count 20 --seed 0 [--models llama,lfm2]`.

The oracle is transformers' eager model: it reads a prompt with its whole answer at once, and each token has to be one that the
request's parameters allow on these logits, the best of them where nothing is sampled. Sampled answers are also compared with those
of an engine without options, since a seed has one answer. Every few steps slots, requests and blocks have to agree, and at the end
all of them have to be free.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchweave.config.options import EngineConfig, SpeculativeConfig, TorchCompileConfig
from torchweave.engine.request import InferenceRequest, Response, SamplingParams, TokenLogprobs
from torchweave.engine.startup.build import Engine, build
from torchweave.report import Report
from torchweave.verify import zoo

MODELS = ("llama", "mistral", "lfm2", "gemma2", "mamba2", "qwen3_next", "gpt_oss", "deepseek_v3", "recurrent_gemma")
_RECURRENT = ("lfm2", "mamba2", "qwen3_next", "recurrent_gemma")  # which cannot draft
EOS = 2  # of all models of the zoo
_TOLERANCE = 2e-3  # of a logit
_ROUNDS = 3
_FIRST_TOKEN = 3  # the ids before it are special


@dataclass
class Asked:
    """A request, the clock at which it arrives and is cancelled, and its answer so far."""

    request: InferenceRequest
    arrival: int
    cancel: int | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None

    @property
    def prompt(self) -> list[int]:
        return self.request.input_ids.tolist()


def draw_options(draw: random.Random, drafter: Path | None) -> dict[str, Any]:
    """Options of an engine, with a KV cache for one longest request or a few; `drafter` is the folder of a draft model."""
    max_model_len, block_size = draw.choice([64, 120, 230]), draw.choice([1, 2, 4, 5, 8, 16, 32])
    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_batch_size": draw.choice([1, 2, 3, 5, 8, 11]),
        "block_size": block_size,
        "enable_prefix_caching": draw.random() < 0.75,
        "capacity_scheduler_policy": draw.choice(["guaranteed_no_evict", "max_utilization", "static_batch"]),
        "scheduling_policy": draw.choice([None, "fcfs", "priority"]),
        "context_chunking_policy": draw.choice(["first_come_first_served", "equal_progress"]),
        "mixed_step_tokens": draw.choice([None, 0, 8, 16]),
        "batch_wait_timeout_iters": draw.choice([0, 0, 2]),
        "batch_wait_max_tokens_ratio": draw.choice([0.0, 0.5]),
        "run_ahead": draw.choice([1, 2, 3, 4]),
        "num_state_snapshots": draw.choice([None, 0, 1, 3, 9]),
        "kv_offload_gb": draw.choice([0.0, 0.002]),
        "attention_backend": draw.choice(["auto", "torch", "cpp"]),
    }
    query_len = 1
    if draw.random() < 0.45:
        drafts = draw.choice([1, 2, 3, 5, 7])
        query_len += drafts
        method: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1}
        if drafter is not None and draw.random() < 0.5:
            method = {"method": "draft_model", "model": str(drafter)}
        options["speculative_config"] = SpeculativeConfig(**method, num_speculative_tokens=drafts, adaptive=False)
    budget = draw.choice([1, 8, 11, 24, 64, 512])
    options["max_num_tokens"] = max(budget, options["max_batch_size"] * query_len)
    blocks = (max_model_len + query_len * options["run_ahead"]) // block_size + 2
    options["num_kv_blocks"] = int(blocks * draw.choice([1, 1.2, 2, 4]))
    return options


def draw_params(draw: random.Random) -> SamplingParams:
    """Sampling parameters, each of them seldom."""

    def tokens(count: int) -> list[int]:
        return [draw.randrange(_FIRST_TOKEN, zoo.VOCAB) for _ in range(count)]

    most = draw.choice([1, 2, 5, 8, 13, 20])
    fields: dict[str, Any] = {"max_tokens": most, "ignore_eos": draw.random() < 0.5}
    fields["temperature"] = draw.choice([0.0, 0.0, 0.0, 0.5, 1.0, 1.7])
    maybe: dict[str, Any] = {
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "repetition_penalty": draw.uniform(0.7, 1.6),
        "logit_bias": {token: draw.uniform(-20, 20) for token in tokens(draw.randint(1, 12))},
        "bad_words": [tokens(draw.randint(1, 3)) for _ in range(draw.randint(1, 6))],
        "stop_token_ids": tokens(draw.choice([1, 3, 12, 60])),
        "min_tokens": draw.randint(1, most),
        "allowed_token_ids": sorted(set(tokens(draw.choice([5, 60])))),
        "logprobs": draw.choice([0, 1, 5, 20]),
        "prompt_logprobs": draw.choice([0, 4, 17]),
    }
    if fields["temperature"]:
        fields["seed"] = draw.randrange(1000)
        maybe |= {"top_p": draw.uniform(0.05, 1), "top_k": draw.randint(1, 60), "min_p": draw.random() / 4}
    share = draw.choice([0.05, 0.2, 0.4])
    return SamplingParams(**fields, **{name: value for name, value in maybe.items() if draw.random() < share})


def draw_requests(draw: random.Random, stems: list[list[int]], first_id: int) -> list[Asked]:
    """Requests whose prompts begin as one of `stems`, are repeated, or are short."""
    asked: list[Asked] = []
    clock, longest = 0, len(stems[0])
    for number in range(draw.randint(3, 12)):
        length = draw.choice([1, 2, draw.randint(1, 20), draw.randint(1, longest), longest])
        cut = draw.choice([0, length, draw.randint(0, length)])
        prompt = draw.choice(stems)[:cut] + [draw.randrange(_FIRST_TOKEN, zoo.VOCAB) for _ in range(length - cut)]
        if asked and draw.random() < 0.2:
            prompt = draw.choice(asked).prompt
        clock += draw.choice([0, 0, 0, 1, 3, 9])
        request = InferenceRequest(
            first_id + number,
            np.array(prompt),
            draw_params(draw),
            streaming=draw.random() < 0.5,
            priority=draw.choice([0, 0, 1, -2]),
            cache_salt=draw.choice(["", "", "", "s"]),
        )
        asked.append(Asked(request, clock, clock + draw.randint(0, 25) if draw.random() < 0.12 else None))
    return asked


def serve(engine: Engine, asked: list[Asked], draw: random.Random) -> list[Asked]:
    """Serve requests as they arrive, with steps in flight as `run_ahead` allows; returns those that are not refused."""
    scheduler, runner = engine.scheduler, engine.runner
    waiting, served = deque(asked), dict[int, Asked]()
    in_flight, clock = deque[tuple[Any, Any]](), 0

    def take(responses: Any) -> None:
        for response in responses:
            _add(served[response.id], response)

    while waiting or scheduler.num_active or in_flight:
        clock += 1
        while waiting and (waiting[0].arrival <= clock or not scheduler.num_active):
            each = waiting.popleft()
            if not scheduler.rejection_reason(each.request):
                served[each.request.id] = each
                scheduler.add(each.request, seed=0)
        for number, each in served.items():
            if each.cancel is not None and each.cancel <= clock and each.reason is None:
                take(scheduler.cancel(number))
                each.cancel = None
        step = scheduler.schedule()
        if step is not None:
            in_flight.append((step, runner.launch(step)))
        assert in_flight or not scheduler.num_active or scheduler.is_loading, "requests wait for nothing"
        if in_flight and (step is None or len(in_flight) >= engine.plan.run_ahead or draw.random() < 0.2):
            oldest, handle = in_flight.popleft()
            take(scheduler.update(oldest, runner.collect(handle)))
        if clock % 8 == 0:
            scheduler.check()
    scheduler.check()
    assert scheduler.kv.num_free == scheduler.kv.num_blocks, "blocks leaked"
    assert len(scheduler._running.slots.free) == scheduler.limits.max_batch_size, "slots leaked"
    return list(served.values())


def _add(asked: Asked, response: Response) -> None:
    assert asked.reason is None, "a response came after the final one"
    assert not response.error, response.error
    output = response.output
    asked.tokens += output.token_ids.tolist()
    asked.logprobs += output.logprobs
    asked.prompt_logprobs += output.prompt_logprobs
    asked.reason = output.finish_reason
    assert response.final == (asked.reason is not None)


# -- the oracle --------------------------------------------------------------------------------------------------------


def processed(logits: Tensor, asked: Asked, before: list[int]) -> Tensor:
    """A request's logits of the token behind `before`, in plain torch."""
    params, logits = asked.request.sampling, logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.allowed_token_ids is not None:
        others = torch.ones_like(logits, dtype=torch.bool)
        others[params.allowed_token_ids] = False
        logits[others] = -torch.inf
    seen, repetition = torch.tensor(sorted({*asked.prompt, *before})), params.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
    counts = torch.bincount(torch.tensor(before, dtype=torch.int64), minlength=len(logits))
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for word in params.bad_words or ():
        if list(word[:-1]) == before[len(before) - len(word) + 1 :] or len(word) == 1:
            logits[int(word[-1])] = -torch.inf
    if len(before) < params.min_tokens:
        logits[stops_of(params)] = -torch.inf
    return logits


def stops_of(params: SamplingParams) -> list[int]:
    return [*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))]


@torch.no_grad()
def fault(model: PreTrainedModel, asked: Asked, max_model_len: int) -> str:
    """What is wrong with an answer, in a clause; empty if nothing is."""
    params, tokens, prompt = asked.request.sampling, asked.tokens, asked.prompt
    if asked.reason == "cancelled" and not tokens:
        return ""
    logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0].float()
    own = logits[len(prompt) - 1 :]
    tolerance = _TOLERANCE * max(params.repetition_penalty, 1 / params.repetition_penalty)
    for place, token in enumerate(tokens):
        right = processed(own[place], asked, tokens[:place])
        if not _may_be_drawn(right, token, params, tolerance):
            return (
                f"token {place} is {token} ({right[token]:.4f}), the best is {int(right.argmax())} ({right.max():.4f})"
            )
    stops, room = set(stops_of(params)), min(params.max_tokens or max_model_len, max_model_len - len(prompt))
    if stops & set(tokens[:-1]):
        return "it goes on behind a stop token"
    if asked.reason != "cancelled" and asked.reason != ("stop" if tokens[-1] in stops else "length"):
        return f"it ends by {asked.reason} with token {tokens[-1]}"
    if asked.reason == "length" and len(tokens) != room:
        return f"it ends after {len(tokens)} of {room} tokens"
    known = logits.log_softmax(-1)
    scored = list(zip(asked.logprobs, tokens, known[len(prompt) - 1 :], strict=False))
    if params.prompt_logprobs is not None and asked.reason != "cancelled":
        if len(asked.prompt_logprobs) != len(prompt) - 1:
            return f"{len(asked.prompt_logprobs)} tokens of {len(prompt)} in the prompt have log-probabilities"
        scored += zip(asked.prompt_logprobs, prompt[1:], known, strict=False)
    if params.logprobs is not None and len(asked.logprobs) != len(tokens):
        return f"{len(asked.logprobs)} of {len(tokens)} tokens have log-probabilities"
    return next(
        (f"token {token} has {given}" for given, token, right in scored if not _is_close(given, token, right)), ""
    )


def _may_be_drawn(logits: Tensor, token: int, params: SamplingParams, tolerance: float) -> bool:
    """Whether a token is within top_k, top_p and min_p, or the best of a greedy request."""
    if params.temperature == 0:
        return bool(logits[token] >= logits.max() - tolerance)
    logits, tolerance = logits / params.temperature, tolerance / params.temperature
    if params.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1] - tolerance, -torch.inf)
    share = logits.softmax(-1)
    better = share[logits > logits[token] + tolerance].sum()
    return bool(
        (share[token] > 0) & (better < params.top_p + 0.01) & (share[token] >= params.min_p * share.max() * 0.98)
    )


def _is_close(given: TokenLogprobs, token: int, right: Tensor) -> bool:
    shown = {given.token_id: given.logprob} | given.top
    best = right.topk(max(len(given.top), 1)).values
    top = sorted(given.top.values(), reverse=True) or best.tolist()
    return (
        given.token_id == token
        and all(abs(value - float(right[each])) < _TOLERANCE for each, value in shown.items())
        and bool((torch.tensor(top) - best).abs().max() < _TOLERANCE)
    )


# -- runs --------------------------------------------------------------------------------------------------------------


def open_engine(folder: Path, options: dict[str, Any]) -> Engine:
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", torch_compile_config=TorchCompileConfig(enable_fullgraph=False), **options
    )  # fmt: skip
    try:
        return build(config, Report(show=False))
    except ValueError as error:
        if "The KV cache has room" not in str(error):
            raise
        return open_engine(folder, options | {"num_kv_blocks": 2 * options["num_kv_blocks"]})


def run(seed: int, names: tuple[str, ...] = MODELS) -> list[str]:
    """The faults of one model with one set of options, a line each."""
    draw = random.Random(seed)
    name = names[seed % len(names)]
    model = zoo.build(zoo.zoo_model(name))
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        zoo.save(model, folder)
        options = draw_options(draw, None if name in _RECURRENT else folder)
        engine = open_engine(folder, options)
        longest = options["max_model_len"] - draw.choice([1, 2, 21])
        stems = [[draw.randrange(_FIRST_TOKEN, zoo.VOCAB) for _ in range(longest)] for _ in range(3)]
        asked = [draw_requests(draw, stems, 100 * number) for number in range(_ROUNDS)]
        answers = [each for requests in asked for each in serve(engine, requests, draw)]
        assert answers, "every request was refused"
        faults = [(each, fault(model, each, options["max_model_len"])) for each in answers]
        seeded = {each.request.id: each for each in answers if each.request.sampling.temperature > 0}
        plain = open_engine(
            folder, {"max_batch_size": 1, "max_model_len": options["max_model_len"], "num_kv_blocks": 64}
        )
        alone = [Asked(replace(each.request, priority=0), 0, None) for each in seeded.values()]
    for each in serve(plain, alone, draw):
        answer = seeded[each.request.id]
        if answer.tokens != (each.tokens[: len(answer.tokens)] if answer.reason == "cancelled" else each.tokens):
            faults.append((answer, f"its tokens are {answer.tokens}, alone {each.tokens}"))
    return [f"seed {seed}, {name}, {options}: {why}: {each}" for each, why in faults if why]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(MODELS))
    args = parser.parse_args()
    num_faults = 0
    for seed in range(args.seed, args.seed + args.count):
        for line in run(seed, tuple(args.models.split(","))):
            num_faults += 1
            print(line, flush=True)
    print(f"{args.count} engines, {num_faults} faults")


if __name__ == "__main__":
    main()
