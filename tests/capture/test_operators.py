"""The kernels as operators that a compiled graph holds."""

from pathlib import Path

from tests.kernels_apart import apart


def test_a_graph_is_told_what_the_kernels_do() -> None:
    apart(Path(__file__).with_name("operators_held.py"), {})
