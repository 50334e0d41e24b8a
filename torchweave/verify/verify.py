"""Verify architectures: compare the engine's greedy tokens and their log-probabilities with transformers' eager float32 model.

Each model of the zoo is saved to a folder, loaded, compiled, and served with concurrent prompts of different lengths, long ones
in chunks; then with the same prompts again, which reuse the prefixes of the first ones.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from torchweave.config.options import EngineConfig, SpeculativeConfig, SpeculativeMethod, TorchCompileConfig
from torchweave.engine.llm import LLM
from torchweave.engine.outputs import CompletionOutput
from torchweave.images import EncodedPrompt
from torchweave.models import load
from torchweave.report import Report
from torchweave.verify import image_zoo, zoo
from torchweave.verify.ranks import RankProcesses, RankResult, greedy_params, rank_result

PROMPT_LENGTHS = (3, 70, 21, 40)
NUM_TOKENS = 16
_NUM_DRAFTED_IMAGE_TOKENS = 48
"""No drafter predicts a random model's tokens after images; longer answers repeat themselves, so that some are accepted."""
_MAX_DIFFERENCE = 1e-3  # of a token's log-probability
_BUDGET = 32  # tokens per step: longer prompts are split into chunks of mixed steps


@dataclass(frozen=True)
class VerifyResult:
    """Result of one architecture.

    Attributes:
        name: name in the zoo.
        architecture: transformers' class.
        passed: all tokens equal transformers', and their log-probabilities are within 1e-3.
        how: `captured` as one graph, or `broken` at boundary ops and run without the compiler.
        distinct_pieces, pieces: pieces of the graph.
        seconds: duration of loading, compiling and serving.
        reason: why it failed or was not captured.
        ranks: tensor-parallel ranks.
        stages: pipeline stages.
    """

    name: str
    architecture: str
    passed: bool
    how: str = ""
    distinct_pieces: int = 0
    pieces: int = 0
    seconds: float = 0.0
    reason: str = ""
    ranks: int = 1
    stages: int = 1


