"""Requests generated from the server's OpenAPI schema never cause an internal error."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from overt.inspect.server.address import Address
from overt.inspect.server.app import create_app
from overt.inspect.server.model_cache import ModelCache, find_models

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@pytest.mark.long
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_generated_requests_never_cause_a_server_error(demo: Path, wrong: bool) -> None:
    app = create_app(ModelCache(find_models([str(demo)])), Address(also=("testserver",)))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    mode = schemathesis.GenerationMode.NEGATIVE if wrong else schemathesis.GenerationMode.POSITIVE
    labels = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if wrong and not (operation.body or operation.query):
            continue  # without parameters there are no invalid ones
        labels.append(operation.label)

        @settings(
            max_examples=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            answer = case.call()
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                error = answer.json()
                assert set(error) == {"error"} and "\n" not in error["error"]
            case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

        one()
    assert "POST /api/ask" in labels
