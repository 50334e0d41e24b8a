"""Images in `/v1/chat/completions`, from the socket to the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import image_model
from tests.serving.running import ServerProcess, serving

TEXT: Any = {"type": "text", "text": "what"}
NUM_TOKENS = 6


def part(content: bytes) -> Any:
    return {"type": "image_url", "image_url": {"url": image_model.data_url(content)}}


PICTURE = part(image_model.encoded(image_model.picture(0)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    path = tmp_path_factory.mktemp("llava")
    return path, *image_model.save(path)


@pytest.fixture(scope="module")
def llava(folder: Any) -> Iterator[ServerProcess]:
    with serving("--served_model_name", "llava", "--limit_mm_per_prompt.image", "3", model=str(folder[0])) as running:
        yield running


def ask(server: ServerProcess, parts: list[Any]) -> Any:
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": NUM_TOKENS, "temperature": 0}
    bias = {"logit_bias": {str(image_model.IMAGE_TOKEN): -100}, "ignore_eos": True, "skip_special_tokens": False}
    return server.post("/v1/chat/completions", {"model": "llava", **body, **bias})


def test_an_answer_about_two_images_is_that_of_transformers(llava: ServerProcess, folder: Any) -> None:
    _, model, processor = folder
    pictures = [image_model.picture(0), image_model.picture(1, 90, 20)]
    response = ask(llava, [PICTURE, TEXT, part(image_model.encoded(pictures[1], "BMP"))])
    assert response.status_code == 200, response.text
    text = "user: <image>what<image> assistant: "
    tokens = image_model.reference(model, processor, text, pictures, NUM_TOKENS)
    expected = processor.tokenizer.decode(tokens, skip_special_tokens=False)
    assert response.json()["choices"][0]["message"]["content"] == expected
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == len(processor(text=text, images=pictures)["input_ids"][0])
    assert ask(llava, [TEXT]).status_code == 200


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}],
            "the server fetches no addresses",
        ),
        ([part(b"no image"), TEXT], "cannot be decoded"),
        ([part(image_model.encoded(image_model.picture(0))[:300])], "cannot be decoded"),
        ([PICTURE] * 4, "more than 3 images"),
        ([PICTURE, {"type": "text", "text": "<image>"}], "2 placeholders"),
        ([PICTURE, {"type": "audio"}], "a part of a content with images"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(llava: ServerProcess, parts: list[Any], why: str) -> None:
    response = ask(llava, parts)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and why in message and message.endswith("."), response.text


def test_a_model_of_texts_says_that_it_takes_no_images(server: ServerProcess) -> None:
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "This model is served without images: the model has no vision tower."
