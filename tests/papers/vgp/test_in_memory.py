"""Texts in memory equal their source dataset, on any device and when read from disk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt.errors import UserError
from overt.papers.vgp import in_memory
from overt.papers.vgp.config import VgpScenes
from overt.papers.vgp.data import load_scenes
from overt.papers.vgp.in_memory import PhraseLinksInMemory, TextsInMemory, link_table
from tests.data.cache_checks import content, rng_state
from tests.papers.vgp import small


@pytest.mark.parametrize("rows", [[0], [5, 2, 7], list(range(8))], ids=str)
def test_a_batch_equals_that_of_the_source_dataset(rows: list[int]) -> None:
    ours, theirs = small.texts().batch(rows), small.drawn().batch(rows)
    assert ours.ids == theirs.ids
    for name in ("tokens", "token_mask", "boxes", "region_mask", "labels"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    assert ours.images is not None and theirs.images is not None
    torch.testing.assert_close(ours.images[ours.image_index], theirs.images[theirs.image_index])
    assert ours.target is not None and theirs.target is not None
    torch.testing.assert_close(ours.target.weights, theirs.target.weights)
    assert torch.equal(ours.target.visible, theirs.target.visible)


def test_phrase_links_are_found_by_sample_id() -> None:
    texts, data = small.texts(), small.drawn()
    links = PhraseLinksInMemory.of(texts)
    for rows in ([3, 0, 6], [1], list(range(8))):
        ours = links([texts.ids[row] for row in rows])
        theirs = data.phrases(rows)
        assert link_table(ours).tolist() == link_table(theirs).tolist()
    assert len(links([]).relation) == 0


def test_cached_texts_are_built_once_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))
    builds = []

    def build() -> TextsInMemory:
        builds.append(1)
        return small.texts()

    first, second = (in_memory.cached_texts("pairs", "train", "key", build) for _ in range(2))
    in_memory.cached_texts("pairs", "train", "another key", build)
    assert len(builds) == 2
    for one in (first, second):
        assert one.ids == small.texts().ids and one.digest() == small.texts().digest()
        ours, theirs = one.batch([1, 4]), small.texts().batch([1, 4])
        assert ours.images is not None and theirs.images is not None
        assert torch.equal(ours.images, theirs.images) and torch.equal(ours.tokens, theirs.tokens)
        assert ours.geometry is not None and ours.geometry.canvas == (32, 32)


def test_built_texts_equal_those_read_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where `make` draws random numbers, and its images are in another order in memory."""
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))

    def make() -> TextsInMemory:
        made = small.texts()
        assert made.images is not None
        torch.manual_seed(7)
        images = made.images.contiguous(memory_format=torch.channels_last)
        return replace(made, images=images, features=torch.rand(8, 3, 10).mT)

    found = []
    for _ in range(2):
        torch.manual_seed(0)
        texts = in_memory.cached_texts("pairs", "train", "key", make)
        found.append((content(texts), content(texts.batch([2, 5])), rng_state()))
    assert found[0] == found[1]


@pytest.mark.long
def test_texts_of_scenes_do_not_depend_on_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))
    data = VgpScenes(limit=3, size=32)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        parts = load_scenes(data, torch.device("cpu"))
        assert parts.expressions is not None and parts.questions is not None
        tasks = [parts.expressions(), parts.questions()]
        texts = [parts.train.texts, parts.test.texts, *(one.train for one in tasks)]
        found.append((content(texts), content(parts.train.links), rng_state()))
    assert found[0] == found[1]


def test_a_corrupt_cache_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))
    in_memory.cached_texts("pairs", "train", "key", small.texts)
    place = in_memory.cache_folder("pairs", "train", "key") / "tensors.npz"
    place.write_bytes(place.read_bytes()[:-40])
    again = in_memory.cached_texts("pairs", "train", "key", small.texts)
    assert len(again) == 8


def test_features_are_those_of_the_image_of_a_sample() -> None:
    texts = replace(small.texts(), picture=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    texts = replace(texts, features=torch.arange(8.0)[:, None, None].expand(8, 10, 3))
    found = texts.batch([5, 0, 7]).features
    assert found is not None and found[:, 0, 0].tolist() == [2, 0, 3]


def test_missing_rows_and_fields_are_rejected() -> None:
    with pytest.raises(UserError, match="8 samples"):
        small.texts().batch([8])
    with pytest.raises(UserError, match="empty"):
        TextsInMemory.joined("pairs", "train", "", [])
    with pytest.raises(UserError, match="pairs of phrases"):
        PhraseLinksInMemory.of(replace(small.texts(), links=None))
    plain = small.drawn().batch([0])
    with pytest.raises(UserError, match="tokens"):
        TextsInMemory.joined("pairs", "train", "", [replace(plain, tokens=None, token_mask=None)])
    with pytest.raises(UserError, match="boxes"):
        TextsInMemory.joined("pairs", "train", "", [replace(plain, boxes=None)])
