"""Fuzzing in a small form; `python -m tests.serving.malformed` and `python -m tests.serving.test_fuzz URL EXAMPLES` are the large ones."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving.malformed import attack
from tests.serving.running import Running, serving
from tests.serving.watched import watched

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", watched()[0])
OPERATIONS = {f"{each.ok().method.upper()} {each.ok().path}": each.ok() for each in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def conform(name: str, url: str, examples: int) -> Counter[int]:
    """Send what the document allows, and see that the answers are those of the document; returns statuses."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=OPERATIONS[name].as_strategy())
    def run(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, timeout=60)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    run()
    return statuses


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_E_answers_are_those_of_the_document(name: str, server: Running):
    statuses = conform(name, server.url, examples=12)
    assert sum(statuses.values()) >= 1 and 422 not in statuses


def test_E_malformed_requests_cost_nothing(server: Running):
    found = asyncio.run(attack(server.url, count=120, seed=3))
    assert not found.faults, "\n".join(found.faults[:3])
    assert len(found.kinds) == 8 and found.statuses[400] > 20


if __name__ == "__main__":
    for operation in sorted(OPERATIONS):
        print(operation, dict(conform(operation, sys.argv[1], int(sys.argv[2]))), flush=True)
