"""The live page in Chromium against a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import image_model
from tests.serving.http.browser import CHROMIUM, Page, browsing
from tests.serving.running import ServerProcess, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def page(server: ServerProcess) -> Iterator[Page]:
    with browsing() as tab:
        yield tab


@pytest.fixture(scope="module")
def image_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("llava")
    image_model.save(folder)
    with serving("--served_model_name", "llava", "--limit_mm_per_prompt.image", "3", model=str(folder)) as running:
        yield running


def choose(page: Page, *files: Path) -> None:
    """Choose files in the file picker."""
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(each) for each in files])


def hand_over(page: Page, event: str, content: bytes, note: str = "") -> None:
    """Drop or paste an image, and a text beside it if there is a `note`."""
    file = f"new File([new Uint8Array({list(content)})], 'a.png', {{ type: 'image/png' }})"
    page.run(
        f"{{ const data = new DataTransfer(); data.items.add({file});"
        f" if ({json.dumps(note)}) data.setData('text/plain', {json.dumps(note)});"
        f" document.getElementById('prompt').dispatchEvent({event}); 0 }}"
    )


DROP = "new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true })"
PASTE = "new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true })"
PREVIEWS = "document.querySelectorAll('#images img').length"
REMOVE = "document.querySelector('#images button').click()"


def text(page: Page, name: str) -> str:
    return page.run(f"document.getElementById('{name}').textContent")


def test_page_streams_a_completion_and_a_chat_answer(server: ServerProcess, page: Page) -> None:
    page.go(server.url)
    page.until("document.getElementById('state').textContent === 'ready'")
    assert text(page, "name") == "demo" and "2.2 M parameters · float32 on cpu" in text(page, "about")
    page.run("document.getElementById('prompt').value = '12+30='; document.getElementById('ask').requestSubmit()")
    page.until("document.getElementById('answered').textContent !== ''")
    assert text(page, "answer") == "42" and text(page, "answered").startswith("3 tokens · TTFT ")
    page.run("document.querySelector('[value=chat]').click(); document.getElementById('ask').requestSubmit()")
    page.until("document.getElementById('answered').textContent.includes('tokens')")
    assert text(page, "answer") == "42"
    page.run("document.querySelector('[value=completion]').click()")


def test_page_lists_finished_requests_and_draws_charts(server: ServerProcess, page: Page) -> None:
    server.client().completions.create(model="demo", prompt=[5] * 33, max_tokens=21, extra_body={"ignore_eos": True})
    cells = "[...document.querySelector('#requests tr')?.children ?? []].map(cell => cell.textContent)"
    # The table shows requests of earlier tests until the next poll.
    page.until(f"{cells}.slice(2, 4).join() === '33,21'")
    page.until(f"{cells}[0] === 'length limit'")
    page.until("document.getElementById('t-running').dataset.text === '0'")
    assert "of max. 32" in text(page, "t-running-most") and " blocks of " in text(page, "blocks")
    page.until("document.querySelectorAll('#chart-tokens path').length === 4")
    page.until("document.querySelector('#chart-steps .line.a').getAttribute('d') !== ''")


def test_page_fits_narrow_screens_and_has_a_dark_scheme(page: Page, server: ServerProcess) -> None:
    for width in (360, 390, 768, 1000, 1101, 1280):
        page.size(width, 800)
        time.sleep(0.1)
        assert page.run("document.documentElement.scrollWidth") <= width
        outside = page.run(
            "[...document.querySelectorAll('td, .tiles b, .tiles span, .tiles i, .head span, dd')].filter(each => "
            "each.getBoundingClientRect().right > innerWidth || each.scrollWidth > each.clientWidth + 1"
            " && getComputedStyle(each).display !== 'inline')"
            ".map(each => each.textContent)"
        )
        assert outside == [], f"at {width} px"
    light = page.run("getComputedStyle(document.body).backgroundColor")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.run("getComputedStyle(document.body).backgroundColor") != light


def test_page_asks_for_the_api_key(page: Page) -> None:
    """A server with keys answers 401 until the page sends one."""
    page.run(
        "window.plain = fetch; window.sent = []; fetch = (path, options) => { const key = options.headers.Authorization;"
        " sent.push(key); return key === 'Bearer sesame' ? plain(path, options) : Promise.resolve(new Response('', "
        "{ status: 401 })); }; 0"
    )
    page.until("!document.getElementById('key-row').hidden")
    assert text(page, "state") == "API key required"
    page.run("document.getElementById('key').value = 'sesame'; document.getElementById('unlock').requestSubmit()")
    page.until("document.getElementById('state').textContent === 'ready'")
    assert page.run("sent.at(-1)") == "Bearer sesame" and page.run("document.getElementById('key-row').hidden")
    page.run("fetch = plain; 0")


def test_page_shows_request_errors(page: Page) -> None:
    page.run(
        "document.getElementById('prompt').value = 'a'.repeat(2000); document.getElementById('ask').requestSubmit()"
    )
    page.until("document.getElementById('answer').className === 'fault'")
    assert "max_model_len" in text(page, "answer")


def test_page_of_a_text_model_takes_no_images(page: Page) -> None:
    assert page.run("document.getElementById('images').hidden && !document.getElementById('file').offsetParent")
    for event in (DROP, PASTE):
        hand_over(page, event, b"no image")
    time.sleep(0.2)
    assert page.run(PREVIEWS) == 0


def test_page_requests_nothing_from_other_hosts(server: ServerProcess, page: Page) -> None:
    assert page.requested and all(url.startswith((server.url, "data:")) for url in page.requested)
    assert not page.faults, page.faults


def test_page_shows_one_row_per_replica(page: Page) -> None:
    """Drawn from given data: no table for one replica, a row each for two, also on narrow screens."""
    assert page.run("document.getElementById('replicas-row').hidden")
    one = {"replica": 0, "state": "ready", "failure": "", "restarts": 1, "device": "cuda:0", "open": 12, "running": 11,
           "generated_per_second": 15234.4, "usage": 0.312, "hit_rate": 0.5}  # fmt: skip
    two = one | {"replica": 1, "state": "starting", "device": None, "hit_rate": None}
    page.run(f"latest.replicas = {json.dumps([one, two])}; clearTimeout(timer); showReplicas(latest)")
    rows = page.run(
        "[...document.querySelectorAll('#replicas tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows[0] == ["0", "cuda:0", "12", "11", "15.2 k/s", "31%", "50%", "1"]
    assert rows[1][:3] == ["1 · starting", "", "12"] and text(page, "replicas-sum") == "1 of 2 ready"
    for width in (360, 1280):
        page.size(width, 800)
        assert page.run("document.documentElement.scrollWidth") <= width
        cells = "[...document.querySelectorAll('#replicas td')]"
        assert not page.run(f"{cells}.some(cell => cell.getBoundingClientRect().right > innerWidth)")


def test_page_shows_start_up_progress(page: Page) -> None:
    """Drawn from given data: finished stages, a progress bar, and no tiles yet."""
    stages = [{"name": "weights", "seconds": 1.25}]
    bars = [{"title": "building pieces", "done": 1, "total": 4, "note": "0814"}]
    page.run(f"latest.state = 'starting'; latest.steps.count = 0; latest.startup = {json.dumps({'stages': stages, 'bars': bars})};"
             "clearTimeout(timer); showHead(latest); showStartup(latest)")  # fmt: skip
    rows = page.run("[...document.querySelectorAll('#bars .bar')].map(row => row.textContent)")
    assert rows[0] == "weights1.3 s" and rows[1] == "building pieces · 08141 of 4"
    assert page.run("document.querySelectorAll('#bars i')[1].style.width") == "25%"
    assert page.run("getComputedStyle(document.querySelector('.tiles')).display") == "none"


def test_page_sends_images_that_are_chosen_dropped_and_pasted(image_server: ServerProcess, tmp_path: Path) -> None:
    """The answer is that of the same chat through the API, and errors are the server's sentences."""
    pictures = [image_model.encoded(image_model.picture(seed)) for seed in range(3)]
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for file, content in zip(files, (pictures[0], pictures[0][:300], b"x" * (9 << 20)), strict=True):
        file.write_bytes(content)

    def ask(page: Page) -> None:
        page.run("document.getElementById('ask').requestSubmit()")
        page.until("document.getElementById('send').textContent === 'Send'")

    def right(*contents: bytes) -> str:
        parts = [{"type": "image_url", "image_url": {"url": image_model.data_url(each)}} for each in contents]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is in the image?"}]}]
        body = {"model": "llava", "messages": messages, "max_tokens": 64, "temperature": 0}
        return image_server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]

    with browsing() as page:
        page.go(image_server.url)
        page.until("!document.getElementById('images').hidden")
        choose(page, files[0])
        page.until(f"{PREVIEWS} === 1")
        assert page.run("document.querySelector('[name=kind]:checked').value") == "chat"
        ask(page)
        answer = text(page, "answer")
        assert answer and answer == right(pictures[0])
        hand_over(page, DROP, pictures[1])
        page.until(f"{PREVIEWS} === 2")
        hand_over(page, PASTE, pictures[2])
        page.until(f"{PREVIEWS} === 3")
        hand_over(page, PASTE, pictures[2], "a copied cell of a table, which is a text and its picture")
        ask(page)
        assert page.run(PREVIEWS) == 3 and text(page, "answer") == right(*pictures) != answer
        for _ in range(3):
            page.run(REMOVE)
        assert page.run(f"{PREVIEWS} === 0 && !document.querySelector('[value=completion]').disabled")
        for file, why in ((files[1], "cannot be decoded"), (files[2], "longer than the 8388608 bytes")):
            choose(page, file)
            page.until(f"{PREVIEWS} === 1")
            ask(page)
            assert why in text(page, "answer") and page.run("document.getElementById('answer').className") == "fault"
            page.run(REMOVE)
        assert not page.faults and all(url.startswith((image_server.url, "data:")) for url in page.requested)
