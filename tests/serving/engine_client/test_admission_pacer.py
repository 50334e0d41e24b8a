"""Requests come in at once while nobody is answered, and one by one between tokens while somebody is."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from torchweave.serving.engine_client import admission_pacer as module
from torchweave.serving.engine_client.admission_pacer import Turns


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is in line waits for tokens, however slow this machine is, and they flow until the last ones have come."""
    monkeypatch.setattr(module, "_SECONDS", 1e3)
    monkeypatch.setattr(module, "_FLOW_SECONDS", 1e3)


async def _come(turns: Turns, count: int) -> tuple[list[int], list[asyncio.Task[None]]]:
    """Requests that come at the same moment; the numbers of those that are in, as they get in."""
    inside: list[int] = []

    async def come(number: int) -> None:
        await turns.wait()
        inside.append(number)

    tasks = [asyncio.create_task(come(number)) for number in range(count)]
    await _pass()
    return inside, tasks


async def _pass() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_while_no_tokens_flow_nobody_waits():
    async def look() -> None:
        inside, _ = await _come(Turns(), 5)
        assert inside == [0, 1, 2, 3, 4]

    asyncio.run(look())


@pytest.mark.usefixtures("patient")
def test_one_comes_in_behind_the_tokens_of_each_step():
    async def look() -> None:
        turns = Turns()
        turns.tokens_passed(more=True)
        inside, tasks = await _come(turns, 3)
        assert not inside, "the next tokens may come at any moment"
        turns.tokens_passed(more=True)
        await _pass()
        assert inside == [0]
        later, more = await _come(turns, 1)
        assert not later, "who came first is first"
        for _ in range(3):
            turns.tokens_passed(more=True)
            await _pass()
        await asyncio.gather(*tasks, *more)
        assert inside == [0, 1, 2]

    asyncio.run(look())


@pytest.mark.usefixtures("patient")
def test_those_whom_tokens_wake_go_first():
    async def look() -> None:
        turns = Turns()
        turns.tokens_passed(more=True)
        order, _ = await _come(turns, 1)
        token = asyncio.get_running_loop().create_future()

        async def stream() -> None:
            await token
            order.append(-1)

        streaming = asyncio.create_task(stream())
        await asyncio.sleep(0)
        token.set_result(None)
        turns.tokens_passed(more=True)
        await _pass()
        await streaming
        assert order == [-1, 0]

    asyncio.run(look())


@pytest.mark.usefixtures("patient")
def test_behind_the_last_tokens_of_all_nobody_waits():
    async def look() -> None:
        turns = Turns()
        turns.tokens_passed(more=True)
        inside, _ = await _come(turns, 3)
        assert not inside
        turns.tokens_passed(more=False)
        await _pass()
        assert inside == [0, 1, 2], "nobody whom they could hold up"
        later, _ = await _come(turns, 1)
        assert later == [0]

    asyncio.run(look())


def test_the_line_goes_on_where_tokens_stay_away():
    async def look() -> None:
        turns = Turns()
        turns.tokens_passed(more=True)
        inside, tasks = await _come(turns, 200)
        await asyncio.wait_for(asyncio.gather(*tasks), 2)
        assert inside == list(range(200))

    asyncio.run(look())


@pytest.mark.usefixtures("patient")
def test_who_has_left_takes_no_turn():
    async def look() -> None:
        turns = Turns()
        turns.tokens_passed(more=True)
        inside, tasks = await _come(turns, 2)
        tasks[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]
        turns.tokens_passed(more=True)
        await _pass()
        assert inside == [1]

    asyncio.run(look())
