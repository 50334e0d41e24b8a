"""Short fuzzing runs. The long ones, against a running server:

python -m tests.serving.http.malformed --count 5000 --url http://127.0.0.1:8000
python -m tests.serving.http.test_fuzz http://127.0.0.1:8000 300
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving.http.malformed import attack
from tests.serving.running import ServerProcess
from tests.serving.watched import watched
from torchweave.engine.request import InferenceRequest, SamplingParams
from torchweave.serving.engine_client.request_stream import RequestStream

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SCHEMA = schemathesis.openapi.from_dict(watched()[0].openapi())
OPERATIONS = {f"{each.ok().method.upper()} {each.ok().path}": each.ok() for each in SCHEMA.get_all_operations()}


def conform(name: str, url: str, examples: int) -> Counter[int]:
    """Send what the document allows, and see that the answers are those of the document; returns statuses."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=OPERATIONS[name].as_strategy())
    def run(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, timeout=60)
        statuses[int(answer.status_code)] += 1
        case.validate_response(answer, checks=CHECKS)

    run()
    return statuses


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_responses_follow_the_openapi_document(name: str, server: ServerProcess):
    statuses = conform(name, server.url, examples=12)
    assert sum(statuses.values()) >= 1 and 422 not in statuses


@pytest.mark.parametrize(
    "field", [{"stop": ["\ud800"]}, {"cache_salt": "\ud800"}, {"priority": 2**64}, {"max_tokens": 2**64}]
)
def test_requests_that_cannot_be_encoded_leak_nothing(field: dict[str, Any]):
    """A request that cannot go to the engine process is refused, and not waited for."""
    _, client, _ = watched(state="ready")
    salt, priority = field.pop("cache_salt", ""), field.pop("priority", 0)
    with pytest.raises(ValueError, match="surrogate pair, or a number"):
        request = InferenceRequest(0, np.array([5], np.int32), SamplingParams(**field), True, priority, salt)
        RequestStream(client).submit(request)
    assert client.num_in_flight == 0 and not client.request_metrics.open


def test_malformed_requests_leak_nothing(server: ServerProcess):
    found = asyncio.run(attack(server.url, count=120, seed=3))
    assert not found.faults, "\n".join(found.faults[:3])
    assert len(found.kinds) == 8 and found.statuses[400] > 20


if __name__ == "__main__":
    for operation in sorted(OPERATIONS):
        print(operation, dict(conform(operation, sys.argv[1], int(sys.argv[2]))), flush=True)
