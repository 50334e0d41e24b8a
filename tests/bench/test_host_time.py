"""Host time of a decode step stays small and does not grow with the batch."""

from __future__ import annotations

from torchweave.bench.host_time import measure_host_time, summary


def test_host_time_at_256_requests_stays_below_its_budget() -> None:
    # Processors differ by a factor of two in speed; slow ones take 265 us.
    one = summary(measure_host_time(1, 300))["host_us"]
    many = summary(measure_host_time(256, 300))["host_us"]
    assert many < 400, f"{many:.0f} us a step at 256 requests"
    assert many < 4 * one + 40, f"{one:.0f} us at one request, {many:.0f} us at 256"
