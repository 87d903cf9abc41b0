"""Fixtures of runs: toy recipes, small datasets and small runs."""

from tests.experiments.fixtures import (
    asked,
    few,
    finished_run,
    run,
    run_calls,
    toy_table,
    write_run,
)

__all__ = ["asked", "few", "finished_run", "run", "run_calls", "toy_table", "write_run"]
