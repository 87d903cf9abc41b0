"""Entry point of a worker process (`python -m overt.papers.worker`), see `experiments.workers`."""

import sys

from overt.experiments.workers import run_worker
from overt.papers.catalog import build, find_recipe

if __name__ == "__main__":
    sys.exit(run_worker(find_recipe, build))
