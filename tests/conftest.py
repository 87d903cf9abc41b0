"""Common fixtures: seeds, one thread, a temporary cache and optional real data."""

import functools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

# Set before any test module is imported, because some packages read these at import.
CACHE = Path(tempfile.mkdtemp(prefix="overt-tests-"))
os.environ["OVERT_CACHE"] = str(CACHE)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")
torch.set_num_threads(1)  # the tensors are too small for several threads

# Deterministic examples without a deadline, because the machine is shared.
hypothesis.settings.register_profile("overt", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("overt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none, or newer versions than the installed."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        for mark in item.iter_markers("newer"):
            if not installed(mark.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]}"))


@functools.cache
def installed(requirement: str) -> bool:
    """Return whether the installed version of a package satisfies a requirement."""
    wanted = Requirement(requirement)
    return wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)


LACKING = re.compile(
    r"module transformers has no attribute|No module named 'transformers\."
    "|has no attribute 'set_attn_implementation'"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """With transformers 4, skip tests of models and processors that only version 5 has."""
    try:
        return (yield)
    except (AttributeError, ModuleNotFoundError) as error:
        if installed("transformers>=5") or not LACKING.search(str(error)):
            raise
        pytest.skip(f"needs transformers>=5: {error}")


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeds() -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # for third-party code with the global generator
    torch.manual_seed(0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    if (
        torch.are_deterministic_algorithms_enabled() != deterministic
    ):  # a slow call even without a change
        torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def generator() -> torch.Generator:
    """Return a seeded generator, the same for every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of real datasets, or skip the test."""
    found = os.environ.get("OVERT_DATA")
    if not found:
        pytest.skip("OVERT_DATA is not set: no real data")
    if not Path(found).is_dir():
        pytest.skip(f"OVERT_DATA names {found}, which is not a folder")
    return Path(found)


@pytest.fixture(scope="session")
def needs() -> Callable[[Path, str], Path]:
    """Return `needs(data_root, "cifar10")`, which skips the test if that dataset is missing."""
    from overt.data import catalog

    def check(root: Path, name: str) -> Path:
        if name not in catalog.available_datasets(root):
            pytest.skip(f"data set {name} is not under OVERT_DATA")
        return root

    return check
