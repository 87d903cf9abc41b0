"""The warm start of a run with a critic."""

from pathlib import Path

import pytest

from overt import io
from overt.errors import CorruptFileError
from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.experiments.warm_start import WARM_START_FILE
from overt.papers.a2.warm_start import find_warm_start
from overt.papers.catalog import find_recipe
from tests import toys


def make_recipe(*changes: str):
    return settings.apply(find_recipe("a2-scenes"), changes)


def write_sibling_run(root: Path, row: str, *changes: str, seed: int = 0) -> Path:
    place = root / row / f"seed-{seed}"
    toys.write_run_folder(place, make_recipe(*changes), seed)
    return place


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    (tmp_path / "mine" / "seed-0").mkdir(parents=True)
    return RunContext(tmp_path / "mine" / "seed-0", 0, "cpu")


def test_without_a_critic_there_is_no_warm_start(tmp_path: Path, context: RunContext) -> None:
    write_sibling_run(tmp_path, "gate")
    assert find_warm_start(make_recipe(), context) is None
    assert not (context.out / WARM_START_FILE).exists()


def test_a_sibling_that_differs_only_by_the_critic_is_the_warm_start(
    tmp_path: Path, context: RunContext
) -> None:
    write_sibling_run(tmp_path, "other", "align.fuse=max")
    write_sibling_run(tmp_path, "later", seed=1)
    place = write_sibling_run(tmp_path, "gate")
    (place / "model").mkdir()
    found = find_warm_start(make_recipe("critic.epochs=2", "critic.rate=0.1"), context)
    assert found == place / "model"
    assert io.read_json(context.out / WARM_START_FILE) == {"first": str(place / "model")}


def test_without_a_sibling_the_run_trains_its_own_first_stage(
    tmp_path: Path, context: RunContext
) -> None:
    write_sibling_run(tmp_path, "critic", "critic.epochs=1")  # its model is not a first stage
    assert find_warm_start(make_recipe("critic.epochs=2"), context) is None
    write_sibling_run(tmp_path, "gate")  # too late: a resumed run keeps its choice
    assert find_warm_start(make_recipe("critic.epochs=2"), context) is None


def test_a_missing_warm_start_folder_raises_with_its_path(
    tmp_path: Path, context: RunContext
) -> None:
    io.write_json(context.out / WARM_START_FILE, {"first": str(tmp_path / "gone")})
    with pytest.raises(CorruptFileError, match=r"gone.*exists"):
        find_warm_start(make_recipe("critic.epochs=2"), context)
