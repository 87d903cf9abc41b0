"""The kernels of a card, held to the plain way."""

from pathlib import Path

import pytest

from tests.kernels_apart import apart, held


@pytest.mark.long
def test_the_kernels_are_what_plain_operations_are() -> None:
    held(Path(__file__).with_name("kernels_held.py"))


def test_a_compiled_graph_holds_them_as_operators() -> None:
    apart(Path(__file__).with_name("operators_held.py"), {})