def verify(
    names: Sequence[str] | None = None,
    report: Report | None = None,
    ranks: Sequence[int] = (1,),
    stages: int = 1,
    num_speculative_tokens: int = 0,
    device: str = "cpu",
    speculative_method: SpeculativeMethod = "ngram",
) -> dict[str, Any]:
    """Verify architectures of the zoo; None takes all and includes rejected architectures.

    Args:
        ranks: numbers of tensor-parallel ranks to verify with, as processes of this machine.
        stages: pipeline stages, each of as many ranks.
        num_speculative_tokens: drafts of a request and step; 0: no speculation.
        device: device of the engine, `cpu` or `cuda`; transformers' model is always on the CPU.
        speculative_method: the drafter; with `draft_model` each model drafts for itself, and most drafts have to be accepted; for
            image-text models a Llama drafts.

    Returns:
        `{"passed": N, "total": M, "results": [VerifyResult as a dict, ...], "refused": [{"name", "reason"}, ...]}`.

    Raises:
        ValueError: an unknown name, an invalid number of ranks or stages, or a device that does not exist.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but this machine has no CUDA GPU; use --device cpu")
    if device != "cpu" and (max(ranks, default=1) > 1 or stages > 1):
        raise ValueError("several ranks are verified on a CPU only; remove --device cuda")
    report = report if report is not None else Report(show=False)
    everything = (*zoo.ZOO_MODELS, *image_zoo.IMAGE_MODELS)
    entries = everything if names is None else tuple(image_zoo.zoo_entry(name) for name in names)
    if not ranks or min(ranks) < 1:
        raise ValueError(
            f"tensor_parallel_size is {', '.join(map(str, ranks)) or 'empty'}: expected numbers of at least 1."
        )
    if stages < 1:
        raise ValueError(f"pipeline_parallel_size is {stages}: expected at least 1.")
    rows, speculation = [], None
    if num_speculative_tokens:
        speculation = SpeculativeConfig(
            speculative_method, num_speculative_tokens=num_speculative_tokens, prompt_lookup_min=1, adaptive=False
        )
    with (
        report.progress("verifying", len(entries) * len(ranks)) as advance,
        # By default, cuDNN computes float32 convolutions in TF32, unlike the reference on the CPU.
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):
        for size in ranks:
            with RankProcesses(size, stages) if size * stages > 1 else contextlib.nullcontext() as processes:
                for entry in entries:
                    rows.append(verify_one(entry, processes, speculation, device))
                    report.event("verified", **asdict(rows[-1]))
                    advance(1, entry.name)
    refused = [
        {"name": entry.name, "reason": refusal(entry)} for entry in (zoo.REFUSED_MODELS if names is None else ())
    ]
    return {
        "passed": sum(row.passed for row in rows),
        "total": len(rows),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "results": [asdict(row) for row in rows],
        "refused": refused,
    }


def prompts() -> list[list[int]]:
    """Random prompts without special tokens, the same for every architecture."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, zoo.VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def verify_one(
    entry: zoo.ZooModel,
    ranks: RankProcesses | None = None,
    speculation: SpeculativeConfig | None = None,
    device: str = "cpu",
) -> VerifyResult:
    """Verify one architecture; any error is a failed result."""
    begin, architecture = time.monotonic(), entry.model_type
    pieces: tuple[int, ...] = ()
    fallback = ""
    try:
        drafts_for_images = speculation is not None and isinstance(entry, image_zoo.ImageZooModel)
        num_tokens = _NUM_DRAFTED_IMAGE_TOKENS if drafts_for_images else NUM_TOKENS
        model, given, expected = _reference(entry, num_tokens)
        architecture = type(model).__name__
        with tempfile.TemporaryDirectory() as folder:
            zoo.save(model, folder)
            begin = time.monotonic()
            config = _config(entry, folder, speculation, device)
            once = given[: len(given) // 2]
            served = (
                [_serve(entry, config, given, num_tokens)]
                if ranks is None
                else ranks.generate(config, once, num_tokens)
            )
        pieces, fallback = served[0].shared_by, " ".join(served[0].fallback.split())[:300]
        lengths = [len(each.token_ids) for each in given]
        reason = next(filter(None, (_difference(each.answers, expected, lengths) for each in served)), "")
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return VerifyResult(
        name=entry.name,
        architecture=architecture,
        passed=not reason,
        how="broken" if fallback else "captured" if pieces else "",
        distinct_pieces=len(pieces),
        pieces=sum(pieces),
        seconds=round(time.monotonic() - begin, 2),
        reason=reason or fallback,
        ranks=1 if ranks is None else ranks.size,
        stages=1 if ranks is None else ranks.stages,
    )


def _reference(entry: zoo.ZooModel, num_tokens: int) -> tuple[PreTrainedModel, list[EncodedPrompt], list[zoo.Answer]]:
    """transformers' model, the prompts, and its answers; prompts come twice, so that the second ones reuse a prefix."""
    if isinstance(entry, image_zoo.ImageZooModel):
        model = entry.build()
        encoded = image_zoo.image_prompts(entry, model)
        expected = image_zoo.image_reference_answers(entry, model, encoded, num_tokens)
    else:
        model = zoo.build(entry)
        encoded = [EncodedPrompt(np.array(prompt)) for prompt in prompts()]
        expected = zoo.reference_answers(model, prompts(), num_tokens)
    return model, encoded * 2, expected * 2


def _serve(entry: zoo.ZooModel, config: EngineConfig, given: Sequence[EncodedPrompt], num_tokens: int) -> RankResult:
    report, has_images = Report(show=False), isinstance(entry, image_zoo.ImageZooModel)
    loaded = load(
        config.model, torch.float32, config.device, report=report, max_model_len=entry.max_model_len, images=has_images
    )
    greedy = greedy_params(config, num_tokens, has_images)
    with LLM.from_loaded(loaded, config, report) as llm:
        batch = len(PROMPT_LENGTHS)
        outputs = [each for at in range(0, len(given), batch) for each in llm.generate(given[at : at + batch], greedy)]
        drafts = llm.engine.scheduler.speculation
    method = config.speculative_config.method
    if method is not None and not drafts.num_draft_tokens:
        raise ValueError("no step had drafts")
    # A decoder of text drafts for an image-text model, without knowing its answers.
    if method == "draft_model" and not has_images and drafts.num_accepted_tokens < 0.9 * drafts.num_draft_tokens:
        raise ValueError(
            f"the model accepted {drafts.num_accepted_tokens} of {drafts.num_draft_tokens} drafts of its own: its cache is wrong"
        )
    return rank_result(tuple(_answer(output.outputs[0]) for output in outputs), report)


def _answer(output: CompletionOutput) -> zoo.Answer:
    tokens = list(output.token_ids)
    if output.logprobs is None:
        return zoo.Answer(tokens)
    return zoo.Answer(tokens, [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)])


def _config(entry: zoo.ZooModel, folder: str, speculation: SpeculativeConfig | None, device: str) -> EngineConfig:
    if speculation is not None and speculation.method == "draft_model":
        draft = folder
        if isinstance(entry, image_zoo.ImageZooModel):  # which is none itself
            zoo.save(zoo.build(zoo.zoo_model("llama")), draft := str(Path(folder) / "draft"))
        speculation = replace(speculation, model=draft)
    return EngineConfig(
        model=folder,
        dtype="float32",
        device=device,
        max_model_len=entry.max_model_len,
        max_batch_size=len(PROMPT_LENGTHS),
        max_num_tokens=_BUDGET,
        num_kv_blocks=64,
        # Without Inductor, which would take minutes; its results are tested elsewhere.
        torch_compile_config=TorchCompileConfig(enable_inductor=False, compile_cache=False),
        speculative_config=speculation or SpeculativeConfig(),
    )


