"""What every test finds: seeds, one thread, a throw-away cache, and real data if there is some."""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# Set before any test module is imported, because some packages read these at import.
CACHE = Path(tempfile.mkdtemp(prefix="overt-tests-"))
os.environ["OVERT_CACHE"] = str(CACHE)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")
torch.set_num_threads(1)  # these tensors are too small for two, which would wait for each other

# The same examples each time, and no word on time: the machine is shared.
hypothesis.settings.register_profile("overt", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("overt")


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeds() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # for foreign code that draws from the global stream
    torch.manual_seed(0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # slow even where it is idle
        torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def generator() -> torch.Generator:
    """An explicit stream of random numbers, the same for every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; the test is skipped where there is none."""
    found = os.environ.get("OVERT_DATA")
    if not found:
        pytest.skip("OVERT_DATA is not set: no real data")
    if not Path(found).is_dir():
        pytest.skip(f"OVERT_DATA names {found}, which is not a folder")
    return Path(found)


@pytest.fixture(scope="session")
def needs() -> Callable[[Path, str], Path]:
    """`needs(data_root, "cifar10")` skips the test where that data set is missing."""
    from overt.data import sets

    def ask(root: Path, name: str) -> Path:
        if name not in sets.present(root):
            pytest.skip(f"data set {name} is not under OVERT_DATA")
        return root

    return ask
