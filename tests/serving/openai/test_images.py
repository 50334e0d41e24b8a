"""Images in `/v1/chat/completions`, `/v1/responses` and `/v1/messages`, from the socket to the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import image_model
from tests.serving.http.malformed import attack
from tests.serving.http.malformed_images import IMAGES, KINDS
from tests.serving.running import ServerProcess, serving

TEXT: Any = {"type": "text", "text": "what"}
NUM_TOKENS = 6


def url_part(url: str) -> Any:
    return {"type": "image_url", "image_url": {"url": url}}


def part(content: bytes) -> Any:
    return url_part(image_model.data_url(content))


PICTURE = part(image_model.encoded(image_model.picture(0)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    path = tmp_path_factory.mktemp("llava")
    return path, *image_model.save(path)


@pytest.fixture(scope="module")
def llava(folder: Any) -> Iterator[ServerProcess]:
    options = ("--served_model_name", "llava", "--limit_mm_per_prompt.image", "3", "--allowed_media_hosts", "127.0.0.1")
    with serving(*options, model=str(folder[0])) as running:
        yield running


def ask(server: ServerProcess, parts: list[Any]) -> Any:
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": NUM_TOKENS, "temperature": 0}
    bias = {"logit_bias": {str(image_model.IMAGE_TOKEN): -100}, "ignore_eos": True, "skip_special_tokens": False}
    return server.post("/v1/chat/completions", {"model": "llava", **body, **bias})


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def block(content: bytes) -> Any:
    """Anthropic's block of an image."""
    data = image_model.data_url(content).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def right(folder: Any, text: str, pictures: list[Any]) -> str:
    """The answer of transformers."""
    _, model, processor = folder
    tokens = image_model.reference(model, processor, text, pictures, NUM_TOKENS)
    return processor.tokenizer.decode(tokens, skip_special_tokens=False)


def test_an_answer_about_two_images_is_that_of_transformers(llava: ServerProcess, folder: Any) -> None:
    pictures = [image_model.picture(0), image_model.picture(1, 90, 20)]
    response = ask(llava, [PICTURE, TEXT, part(image_model.encoded(pictures[1], "BMP"))])
    assert response.status_code == 200, response.text
    text = "user: <image>what<image> assistant: "
    assert response.json()["choices"][0]["message"]["content"] == right(folder, text, pictures)
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == len(folder[2](text=text, images=pictures)["input_ids"][0])
    assert ask(llava, [TEXT]).status_code == 200


def chat(server: ServerProcess, messages: list[Any]) -> tuple[str, int]:
    """The answer of the chat API, which is compared with transformers above, and the number of the prompt's tokens."""
    body = {"model": "llava", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = server.post("/v1/chat/completions", body).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def test_the_responses_api_takes_input_images(llava: ServerProcess) -> None:
    """A conversation of two responses: the image of the first is part of the second's prompt."""
    responses = llava.client().responses
    other = image_model.data_url(image_model.encoded(image_model.picture(1)))
    asked: dict[str, Any] = {"model": "llava", "temperature": 0, "max_output_tokens": NUM_TOKENS}
    image: Any = {"type": "input_image", "image_url": PICTURE["image_url"]["url"], "detail": "auto"}
    first = responses.create(
        input=[{"role": "user", "content": [image, {"type": "input_text", "text": "what"}]}], **asked
    )
    assert first.usage and (first.output_text, first.usage.input_tokens) == chat(llava, [user(PICTURE, TEXT)])
    turn: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": other}]}]
    second = responses.create(input=turn, previous_response_id=first.id, **asked)
    told = [user(PICTURE, TEXT), {"role": "assistant", "content": first.output_text}, user(url_part(other))]
    assert second.usage and (second.output_text, second.usage.input_tokens) == chat(llava, told)
    with responses.stream(input=turn, **asked) as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert streamed == chat(llava, [user(url_part(other))])[0] != first.output_text
    for part, why in (
        ({"type": "input_image", "file_id": "f"}, "image_url"),
        (
            {"type": "input_image", "image_url": "https://a.example/a.png"},
            "which this server does not fetch from",
        ),
        ({"type": "input_image", "image_url": other[:322]}, "cannot be decoded"),
    ):
        parts: Any = [{"role": "user", "content": [part]}]
        with pytest.raises(openai.BadRequestError, match=why):
            responses.create(input=parts, **asked)


def test_anthropics_api_takes_image_blocks(llava: ServerProcess) -> None:
    import anthropic

    http = anthropic.DefaultHttpxClient(verify=False)
    client = anthropic.Anthropic(base_url=llava.url, api_key="none", max_retries=0, timeout=60, http_client=http)
    messages = client.messages
    asked: dict[str, Any] = {"model": "llava", "max_tokens": NUM_TOKENS, "extra_body": {"temperature": 0}}
    image = block(image_model.encoded(image_model.picture(0)))
    turns: Any = [{"role": "user", "content": [image, TEXT]}]
    made = messages.create(messages=turns, **asked)
    expected, num_tokens = chat(llava, [user(PICTURE, TEXT)])
    assert made.content[0].type == "text" and made.content[0].text == expected
    with messages.stream(messages=turns, **asked) as stream:
        assert "".join(stream.text_stream) == expected
    assert messages.count_tokens(model="llava", messages=turns).input_tokens == num_tokens
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image]}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    turns = [*turns, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, image]}]
    made = messages.create(messages=turns, **asked)
    told = [
        user(PICTURE, TEXT),
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": [PICTURE]},
        user(PICTURE),
    ]
    expected, num_tokens = chat(llava, told)
    usage = made.usage
    assert made.content[0].type == "text" and made.content[0].text == expected
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == num_tokens
    for source, why in (
        ({"type": "url", "url": "https://a.example/a.png"}, "which this server does not fetch from"),
        ({"type": "base64", "media_type": "image/png", "data": "?"}, "not valid base64"),
        ({"type": "base64", "media_type": "image/png"}, "source of an image block is not supported"),
        ({"type": "file", "file_id": "f"}, "source of an image block is not supported"),
    ):
        turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        with pytest.raises(anthropic.BadRequestError, match=why):
            messages.create(messages=turns, **asked)


def test_a_prompt_with_images_is_not_truncated(llava: ServerProcess) -> None:
    def ask_for(keep: int) -> Any:
        body = {"messages": [{"role": "user", "content": [PICTURE, TEXT]}], "max_tokens": 1, "temperature": 0}
        return llava.post("/v1/chat/completions", {"model": "llava", "truncate_prompt_tokens": keep, **body})

    assert ask_for(-1).json()["usage"] == ask_for(200).json()["usage"]
    refused = ask_for(20)
    assert refused.status_code == 400 and "with images cannot be truncated" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (
            [url_part("http://169.254.169.254/latest")],
            "which this server does not fetch from",
        ),
        ([url_part("http://127.0.0.1/a.png")], "has a private address"),
        ([url_part("ftp://127.0.0.1/a.png")], "a server fetches from hosts of allowed_media_hosts only"),
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


def test_malformed_images_leak_nothing(llava: ServerProcess) -> None:
    """A few of the cases of `python -m tests.serving.http.malformed_images`."""
    found = asyncio.run(attack(llava.url, count=60, seed=2, workload=IMAGES))
    assert not found.faults, "\n".join(found.faults[:3])
    assert len(found.kinds) == len(KINDS) and found.statuses[400] > 20 and found.statuses[200] > 10


def test_a_model_of_texts_says_that_it_takes_no_images(server: ServerProcess) -> None:
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "This model is served without images: the model has no vision tower."
