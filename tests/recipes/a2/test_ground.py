"""What a run with a critic begins with."""

from pathlib import Path

import pytest
import torch

from overt import files
from overt.errors import Damaged
from overt.recipes import find, settings
from overt.recipes.a2.ground import GROUND, ground_of, take
from overt.recipes.recipe import Context
from tests import toys


def made(*changes: str):
    return settings.apply(find("a2-scenes"), changes)


def beside(root: Path, row: str, *changes: str, seed: int = 0) -> Path:
    place = root / row / f"seed-{seed}"
    toys.leave(place, made(*changes), seed)
    return place


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "mine" / "seed-0").mkdir(parents=True)
    return Context(tmp_path / "mine" / "seed-0", 0, "cpu")


def test_without_a_critic_nothing_is_looked_for(tmp_path: Path, context: Context) -> None:
    beside(tmp_path, "gate")
    assert ground_of(made(), context) is None
    assert not (context.out / GROUND).exists()


def test_a_sibling_that_differs_by_the_critic_alone_is_begun_with(
    tmp_path: Path, context: Context
) -> None:
    beside(tmp_path, "other", "align.fuse=max")
    beside(tmp_path, "later", seed=1)
    place = beside(tmp_path, "gate")
    (place / "model").mkdir()
    found = ground_of(made("critic.epochs=2", "critic.rate=0.1"), context)
    assert found == place / "model"
    assert files.read_json(context.out / GROUND) == {"first": str(place / "model")}


def test_without_one_the_run_trains_its_own_and_keeps_to_it(
    tmp_path: Path, context: Context
) -> None:
    beside(tmp_path, "critic", "critic.epochs=1")  # its model is no first stage
    assert ground_of(made("critic.epochs=2"), context) is None
    beside(tmp_path, "gate")  # comes too late: a run that goes on stands where it stood
    assert ground_of(made("critic.epochs=2"), context) is None


def test_a_ground_that_is_gone_is_said(tmp_path: Path, context: Context) -> None:
    files.write_json(context.out / GROUND, {"first": str(tmp_path / "gone")})
    with pytest.raises(Damaged, match="which is gone"):
        ground_of(made("critic.epochs=2"), context)


def test_weights_are_taken_over(tmp_path: Path) -> None:
    one, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    with files.writing(tmp_path / "model") as new:
        files.write_tensors(new / "model.safetensors", dict(one.state_dict()))
    take(other, tmp_path / "model")
    assert torch.equal(one.weight, other.weight)
