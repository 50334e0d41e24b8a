"""Image-text models in a whole engine on a CPU; the oracle is transformers' eager model, which gets all images at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import image_model
from tests.engine.captured import CAPTURED
from torchweave import LLM, SamplingParams
from torchweave.config import EngineConfig, TorchCompileConfig
from torchweave.engine.kv_cache.image_rows import PromptImages
from torchweave.engine.startup import build
from torchweave.images import EncodedPrompt, ImageInput
from torchweave.models import load
from torchweave.models.multimodal.image_encoder import ImageEncoder
from torchweave.models.multimodal.image_step import ImageDecoderStep
from torchweave.report import Report
from torchweave.verify import image_zoo, zoo
from torchweave.verify.verify import verify

NUM_TOKENS = 8
BIAS = {image_zoo.IMAGE_TOKEN: -100.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=BIAS)
EAGER = TorchCompileConfig(enable_fullgraph=False)
"""For tests of what schedules and encodes images, since a capture takes seconds."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[EncodedPrompt], list[list[int]]]:
    """Qwen3-VL, which has positions of three axes and adds features in two layers: folder, prompts, tokens of transformers."""
    entry = image_zoo.zoo_entry("qwen3_vl-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    model, folder = entry.build(), tmp_path_factory.mktemp("qwen3_vl")
    zoo.save(model, folder)
    prompts = image_zoo.image_prompts(entry, model)
    answers = image_zoo.image_reference_answers(entry, model, prompts, NUM_TOKENS)
    return folder, prompts, [answer.tokens for answer in answers]


def engine(folder: Path, compile_config: TorchCompileConfig = EAGER, **options: Any) -> LLM:
    options = {"num_kv_blocks": 64, "torch_compile_config": compile_config, **options}
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", **options)
    report = Report(show=False)
    return LLM.from_loaded(load(folder, torch.float32, report=report, images=True), config, report)


@pytest.fixture(scope="module")
def llm(qwen: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_MIN_IMAGE_ROWS", 0)
        running = engine(qwen[0], CAPTURED, max_batch_size=4, max_num_tokens=10)
    with running:
        yield running


def tokens(llm: LLM, prompts: list[EncodedPrompt], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def test_a_small_pool_drops_images_and_encodes_them_again(llm: LLM, qwen: Any) -> None:
    _, prompts, expected = qwen
    rows = llm.engine.scheduler.resources.image_rows
    assert rows is not None and rows.model.num_rows == 20 < sum(len(image.index) for p in prompts for image in p.images)
    assert expected[1] != expected[3], "the image decides on the tokens"
    for _ in range(2):  # the second time with cached prefixes, whose hashes tell the two images apart
        assert tokens(llm, prompts) == expected
    assert rows.encoded_total > 5 and rows.reused_total
    assert llm.engine.scheduler.kv.reused_total
    llm.engine.scheduler.check()


def test_a_broken_image_ends_its_request_alone(llm: LLM, qwen: Any) -> None:
    _, prompts, expected = qwen
    image = prompts[1].images[0]
    fewer = {**image.tensors, "pixel_values": image.tensors["pixel_values"][:-4]}
    broken = replace(prompts[1], images=(ImageInput(fewer, image.index),))
    with pytest.raises(RuntimeError, match="cannot encode the image"):
        llm.generate([broken, prompts[0]], GREEDY)
    assert tokens(llm, prompts) == expected


def test_positions_of_three_axes_matter(llm: LLM, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, prompts, expected = qwen
    monkeypatch.setattr(ImageEncoder, "rope_offsets", lambda self, ids, images: (np.zeros((3, len(ids)), np.int32), 0))
    salted = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=BIAS)
    llm.engine.scheduler.kv.reset()
    assert tokens(llm, prompts[2:3], salted) != expected[2:3]
    llm.engine.scheduler.kv.reset()


def test_requests_that_can_never_run_are_refused(llm: LLM, qwen: Any) -> None:
    prompt = qwen[1][1]
    with pytest.raises(ValueError, match="image tokens"):
        llm.generate(replace(prompt, images=prompt.images * 2), GREEDY)
    with pytest.raises(ValueError, match=r"limit_mm_per_prompt\.image is 16"):
        llm.generate(replace(prompt, images=prompt.images * 17), GREEDY)
    with pytest.raises(ValueError, match="Beam search is not supported for prompts with images"):
        llm.generate(prompt, SamplingParams(temperature=0.0, beam_width=2, max_tokens=4))
    large = ImageInput(prompt.images[0].tensors, np.arange(21, dtype=np.int32))
    with pytest.raises(ValueError, match="An image takes 21 tokens, but the engine keeps 20"):
        llm.generate(EncodedPrompt(np.array([image_zoo.IMAGE_TOKEN] * 21), (large,)), GREEDY)


def test_tiles_of_different_numbers_in_the_whole_engine() -> None:
    result = verify(["llava_next-images"])
    assert (result["passed"], result["total"]) == (1, 1), result["results"]


# -- images whose tokens see each other --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[EncodedPrompt], list[list[int]]]:
    """Gemma 3: folder, prompts, tokens of transformers. The last prompt has two images without text between them."""
    entry = image_zoo.zoo_entry("gemma3-images")
    assert isinstance(entry, image_zoo.ImageZooModel)
    model, folder = entry.build(), tmp_path_factory.mktemp("gemma3")
    zoo.save(model, folder)
    prompts = image_zoo.image_prompts(entry, model)
    first, second = prompts[2].images[:2]
    ids = prompts[2].token_ids
    adjacent = replace(second, index=second.index - 1)
    prompts.append(EncodedPrompt(np.delete(ids, first.index[-1] + 1)[:36], (first, adjacent)))
    assert np.diff(np.concatenate([first.index, adjacent.index])).max() == 1
    answers = image_zoo.image_reference_answers(entry, model, prompts, NUM_TOKENS)
    return folder, prompts, [answer.tokens for answer in answers]


@pytest.mark.parametrize("policy", ["first_come_first_served", "equal_progress"])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_chunks_cut_no_image_whose_tokens_see_each_other(gemma: Any, backend: Any, policy: Any) -> None:
    """Steps of 36 tokens over prompts with images of 16, two of them in a row, each prompt twice, beside decode rows."""
    folder, prompts, expected = gemma
    options: Any = {"attention_backend": backend, "context_chunking_policy": policy, "block_size": 4}
    options["num_kv_blocks"] = 400
    compile_config = CAPTURED if (backend, policy) == ("cpp", "first_come_first_served") else EAGER
    with engine(folder, compile_config, max_batch_size=4, max_num_tokens=36, **options) as llm:
        for _ in range(2):  # the second time from cached prefixes, some of which end within an image
            assert tokens(llm, prompts) == expected
        assert llm.engine.scheduler.kv.reused_total
        assert tokens(llm, prompts[::-1]) == expected[::-1]
        with pytest.raises(ValueError, match="prompt_logprobs is not supported"):
            llm.generate(prompts[1], replace(GREEDY, prompt_logprobs=1))
        llm.engine.scheduler.check()


def test_tokens_that_see_each_other_decide_on_the_answer(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompts, expected = gemma
    causal = lambda self, start, size: np.zeros(size, np.int32)  # noqa: E731
    monkeypatch.setattr(PromptImages, "lookahead", causal)
    with engine(folder, max_batch_size=4, max_num_tokens=36) as llm:
        assert tokens(llm, prompts[:1]) == expected[:1] and tokens(llm, prompts[1:]) != expected[1:]


def test_an_image_that_fits_into_no_step_is_refused(gemma: Any) -> None:
    folder, prompts, expected = gemma
    with engine(folder, max_batch_size=4, max_num_tokens=35) as llm:
        with pytest.raises(ValueError, match="32 consecutive image tokens see each other and need one step"):
            llm.generate(prompts[-1], GREEDY)
        assert tokens(llm, prompts[:4]) == expected[:4]
    with pytest.raises(ValueError, match="max_utilization is not supported for"):
        engine(folder, capacity_scheduler_policy="max_utilization")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("llava")
    return folder, *image_model.save(folder)


def test_pictures_in_prompts_and_conversations(llava: Any) -> None:
    folder, model, processor = llava
    one, two = image_model.picture(0), image_model.picture(1, 90, 20)
    greedy = replace(GREEDY, logit_bias={image_model.IMAGE_TOKEN: -100.0})

    def right(text: str, images: list[Any]) -> list[int]:
        return image_model.reference(model, processor, text, images, NUM_TOKENS)

    def prompt(text: str, image: Any) -> dict[str, Any]:
        return {"prompt": text, "multi_modal_data": {"image": image}}

    with engine(folder, max_num_tokens=16) as llm:
        outputs = llm.generate([prompt("a <image> b", one), prompt("<image> and <image>", [one, two]), "12"], greedy)
        assert outputs[0].outputs[0].token_ids == right("a <image> b", [one]) and outputs[0].prompt == "a <image> b"
        assert outputs[1].outputs[0].token_ids == right("<image> and <image>", [one, two])
        url = {"type": "image_url", "image_url": {"url": image_model.data_url(image_model.encoded(one))}}
        for part in (url, {"type": "image", "image": one}):
            messages = [{"role": "user", "content": [part, {"type": "text", "text": "what"}]}]
            answer = llm.chat(messages, greedy)[0].outputs[0].token_ids
            assert answer == right("user: <image>what assistant: ", [one])
        with pytest.raises(ValueError, match=r"0 placeholders \(<image>\) for 1 images"):
            llm.generate(prompt("no place", one), greedy)
        with pytest.raises(ValueError, match="this one has 'video'"):
            llm.generate({"prompt": "x", "multi_modal_data": {"video": one}}, greedy)


def test_a_model_without_its_tower_says_why(llava: Any) -> None:
    folder = str(llava[0])
    with LLM(
        folder,
        dtype="float32",
        device="cpu",
        max_num_tokens=16,
        limit_mm_per_prompt={"image": 0},
        report=Report(show=False),
        torch_compile_config=EAGER,
    ) as llm:
        assert not isinstance(llm.engine.loaded.module, ImageDecoderStep)
        assert llm.generate("12", GREEDY)[0].outputs[0].token_ids
        with pytest.raises(ValueError, match=r"served without images: limit_mm_per_prompt.image is 0"):
            llm.generate({"prompt": "<image>", "multi_modal_data": {"image": image_model.picture(0)}})
