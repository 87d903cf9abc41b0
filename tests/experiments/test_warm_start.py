"""Warm start: folders of earlier runs and their weights."""

from pathlib import Path

import pytest
import torch

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.experiments.recipe import RunContext
from overt.experiments.warm_start import (
    WARM_START_FILE,
    finished_siblings,
    load_weights,
    recorded_folders,
    same_settings,
)
from tests import toys


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return RunContext(tmp_path / "mine" / "seed-0", 0, "cpu")


def test_siblings_are_finished_runs_of_other_rows_with_the_same_seed(
    tmp_path: Path, context: RunContext
) -> None:
    for row, seed in (("other", 0), ("later", 1), ("mine", 0)):
        toys.write_run_folder(tmp_path / row / f"seed-{seed}", toys.RECIPES["toy"](), seed)
    toys.write_run_folder(tmp_path / "begun" / "seed-0", toys.RECIPES["toy"](), 0, "running")
    assert [one.folder for one in finished_siblings(context)] == [tmp_path / "other" / "seed-0"]
    alone = RunContext(tmp_path / "mine" / "folder", 0, "cpu")
    assert not list(finished_siblings(alone))


def test_siblings_are_listed_rows_of_a_folder_with_one_run_per_row(tmp_path: Path) -> None:
    context = RunContext(tmp_path / "mine", 0, "cpu")
    for row, seed in (("mine", 0), ("other", 0), ("later", 1), ("unlisted", 0)):
        toys.write_run_folder(tmp_path / row, toys.RECIPES["toy"](), seed)
    assert not list(finished_siblings(context))
    rows = ["mine", "other", "later", "absent"]
    io.write_json(tmp_path / "rows.json", {"rows": rows})
    assert [one.folder for one in finished_siblings(context)] == [tmp_path / "other"]


@pytest.mark.parametrize("wrong", [["other"], {"rows": "other"}, {"rows": ["../other"]}, {}])
def test_a_list_of_rows_with_other_contents_raises(tmp_path: Path, wrong: object) -> None:
    io.write_json(tmp_path / "rows.json", wrong)
    with pytest.raises(CorruptFileError, match=r"rows\.json"):
        list(finished_siblings(RunContext(tmp_path / "mine", 0, "cpu")))


def test_only_the_selected_settings_are_compared() -> None:
    ours, theirs = {"a.x": 1, "b.x": 1}, {"a.x": 1, "b.x": 2}
    assert same_settings(theirs, ours, lambda key: key.startswith("a."))
    assert not same_settings(theirs, ours, lambda key: True)
    assert not same_settings({}, ours, lambda key: key == "a.x")


def test_selected_folders_are_recorded_and_reused(tmp_path: Path, context: RunContext) -> None:
    place = tmp_path / "there"
    place.mkdir()
    first = recorded_folders(context, lambda: {"one": place, "two": None})
    assert first == {"one": place, "two": None}
    assert io.read_json(context.out / WARM_START_FILE) == {"one": str(place), "two": None}
    assert recorded_folders(context, lambda: pytest.fail("it was recorded")) == first
    place.rmdir()
    with pytest.raises(CorruptFileError, match=r"there.*exists"):
        recorded_folders(context, dict)


def test_loading_weights_of_another_network_raises(tmp_path: Path) -> None:
    one, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    with io.atomic_folder(tmp_path / "model") as new:
        io.write_tensors(new / "model.safetensors", dict(one.state_dict()))
    load_weights(other, tmp_path / "model")
    assert torch.equal(one.weight, other.weight)
    for wrong in (torch.nn.Linear(2, 4), torch.nn.Linear(2, 3, bias=False)):
        with pytest.raises(UserError, match="another network"):
            load_weights(wrong, tmp_path / "model")
