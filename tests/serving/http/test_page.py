"""The live page in Chromium against a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.serving.http.browser import CHROMIUM, Page, browsing
from tests.serving.running import ServerProcess

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def page(server: ServerProcess) -> Iterator[Page]:
    with browsing() as tab:
        yield tab


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
    for width in (360, 390, 768, 1280):
        page.size(width, 800)
        time.sleep(0.1)
        assert page.run("document.documentElement.scrollWidth") <= width
        outside = page.run(
            "[...document.querySelectorAll('td, .tiles b, .head span, dd')].filter(each => each.getBoundingClientRect().right"
            " > innerWidth || each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline')"
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
