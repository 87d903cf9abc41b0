"""The kernels of a card, held to the plain way."""

from pathlib import Path

import pytest

from tests.kernels_apart import held


@pytest.mark.long
def test_the_kernels_are_what_plain_operations_are() -> None:
    held(Path(__file__).with_name("kernels_held.py"))
