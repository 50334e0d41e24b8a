"""Streams are one owner's at a time, and the next one's afterwards."""

from __future__ import annotations

import pytest
import torch

from torchweave import side_streams
from torchweave.side_streams import side_stream


class Owner:
    pass


def test_a_stream_goes_to_the_next_owner_when_its_own_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(side_streams, "_free", {})
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    first, second = Owner(), Owner()
    streams = {side_stream(first, here), side_stream(first, here)}
    others = {side_stream(second, here), side_stream(second, there)}
    assert len(streams | others) == 4, "two owners share none"
    del first
    third = Owner()
    assert side_stream(third, there) not in streams, "they stay with their device"
    assert {side_stream(third, here), side_stream(third, here)} == streams
    assert side_stream(third, here) not in streams | others
