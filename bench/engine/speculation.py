"""Speculation: accepted drafts and tokens a second with each drafter, against the engine without one.

python bench/engine/speculation.py [--rounds 3]
    The built-in model with its draft model and with prompt lookup, on its copying task and on the others, on a CPU.

python bench/engine/speculation.py --model shape:llama-8b --draft-model shape:llama-1b \
        --json bench/results/speculation_h100_202611.json
    Random weights on a GPU, whose drafts are kept with a given probability. The cost of steps: of plain ones, of steps that always
    verify 1 or 3 drafts of which none is kept, and of those with a draft model or an EAGLE-3 head; then tokens a second with an
    adaptive number of drafts, none of which or so many are kept that three drafts yield 3.0 tokens a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "demo"))

import demo_tasks as tasks

from torchweave import LLM, SamplingParams
from torchweave.bench.result import header
from torchweave.config.model_source import resolve
from torchweave.report import Report

GREEDY = SamplingParams(temperature=0, max_tokens=120)
THREE_TOKENS_A_STEP = 0.81
"""Acceptance of each draft, if those before it are kept, with which three drafts yield 3.0 tokens a step."""
PROMPT_TOKENS, FEW_TOKENS, MANY_TOKENS = 128, 16, 272
STEP_SIZES = {"capture_num_tokens": (256, 1024, 4096)}


HEAD_VOCABULARY = 32000
"""Tokens that a head predicts, as published heads of Llama 3 do."""
HEAD_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "head_dim": 128,
    "intermediate_size": 8192,
}
"""Fields of a head whose model, for example one with recurrent layers, has none of that name."""


def write_head(model: str, folder: Path) -> Path:
    """Write an EAGLE-3 head with random weights for `model`, of the sizes of its layers."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "hidden_size", "vocab_size")
    config = {**HEAD_DEFAULTS, **resolve(model).config}
    layer = {name: config[name] for name in (*names, *HEAD_DEFAULTS)}
    heads, kv_heads, dim, inner, hidden, vocab = (layer[name] for name in names)
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "lm_head.weight": (HEAD_VOCABULARY, hidden),
        "norm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (kv_heads * dim, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (kv_heads * dim, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * dim),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        **{f"layers.0.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {
        name: (
            torch.randn(shape, device=device) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
        ).bfloat16()
        for name, shape in shapes.items()
    }
    tensors["d2t"] = torch.arange(HEAD_VOCABULARY) * (vocab // HEAD_VOCABULARY - 1)
    layer |= {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": config["max_position_embeddings"],
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": HEAD_VOCABULARY,
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def variants(draft_model: str, head: str) -> dict[str, dict[str, Any] | None]:
    """Engines to compare by name: their `speculative_config`, or None for the engine without."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    by_model = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": 3}
    by_head = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    none_kept, fixed = {"synthetic_acceptance": 0.0}, {"adaptive": False}
    three_a_step = {"synthetic_acceptance": THREE_TOKENS_A_STEP}
    return {
        "off": None,
        "Q=2 fixed, none kept": {**ngram, **none_kept, **fixed, "num_speculative_tokens": 1},
        "Q=4 fixed, none kept": {**ngram, **none_kept, **fixed},
        "draft model fixed, none kept": {**by_model, **none_kept, **fixed},
        "draft model fixed, 3.0 a step": {**by_model, **three_a_step, **fixed},
        "head fixed, none kept": {**by_head, **none_kept, **fixed},
        "head fixed, 3.0 a step": {**by_head, **three_a_step, **fixed},
        "ngram, none kept": {**ngram, **none_kept},
        "ngram, 3.0 a step": {**ngram, **three_a_step},
        "draft model, none kept": {**by_model, **none_kept},
        "draft model, 3.0 a step": {**by_model, **three_a_step},
        "head, none kept": {**by_head, **none_kept},
        "head, 3.0 a step": {**by_head, **three_a_step},
    }


def generate(llm: LLM, batch: int, num_tokens: int, seed: int) -> float:
    """Seconds in which `batch` random prompts get `num_tokens` tokens each."""
    generator = np.random.default_rng(seed)
    prompts = generator.integers(0, llm.engine.scheduler.limits.vocab_size, (batch, PROMPT_TOKENS)).tolist()
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=num_tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - begin


def measure(llm: LLM, batch: int, rounds: int) -> dict[str, float]:
    """Decode time of the engine: tokens a second, milliseconds and tokens of a row a step, share of drafts kept."""
    counts, speculation = llm.manager.counts, llm.engine.scheduler.speculation
    generate(llm, batch, FEW_TOKENS, 0)
    rates, steps, drafts, accepted = [], 0, 0, 0
    for seed in range(rounds):
        at_start = sum(counts.values())
        few = generate(llm, batch, FEW_TOKENS, seed)
        before = sum(counts.values()), speculation.num_draft_tokens, speculation.num_accepted_tokens
        many = generate(llm, batch, MANY_TOKENS, seed)
        steps += sum(counts.values()) - before[0] - (before[0] - at_start)
        drafts += speculation.num_draft_tokens - before[1]
        accepted += speculation.num_accepted_tokens - before[2]
        rates.append(batch * (MANY_TOKENS - FEW_TOKENS) / (many - few))
    rate, tokens_per_step = statistics.median(rates), rounds * (MANY_TOKENS - FEW_TOKENS) / steps
    return {
        "tokens_per_second": rate,
        "tokens_per_step": tokens_per_step,
        "ms_per_step": 1e3 * batch * tokens_per_step / rate,
        "acceptance": accepted / max(drafts, 1),
    }


def compare_steps(args: argparse.Namespace, head: str) -> None:
    results: dict[str, dict[int, dict[str, float]]] = {}
    most = max(args.batch_sizes)
    for name, config in variants(args.draft_model, head).items():
        if args.only and name not in args.only:
            continue
        options: dict[str, Any] = {"speculative_config": config} if config else {}
        begin = time.perf_counter()
        with LLM(
            args.model,
            device=args.device,
            load_format="dummy",
            max_batch_size=most,
            max_num_tokens=max(STEP_SIZES["capture_num_tokens"]),
            max_model_len=512,
            enable_prefix_caching=False,
            quantization=args.quantization,
            tensor_parallel_size=args.tensor_parallel_size,
            cuda_graph_config={"batch_sizes": tuple(args.batch_sizes)},
            torch_compile_config=STEP_SIZES,
            report=Report(show=False),
            **options,
        ) as llm:
            print(f"{name}: started in {time.perf_counter() - begin:.0f} s", flush=True)
            results[name] = {batch: measure(llm, batch, args.rounds) for batch in args.batch_sizes}
        for batch, values in results[name].items():
            line = f"  batch {batch:4d}: {values['tokens_per_second']:9.1f} tokens/s {values['ms_per_step']:7.3f} ms a step"
            line += f" {values['tokens_per_step']:5.2f} tokens a step, {values['acceptance']:.2f} of drafts kept"
            if "off" in results:
                plain = results["off"][batch]
                line += f"; {values['tokens_per_second'] / plain['tokens_per_second']:.3f}x tokens/s"
                line += f", {values['ms_per_step'] / plain['ms_per_step']:.3f}x a plain step"
            print(line, flush=True)
        if args.json:
            facts = header("speculation", args.model, llm.plan.dtype, llm.plan.device) | {
                "draft_model": args.draft_model,
                "quantization": args.quantization,
                "tensor_parallel_size": args.tensor_parallel_size,
            }
            args.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


def run(llm: LLM, prompts: list[str]) -> tuple[list[list[int]], float]:
    """Tokens of each answer, and tokens a second over all of them, one after the other."""
    begin, answers = time.perf_counter(), []
    for prompt in prompts:
        answers.append(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids)
    return answers, sum(map(len, answers)) / (time.perf_counter() - begin)


def compare_drafters(args: argparse.Namespace) -> None:
    k = {"num_speculative_tokens": args.num_speculative_tokens}
    drafters: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": args.prompt_lookup_min, **k},
        "draft_model": {"method": "draft_model", "model": "demo-draft", **k},
        "eagle3": {"method": "eagle3", "model": "demo-eagle", **k},
    }
    names = [name for name in tasks.TASKS if name != "copy"]
    copying = [tasks.plain_prompt(one) for one in tasks.held_out_questions("copy", args.questions)]
    others = [tasks.plain_prompt(one) for name in names for one in tasks.held_out_questions(name, 4)]
    report = Report(show=False)
    with LLM("demo", device="cpu", report=report) as plain:
        for name, config in drafters.items():
            if args.only and name not in args.only:
                continue
            with LLM("demo", device="cpu", speculative_config=config, report=Report(show=False)) as speculating:
                for task, prompts in {"copy": copying, "other tasks": others}.items():
                    if prompts:
                        print(f"{name}, {task}: ", end="")
                        compare_with_plain(plain, speculating, prompts, args.rounds)


def compare_with_plain(plain: LLM, speculating: LLM, prompts: list[str], rounds: int) -> None:
    engines, rates = (plain, speculating), ([], [])
    answers = [run(llm, prompts)[0] for llm in engines]  # warm up
    counts = speculating.engine.scheduler.speculation
    drafts, kept = counts.num_draft_tokens, counts.num_accepted_tokens
    num_rows, by_place = counts.num_drafts, counts.num_accepted_tokens_per_pos.copy()
    for _ in range(rounds):
        for llm, rate in zip(engines, rates, strict=True):
            rate.append(run(llm, prompts)[1])
    before, after = map(statistics.median, rates)
    print(f"{sum(map(len, answers[0]))} tokens of {len(prompts)} answers, equal: {answers[0] == answers[1]}")
    print(f"  drafts accepted: {counts.num_accepted_tokens - kept} of {counts.num_draft_tokens - drafts}", end="")
    places = (counts.num_accepted_tokens_per_pos - by_place) / max(counts.num_drafts - num_rows, 1)
    print("; by position " + " ".join(f"{share:.2f}" for share in places))
    print(f"  tokens a second: {before:.0f} without, {after:.0f} with drafts: {after / before:.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--prompt-lookup-min", type=int, default=2)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="demo", help="a shape with random weights, or `demo`")
    parser.add_argument("--draft-model", default="shape:llama-1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--only", nargs="+", help="names of the engines or drafters to measure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.model == "demo":
        compare_drafters(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare_steps(args, str(write_head(args.model, Path(folder))))


if __name__ == "__main__":
    main()
