"""Admission: at once while no request decodes, one by one between steps otherwise."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from torchweave.serving.engine_client import admission_pacer as module
from torchweave.serving.engine_client.admission_pacer import AdmissionPacer


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is in line waits for tokens, however slow this machine is, and they flow until the last ones have come."""
    monkeypatch.setattr(module, "_MAX_WAIT_SECONDS", 1e3)
    monkeypatch.setattr(module, "_TOKENS_EXPECTED_SECONDS", 1e3)


async def _come(admission_pacer: AdmissionPacer, count: int) -> tuple[list[int], list[asyncio.Task[None]]]:
    """Requests that come at the same moment; the numbers of those that are in, as they get in."""
    inside: list[int] = []

    async def come(number: int) -> None:
        await admission_pacer.wait()
        inside.append(number)

    tasks = [asyncio.create_task(come(number)) for number in range(count)]
    await _pass()
    return inside, tasks


async def _pass() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_are_admitted_at_once_while_nothing_decodes():
    async def look() -> None:
        inside, _ = await _come(AdmissionPacer(), 5)
        assert inside == [0, 1, 2, 3, 4]

    asyncio.run(look())


@pytest.mark.usefixtures("patient")
def test_one_request_is_admitted_after_each_step():
    async def look() -> None:
        admission_pacer = AdmissionPacer()
        admission_pacer.on_step_tokens(more=True)
        inside, tasks = await _come(admission_pacer, 3)
        assert not inside, "the next tokens may come at any moment"
        admission_pacer.on_step_tokens(more=True)
        await _pass()
        assert inside == [0]
        later, more = await _come(admission_pacer, 1)
        assert not later, "who came first is first"
        for _ in range(3):
            admission_pacer.on_step_tokens(more=True)
            await _pass()
        await asyncio.gather(*tasks, *more)
        assert inside == [0, 1, 2]

    asyncio.run(look())


@pytest.mark.usefixtures("patient")
def test_streams_are_written_before_a_request_is_admitted():
    async def look() -> None:
        admission_pacer = AdmissionPacer()
        admission_pacer.on_step_tokens(more=True)
        order, _ = await _come(admission_pacer, 1)
        token = asyncio.get_running_loop().create_future()

        async def stream() -> None:
            await token
            order.append(-1)

        streaming = asyncio.create_task(stream())
        await asyncio.sleep(0)
        token.set_result(None)
        admission_pacer.on_step_tokens(more=True)
        await _pass()
        await streaming
        assert order == [-1, 0]

    asyncio.run(look())


@pytest.mark.usefixtures("patient")
def test_all_waiting_requests_are_admitted_after_the_last_tokens():
    async def look() -> None:
        admission_pacer = AdmissionPacer()
        admission_pacer.on_step_tokens(more=True)
        inside, _ = await _come(admission_pacer, 3)
        assert not inside
        admission_pacer.on_step_tokens(more=False)
        await _pass()
        assert inside == [0, 1, 2], "nobody whom they could hold up"
        later, _ = await _come(admission_pacer, 1)
        assert later == [0]

    asyncio.run(look())


def test_requests_are_admitted_when_no_step_comes():
    async def look() -> None:
        admission_pacer = AdmissionPacer()
        admission_pacer.on_step_tokens(more=True)
        inside, tasks = await _come(admission_pacer, 200)
        await asyncio.wait_for(asyncio.gather(*tasks), 2)
        assert inside == list(range(200))

    asyncio.run(look())


@pytest.mark.usefixtures("patient")
def test_a_disconnected_client_delays_no_admission():
    async def look() -> None:
        admission_pacer = AdmissionPacer()
        admission_pacer.on_step_tokens(more=True)
        inside, tasks = await _come(admission_pacer, 2)
        tasks[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]
        admission_pacer.on_step_tokens(more=True)
        await _pass()
        assert inside == [1]

    asyncio.run(look())
