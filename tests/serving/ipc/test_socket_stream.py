"""Messages over a Unix socket arrive whole and in order, and sending never blocks."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from torchweave.serving.ipc.socket_stream import Sender, listen, read, receive


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("s") / "socket")


async def heard_by(path: str) -> list[bytes]:
    """All that is said until the sender closes."""
    found: list[bytes] = []
    with listen(path) as listening:
        await asyncio.wait_for(read(listening, found.append), 20)
    return found


def messages(count: int, most: int) -> list[bytes]:
    rng = random.Random(count)
    return [rng.randbytes(rng.choice([0, 1, 3, 4, 5, 900, rng.randrange(most)])) for _ in range(count)]


def test_messages_arrive_whole_and_in_order_of_any_size(path: str) -> None:
    said = messages(300, 300_000)
    sender = Sender(path)  # before anybody listens

    def say() -> None:
        for each in said:
            sender.send(each)
        sender.close(20)

    async def hear() -> list[bytes]:
        thread = threading.Thread(target=say)
        thread.start()
        await asyncio.sleep(0.05)
        found = await heard_by(path)
        thread.join()
        return found

    assert asyncio.run(hear()) == said


def test_send_never_blocks_on_a_slow_reader(path: str) -> None:
    said = messages(200, 200_000)

    async def run() -> list[bytes]:
        found: list[bytes] = []
        with listen(path) as listening:
            sender = Sender(path)
            slowest = 0.0
            for each in said:  # the event loop stands still meanwhile, and a socket holds some 200 kB
                begin = time.monotonic()
                sender.send(each)
                slowest = max(slowest, time.monotonic() - begin)
            assert slowest < 10, "the engine would have stood still"
            closing = asyncio.create_task(asyncio.to_thread(sender.close, 20))
            await asyncio.wait_for(read(listening, found.append), 20)
            await closing
        return found

    assert sum(map(len, said)) > 2_000_000
    assert asyncio.run(run()) == said


def test_messages_of_several_threads_are_not_mixed_up(path: str) -> None:
    sender = Sender(path)

    def say(number: int) -> None:
        for index in range(200):
            sender.send(bytes([number]) * (index * 37 % 5000 + 1))

    async def run() -> list[bytes]:
        threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]

        def all_of_it() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sender.close(20)

        saying = asyncio.create_task(asyncio.to_thread(all_of_it))
        found = await heard_by(path)
        await saying
        return found

    found = asyncio.run(run())
    assert len(found) == 800 and all(len(set(each)) == 1 for each in found)
    for number in range(4):
        lengths = [len(each) for each in found if each[0] == number]
        assert lengths == [index * 37 % 5000 + 1 for index in range(200)]


def test_an_undecodable_message_ends_the_reader(path: str) -> None:
    def hear(message: bytes) -> None:
        if message == b"bad":
            raise ValueError("no such message")

    async def run() -> None:
        with listen(path) as listening:
            sender = Sender(path)
            for each in (b"good", b"bad", b"good"):
                sender.send(each)
            with pytest.raises(ValueError, match="no such message"):
                await asyncio.wait_for(read(listening, hear), 20)
            for _ in range(50):  # the reader is gone, which is nothing to the engine
                sender.send(b"more" * 10_000)
            sender.close(20)

    asyncio.run(run())


def test_sender_closes_without_a_reader(path: str) -> None:
    sender = Sender(path)
    sender.send(b"in vain")
    begin = time.monotonic()
    sender.close(0.1)
    assert time.monotonic() - begin < 5
    sender.send(b"closed")
    assert not Path(path).exists()


def test_a_message_in_many_parts_is_one(path: str) -> None:
    """As where the kernel gives out a byte at a time."""

    async def run() -> list[bytes]:
        found: list[bytes] = []
        with listen(path) as listening:
            reading = asyncio.create_task(read(listening, found.append))
            with socket.socket(socket.AF_UNIX) as writing:
                writing.connect(path)
                for byte in b"\x03\0\0\0abc\0\0\0\0\x02\0\0\0de\x09\0\0\0half":
                    writing.send(bytes([byte]))
                    await asyncio.sleep(0.001)
            await asyncio.wait_for(reading, 20)
        return found

    assert asyncio.run(run()) == [b"abc", b"", b"de"]


def test_receive_yields_the_messages_of_all_senders_in_their_order(path: str) -> None:
    sent = [messages(count, 300_000) for count in (60, 70, 80)]
    with listen(path) as listening:
        senders = [Sender(path) for _ in sent]
        for number, (sender, parts) in enumerate(zip(senders, sent, strict=True)):
            for part in parts:
                sender.send(bytes([number]) + part)
        received = list(itertools.islice(receive(listening), 210))
        for sender in senders:
            sender.close(0)
    assert [[each[1:] for each in received if each[0] == number] for number in range(3)] == sent


def test_receive_goes_on_when_a_sender_closes(path: str) -> None:
    with listen(path) as listening:
        stream = receive(listening)
        for message in (b"first", b"second"):
            sender = Sender(path)
            sender.send(message)
            assert next(stream) == message
            sender.close(0)
