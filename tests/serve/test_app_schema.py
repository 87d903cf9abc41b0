"""What the server says of itself holds: questions made from its own schema never break it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from overt.serve.app import make
from overt.serve.shelf import Shelf, offer

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_no_question_of_the_schema_breaks_it(demo: Path, wrong: bool) -> None:
    app = make(Shelf(offer([str(demo)])), ["*"])
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    mode = schemathesis.GenerationMode.NEGATIVE if wrong else schemathesis.GenerationMode.POSITIVE
    asked = []
    for found in schema.get_all_operations():
        operation = found.ok()
        if wrong and not (operation.body or operation.query):
            continue  # what takes nothing can be given nothing wrong
        asked.append(operation.label)

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
                told = answer.json()
                assert set(told) == {"error"} and "\n" not in told["error"]
            case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

        one()
    assert "POST /api/ask" in asked
