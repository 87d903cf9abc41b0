"""Fixtures of runs: toys, tiny datasets and tiny runs."""

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
