"""A short run of `fuzz.py`: random requests by engines with random options against transformers."""

from __future__ import annotations

import pytest

from tests.engine import fuzz


@pytest.mark.parametrize("seed", range(40, 44))
def test_random_options_and_requests_change_no_token(seed: int) -> None:
    assert not fuzz.run(seed, ("llama", "mistral", "lfm2", "mamba2"))
