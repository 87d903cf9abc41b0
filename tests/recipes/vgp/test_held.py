"""Held texts are the data set they were read from, on any device, in memory and on disk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt.errors import BadInput
from overt.recipes.vgp import held
from overt.recipes.vgp.held import HeldLinks, HeldTexts, as_table
from tests.recipes.vgp import small


@pytest.mark.parametrize("rows", [[0], [5, 2, 7], list(range(8))], ids=str)
def test_a_batch_is_the_one_that_is_made_anew(rows: list[int]) -> None:
    ours, theirs = small.texts().batch(rows), small.drawn().batch(rows)
    assert ours.ids == theirs.ids
    for name in ("tokens", "token_mask", "boxes", "region_mask", "labels"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    assert ours.images is not None and theirs.images is not None
    torch.testing.assert_close(ours.images[ours.image_index], theirs.images[theirs.image_index])
    assert ours.target is not None and theirs.target is not None
    torch.testing.assert_close(ours.target.weights, theirs.target.weights)
    assert torch.equal(ours.target.visible, theirs.target.visible)


def test_phrases_are_found_by_the_ids_of_samples() -> None:
    texts, data = small.texts(), small.drawn()
    links = HeldLinks.of(texts)
    for rows in ([3, 0, 6], [1], list(range(8))):
        ours = links([texts.ids[row] for row in rows])
        theirs = data.phrases(rows)
        assert as_table(ours).tolist() == as_table(theirs).tolist()
    assert len(links([]).relation) == 0


def test_what_is_kept_is_read_back_and_made_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))
    made = []

    def make() -> HeldTexts:
        made.append(1)
        return small.texts()

    first, second = (held.kept("pairs", "train", "key", make) for _ in range(2))
    held.kept("pairs", "train", "another key", make)
    assert len(made) == 2
    for one in (first, second):
        assert one.ids == small.texts().ids and one.digest() == small.texts().digest()
        ours, theirs = one.batch([1, 4]), small.texts().batch([1, 4])
        assert ours.images is not None and theirs.images is not None
        assert torch.equal(ours.images, theirs.images) and torch.equal(ours.tokens, theirs.tokens)
        assert ours.geometry is not None and ours.geometry.canvas == (32, 32)


def test_a_damaged_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))
    held.kept("pairs", "train", "key", small.texts)
    place = held.place_of("pairs", "train", "key") / "tensors.npz"
    place.write_bytes(place.read_bytes()[:-40])
    again = held.kept("pairs", "train", "key", small.texts)
    assert len(again) == 8


def test_features_are_those_of_the_picture_a_sample_is_about() -> None:
    texts = replace(small.texts(), picture=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    texts = replace(texts, features=torch.arange(8.0)[:, None, None].expand(8, 10, 3))
    found = texts.batch([5, 0, 7]).features
    assert found is not None and found[:, 0, 0].tolist() == [2, 0, 3]


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="samples 0 to 7"):
        small.texts().batch([8])
    with pytest.raises(BadInput, match="empty"):
        HeldTexts.joined("pairs", "train", "", [])
    with pytest.raises(BadInput, match="no pairs of phrases"):
        HeldLinks.of(replace(small.texts(), links=None))
    plain = small.drawn().batch([0])
    with pytest.raises(BadInput, match="tokens"):
        HeldTexts.joined("pairs", "train", "", [replace(plain, tokens=None, token_mask=None)])
    with pytest.raises(BadInput, match="boxes"):
        HeldTexts.joined("pairs", "train", "", [replace(plain, boxes=None)])
