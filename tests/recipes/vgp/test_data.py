"""What is tuned on, and the tasks afterwards."""

from pathlib import Path

import pytest
import torch

from overt.recipes.vgp import data
from overt.recipes.vgp.recipe import Scenes
from tests.recipes.vgp import small

CPU = torch.device("cpu")
FEW = Scenes(limit=4, size=32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))


def test_portions_of_pairs_join_to_the_whole() -> None:
    source = small.drawn()
    whole, part = data.held_pairs(source), data.held_pairs(source, 3, 6)
    assert part.ids == whole.ids[3:6]
    assert whole.links is not None and part.links is not None
    inside = (whole.links[:, 0] >= 3) & (whole.links[:, 0] < 6)
    expected = whole.links[inside] - torch.tensor([3, 0, 0, 0, 0, 0])
    assert torch.equal(part.links, expected)


def test_splits_have_their_own_scenes_and_the_limit() -> None:
    parts = data.scenes(FEW, CPU)
    ids = [set(one.texts.ids) for one in (parts.train, parts.val, parts.test)]
    assert [len(one) for one in ids] == [4, 4, 4] and not ids[0] & ids[1] & ids[2]
    assert parts.relations == 5
    assert parts.shown is not None and parts.shown().text is not None


def test_expressions_are_judged_with_three_kinds_of_candidates() -> None:
    task = data.expressions(FEW, CPU)
    assert list(task.tests) == ["true", "all", "detected"]
    true, every, detected = task.tests.values()
    assert true.ids == every.ids == detected.ids
    assert torch.equal(true.there | detected.there, every.there)
    assert not (true.there & detected.there).any()
    labels = true.labels[:, None]
    assert true.there.gather(1, labels).all() and not detected.there.gather(1, labels).any()
    assert torch.equal(true.boxes, every.boxes)


def test_questions_have_the_boxes_of_things_and_their_marks() -> None:
    task = data.questions(FEW, CPU)
    batch = task.train.batch(range(8))
    assert batch.tokens is not None and batch.region_mask is not None
    assert (batch.tokens[:, 0] == data.BEGIN).all()
    assert ((batch.tokens == data.END).sum(dim=1) == 1).all()
    assert (batch.region_mask.sum(dim=1) >= 4).all()
    assert task.classes > int(task.train.labels.max()) and len(task.train) == 16