def _difference(answers: Sequence[zoo.Answer], expected: Sequence[zoo.Answer], lengths: Sequence[int]) -> str:
    """The first difference, as a sentence; empty if there is none."""
    for length, answer, right in zip(lengths, answers, expected, strict=True):
        for place, (token, wanted) in enumerate(zip(answer.tokens, right.tokens, strict=True)):
            if token != wanted:
                return f"prompt of {length} tokens: token {place} is {token}, expected {wanted}"
        logprobs = zip(answer.logprobs or (), right.logprobs or (), strict=answer.logprobs is not None)
        for place, (logprob, wanted) in enumerate(logprobs):
            if not abs(logprob - wanted) <= _MAX_DIFFERENCE:
                return f"prompt of {length} tokens: token {place} has the log-probability {logprob:.4f}, expected {wanted:.4f}"
    return ""


def refusal(entry: zoo.ZooModel) -> str:
    """Why an architecture is rejected at load; empty if it is not."""
    try:
        load(entry.config().to_dict(), torch.float32, load_format="dummy")
    except ValueError as error:
        return str(error)
    return ""


def table(result: dict[str, Any]) -> str:
    """The result of `verify` as docs/reference/models.md: a row per architecture, a column per number of ranks."""
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["results"]:
        by_name.setdefault(row["name"], {})[row["ranks"]] = row
    sizes = sorted({row["ranks"] for row in result["results"]})
    passed = {size: [row["passed"] for row in result["results"] if row["ranks"] == size] for size in sizes}
    complete = [size for size in sizes if len(passed[size]) == len(by_name)]
    lines = [
        "# Models",
        "",
        f"{sum(passed[sizes[0]])} of {len(by_name)} architectures generate the greedy tokens of transformers' eager float32 "
        f"model (transformers {result['transformers']}, torch {result['torch']}, CPU){_on_ranks(passed, sizes[1:])}.",
        "",
        f"Generated by `torchweave models verify --all{_option(complete)} --write docs/reference/models.md`: tiny models "
        "with random weights, saved to and loaded from a folder, concurrent prompts of "
        f"{', '.join(map(str, PROMPT_LENGTHS))} tokens, chunked to a budget of {_BUDGET} tokens per step, {NUM_TOKENS} tokens "
        "generated, log-probabilities within "
        f"{_MAX_DIFFERENCE:g}; on one rank then the same prompts again, which reuse prefixes. Models named `-images` get prompts "
        "without images, with one, with three of different sizes, and with the same text and another image; their "
        "image token is not generated. *Pieces* are distinct / all."
        + (
            ""
            if complete == sizes
            else " With more ranks, some architectures were verified; an empty cell was not run."
        ),
        "",
        "LongRoPE has two sets of factors, and transformers switches between them as a sequence grows; Torchweave uses one for all "
        "requests: the long factors, or the short ones if `max_model_len` is at most the config's "
        "`original_max_position_embeddings`. Short prompts match transformers with the short factors.",
        "",
        f"| name | architecture | tokens equal |{''.join(f' {size} ranks |' for size in sizes[1:])} pieces | how | s |",
        "|---|---|---|" + "---|" * len(sizes[1:]) + "---|---|---|",
    ]
    for name, rows in by_name.items():
        row = rows[min(rows)]
        reasons = [_cell(other["reason"]) for other in rows.values() if other["reason"]]
        how = row["how"] + (f": {reasons[0]}" if reasons else "")
        pieces = f"{row['distinct_pieces']} / {row['pieces']}" if row["pieces"] else ""
        equal = " | ".join(_passed(rows.get(size)) for size in sizes)
        lines.append(f"| {name} | {row['architecture']} | {equal} | {pieces} | {how} | {row['seconds']:.1f} |")
    if result["refused"]:
        lines += ["", "## Rejected at load", "", "| name | reason |", "|---|---|"]
        lines += [f"| {row['name']} | {_cell(row['reason'])} |" for row in result["refused"]]
    return "\n".join(lines) + "\n"


def _on_ranks(passed: dict[int, list[bool]], sizes: Sequence[int]) -> str:
    return "".join(f", and {sum(passed[size])} of {len(passed[size])} sharded over {size} ranks" for size in sizes)


def _passed(row: dict[str, Any] | None) -> str:
    return "" if row is None else "yes" if row["passed"] else "**no**"


def _option(sizes: Sequence[int]) -> str:
    return "" if list(sizes) == [1] else f" --tensor_parallel_size {','.join(map(str, sizes))}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
