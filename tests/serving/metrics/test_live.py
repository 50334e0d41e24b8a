"""The live page and its data."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.serving.watched import STATS, asking, record_some_requests, watched
from torchweave.images import ImageLimits
from torchweave.serving.engine_client.request_metrics import (
    HISTORY_SECONDS,
    NUM_PAGE_ROWS,
    RequestMetricsData,
    RequestRecord,
    visible_requests,
)
from torchweave.serving.http.routes import _POLICY, page
from torchweave.serving.ipc.messages import ModelCard
from torchweave.serving.metrics.live import _request_row

EXPLANATION = {
    "passes": [
        {"name": "merge_linears", "enabled": True, "matches": 10},
        {"name": "rope", "enabled": True, "matches": 0},
        {"name": "route", "enabled": False, "matches": 0},
    ],
    "pieces": [{"shared_by": 1}, {"shared_by": 15}],
    "graphs": [
        {"step": "decode", "kind": "whole", "key": 2}, {"step": "decode", "kind": "whole", "key": 1},
        {"step": "mixed", "kind": "piecewise", "key": 64},
    ],
    "fallbacks": [{"what": "piece x", "why": "y"}],
}  # fmt: skip


def live(app) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with asking(app) as http:
            answer = await http.get("/live")
            assert answer.headers["cache-control"] == "no-store"
            return answer.json()

    return asyncio.run(ask())


def fields_that_the_page_reads() -> set[str]:
    """`live.requests.running` and the like, as they stand in the script."""
    script = page().partition("<script>")[2]
    names = set(re.findall(r"\blive\.((?:[a-z_]\w*)(?:\.[a-z_]\w*)*)", script))
    arrays = ("slice", "map", "length", "reduce", "flatMap", "append", "filter")
    return {re.sub(rf"\.({'|'.join(arrays)})\b.*", "", name) for name in names}


@pytest.mark.parametrize("ready", [False, True])
def test_live_has_every_key_that_the_page_reads(ready: bool):
    app, client, clock = watched(state="ready" if ready else "starting")
    if ready:
        client.stats, client.explanation = STATS, EXPLANATION
        record_some_requests(client.request_metrics, clock)
    found, read = live(app), fields_that_the_page_reads()
    assert len(read) > 40
    optional = set() if ready else {name for name in read if name.startswith("model.")}  # not known before
    optional |= {f"model.{name}" for name in ("architecture", "num_parameters", "dtype", "device", "max_model_len")}
    optional |= {"model.quantization", "model.max_batch_size", "model.max_images"}
    for name in read - optional:
        at: Any = found
        for part in name.split("."):
            assert isinstance(at, dict) and part in at, f"the page reads live.{name}"
            at = at[part]
    assert "model.name" in read and found["model"]["name"] == "demo"


def test_a_request_is_not_listed_as_shorter_than_its_first_token() -> None:
    record = RequestRecord(0, num_prompt=1, streaming=True, arrived=1.0)
    record.first_token_at, record.ended = 1.0034, 1.00344
    row = _request_row(record, 2.0)
    assert row["first_token_ms"] == 3.4 and row["seconds"] * 1e3 >= row["first_token_ms"]


def test_live_reports_requests_and_steps():
    app, client, clock = watched(state="ready", explanation=EXPLANATION)
    client.stats = STATS
    record_some_requests(client.request_metrics, clock)
    clock.now += 1.0
    found = live(app)
    assert found["requests"] == {
        "running": 3, "waiting": 5, "paused": 2, "open": 1, "refused": 1,
        "ended": {"stop": 1, "length": 1, "cancelled": 1, "error": 0},
    }  # fmt: skip
    assert found["blocks"] == {"total": 100, "used": 25, "tokens_per_block": 16, "hit_rate": 0.75}
    assert found["steps"] == {"count": 3, "p50_ms": 3.0, "p99_ms": 4.0}
    assert found["speculation"] is None
    assert [len(found["history"][name]) for name in ("generated", "read", "step_p50_ms")] == [HISTORY_SECONDS] * 3
    assert found["history"]["generated"][-1] == 6 and found["history"]["read"][-1] == 60
    states = {each["id"]: each["state"] for each in found["recent"]}
    assert states == {4: "paused", 2: "cancelled", 1: "stop", 0: "length"}
    first = next(each for each in found["recent"] if each["id"] == 0)
    assert (first["prompt"], first["tokens"], first["first_token_ms"], first["seconds"]) == (10, 5, 50.0, 0.1)
    assert found["compiled"] == {
        "passes": [{"name": "merge_linears", "matches": 10}], "pieces": 16, "distinct_pieces": 2,
        "graphs": [{"step": "decode", "kind": "whole", "sizes": [1, 2]}, {"step": "mixed", "kind": "piecewise", "sizes": [64]}],
        "fallbacks": ["piece x"], "compiles_after_ready": 0,
    }  # fmt: skip


def test_live_reports_how_many_images_a_prompt_may_have():
    """The prompt box takes images of such a model."""
    app, client, _ = watched(state="ready")
    card = ModelCard("demo", None, "D", "float32", "cpu", None, 1, 512, 4, 104, 1, 16)
    for images, most in ((ImageLimits(7, 3), 3), (ImageLimits(), 0)):
        client.model = dataclasses.replace(card, images=images)
        app.state.live._built_at = float("-inf")
        assert live(app)["model"]["max_images"] == most


def test_live_reports_accepted_drafts():
    app, client, _ = watched(state="ready", explanation=EXPLANATION)
    counts = {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": [3, 2, 1],
    }
    client.stats = STATS | {"spec_decode": counts}
    wanted = {"drafts": 12, "accepted": 6, "tokens_per_row": 2.5, "by_position": [0.75, 0.5, 0.25]}
    assert live(app)["speculation"] == wanted


def test_live_reports_start_up_progress():
    app, client, _ = watched(state="starting")
    client._record_event(0.5, "progress", {"title": "building pieces", "done": 1, "total": 3, "note": "0814"})
    client._record_event(0.7, "stage", {"name": "weights", "seconds": 0.7})
    client._record_event(0.8, "progress", {"title": "weights", "done": 3, "total": 3, "note": ""})
    found = live(app)
    assert found["state"] == "starting"
    assert found["startup"] == {
        "stages": [{"name": "weights", "seconds": 0.7}],
        "bars": [{"title": "building pieces", "done": 1, "total": 3, "note": "0814"}],
    }


def counted(service: Any) -> tuple[Any, list[float]]:
    """The service, and the times at which it builds its JSON."""
    made, snapshot = list[float](), service.snapshot
    service.snapshot = lambda now: made.append(now) or snapshot(now)
    return service, made


def test_live_is_built_at_most_four_times_a_second():
    app, client, clock = watched()
    service, made = counted(app.state.live)

    async def ask() -> bytes:
        for _ in range(100):
            clock.now += 0.01
            text = await service.text()
        return text

    text = asyncio.run(ask())
    assert 3 <= len(made) <= 5
    assert json.loads(text)["state"] == client.state


def test_concurrent_requests_share_one_live_snapshot():
    app, _, clock = watched()
    service, made = counted(app.state.live)

    async def poll_metrics() -> None:
        await asyncio.sleep(0.01)

    async def ask() -> list[bytes]:
        impatient = asyncio.create_task(service.text())
        await asyncio.sleep(0)
        impatient.cancel()
        return await asyncio.gather(*(service.text() for _ in range(20)))

    service._poll_metrics = poll_metrics
    assert len(set(asyncio.run(ask()))) == 1 == len(made)
    clock.now += 1
    assert asyncio.run(service.text()) and len(made) == 2


def test_the_prompt_box_has_a_hidden_control_for_images():
    """A script shows it where `/live` tells that the model takes images."""
    assert re.search(
        r'<div class="images" id="images" hidden>.*<input type="file" id="file" accept="image/\*" multiple>', page()
    )
    assert '$("images").hidden = !model.max_images;' in page() and "img-src data:" in _POLICY


class References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data", "poster")
        ]


def test_the_page_needs_nothing_from_elsewhere():
    text = page()
    references = References()
    references.feed(text)
    assert all(re.fullmatch(r"data:.*|[a-z.]+", each, re.DOTALL) for each in references.found), references.found
    outside = re.findall(r"(?:https?:)?//[a-z][\w.]+", text.replace("http://www.w3.org/2000/svg", ""))
    assert not outside and "@import" not in text and "url(" not in text
    assert len(text.encode()) < 60_000


def test_the_browser_is_told_to_load_nothing_from_elsewhere():
    app, _, _ = watched()

    async def ask() -> None:
        async with asking(app) as http:
            answer = await http.get("/")
            assert answer.headers["content-type"].startswith("text/html")
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "connect-src 'self'" in policy

    asyncio.run(ask())


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js on this machine")
def test_the_page_asks_once_a_second_however_often_it_was_shown_while_the_server_hung():
    """Each time that it is shown again it asks at once."""
    begin = page().index("async function poll()")
    asks = page()[begin : page().index("\n}\n", begin) + 3]
    world = """
        const document = { hidden: false }, $ = () => ({ classList: { add() {}, remove() {} } }), put = () => {};
        const authorization = () => ({}), timers = new Set(), answers = [];
        const setTimeout = () => { timers.add(++count); return count; }, clearTimeout = number => timers.delete(number);
        const fetch = () => new Promise((_, fail) => answers.push(() => fail(new TypeError())));
        let count = 0, timer = 0, latest = null;
    """
    shown = "for (let at = 0; at < 5; at++) { clearTimeout(timer); polls.push(poll()); }"
    end = "answers.forEach(each => each()); Promise.all(polls).then(() => console.log(timers.size));"
    ran = subprocess.run(
        ["node", "-e", f"{{{world} {asks} const polls = []; {shown} {end}}}"], capture_output=True, text=True
    )
    assert (ran.stdout, ran.stderr) == ("1\n", "")


def _data(running: int, waiting: int, finished: int) -> RequestMetricsData:
    """Requests that finished, then running ones, then those that wait, in order of arrival."""
    data = RequestMetricsData()
    for number in range(finished + running + waiting):
        started = 0.0 if number >= finished + running else number + 1.0
        record = RequestRecord(number, 8, float(number), streaming=True, started=started, first_token_at=started)
        if number < finished:
            record.ended, record.reason = number + 2.0, "stop"
            data.recent.appendleft(record)
        else:
            data.open[number] = record
    return data


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ((8, 100, 30), (8, 3, 3)),  # under load: all kinds are seen
        ((2, 0, 30), (2, 0, 12)),
        ((0, 40, 0), (0, 14, 0)),
        ((30, 1, 0), (13, 1, 0)),
        ((4, 100, 2), (4, 8, 2)),
    ],
)
def test_the_table_shows_running_waiting_and_finished_requests(
    counts: tuple[int, int, int], shown: tuple[int, int, int]
):
    assert f"ROWS = {NUM_PAGE_ROWS};" in page()
    records = visible_requests([_data(*counts)])[:NUM_PAGE_ROWS]
    states = [record.state for record in records]
    assert states == ["answering"] * shown[0] + ["waiting"] * shown[1] + ["stop"] * shown[2]
    waiting = [record.id for record in records if record.state == "waiting"]
    assert waiting == list(range(counts[0] + counts[2], counts[0] + counts[2] + shown[1])), "those that start next"
    assert [record.id for record in records[: shown[0]]] == list(range(counts[0] + counts[2]))[::-1][: shown[0]]
