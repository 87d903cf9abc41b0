import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import Kind
from overt.data.scenes import making, store
from overt.data.scenes.making import Wanted
from overt.data.scenes.questions import ALL, ANSWERS
from overt.data.scenes.store import (
    Scenes,
    Truth,
    cover,
    default_cache,
    fingerprint,
    prepare,
    vocabulary,
)
from overt.data.vocabulary import PAD, UNKNOWN, Vocabulary
from overt.errors import BadInput
from overt.geometry import PixelGeometry


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def scenes(cache) -> Scenes:
    return Scenes("test", 7, 24, cache=cache)


@pytest.fixture(scope="module")
def batch(scenes):
    return scenes.batch(range(24))


def test_the_cache_may_be_text(scenes, cache):
    assert Scenes("test", 7, 24, cache=str(cache)).folder == scenes.folder


def test_a_batch_has_each_image_once_and_all_its_questions(scenes, batch):
    assert len(scenes) == 24 and len(batch) == 96
    assert batch.images.shape == (24, 3, 64, 64) and batch.images.dtype == torch.uint8
    assert batch.image_of.tolist() == [i for i in range(24) for _ in range(4)]
    assert batch.ids[50] == "scenes-test-7-000012-2" and len(set(batch.ids)) == 96
    assert batch.geometry.canvas == (64, 64) and len(batch.geometry) == 24
    assert (scenes.name, scenes.split) == ("scenes", "test")


def test_a_batch_says_what_the_program_says(scenes, batch):
    row = 0
    for i in range(24):
        scene, questions = scenes.pose(i)
        assert len(scenes.boxes(i)) == len(scenes.masks(i)) == len(scene.things)
        for question in questions:
            assert batch.text.texts[row] == " ".join(question.words)
            assert tuple(t for t in batch.text.tokens(row) if t) == question.words
            known = batch.token_mask[row]
            assert scenes.vocabulary.decode(batch.tokens[row][known].tolist()) == list(
                question.words
            )
            assert (batch.tokens[row][~known] == PAD).all()
            assert ANSWERS[batch.labels[row]] == question.answer
            assert batch.groups[row] == question.family
            content = scenes.content([i])[row % 4][: len(question.words)]
            assert content.tolist() == list(question.content)
            row += 1


@pytest.mark.parametrize("cells", [(8, 8), (4, 16), (7, 7), (10, 3)])
@pytest.mark.parametrize("truth", list(Truth))
def test_targets_agree_with_the_geometry_of_masks(scenes, cache, cells, truth):
    """`PixelGeometry.cover_masks` is another way to the same shares."""
    data = Scenes("test", 7, 24, cache=cache, cells=cells, truth=truth)
    target = data.batch(range(5)).target
    target.check()
    row = 0
    for i in range(5):
        masks = data.masks(i)
        for question in data.pose(i)[1]:
            things = sorted(getattr(question, truth.value))
            union = masks[things].any(dim=0) if things else torch.zeros(64, 64, dtype=torch.bool)
            want = PixelGeometry.identity(1, (64, 64)).cover_masks([union], cells)[0]
            want = want / want.sum().clamp_min(1e-9)
            torch.testing.assert_close(target.weights[row, 0, 0, 0], want, rtol=1e-4, atol=1e-6)
            assert bool(target.rows[row, 0]) == bool(things)
            row += 1


def test_rows_without_evidence_are_zero_and_see_nothing(cache):
    scenes = Scenes("test", 7, 24, families=["exist", "count", "query-size"], cache=cache)
    batch = scenes.batch(range(24))
    localized = [q.localized for i in range(24) for q in scenes.pose(i)[1]]
    assert not all(localized) and any(localized)
    assert batch.target.rows[:, 0].tolist() == localized
    sums = batch.target.weights.sum(dim=-1).flatten()
    torch.testing.assert_close(sums, torch.tensor(localized).float())
    assert batch.target.kind is Kind.PROBABILITY


def test_targets_follow_the_samples_and_know_their_pixels(batch):
    picked = batch.select(torch.tensor([5, 2]))
    torch.testing.assert_close(picked.target.weights[0], batch.target.weights[5])
    assert batch.target.keys.find("image").geometry.cells((8, 8)).shape == (96, 64, 4)


def test_a_batch_is_pure(scenes, batch):
    again = scenes.batch([3, 1, 3])
    assert torch.equal(again.images[0], batch.images[3])
    assert torch.equal(again.tokens[4:8], batch.tokens[4:8])
    again.images.zero_()
    assert torch.equal(scenes.batch([3]).images[0], batch.images[3])


def test_no_such_item(scenes):
    for wrong in (24, -1):
        with pytest.raises(BadInput, match=str(wrong)):
            scenes.batch([wrong])
        with pytest.raises(BadInput):
            scenes.pose(wrong)


def test_every_size_shows_the_same_questions(cache, scenes):
    large = Scenes("test", 7, 3, size=96, cache=cache).batch(range(3))
    small = scenes.batch(range(3))
    assert large.text.texts == small.text.texts and torch.equal(large.labels, small.labels)
    assert large.images.shape[-1] == 96
    assert (large.target.weights - small.target.weights).abs().max() < 0.15


def test_a_family_left_out(cache):
    kept = [family for family in ALL if family != "count"]
    data = Scenes("train", 7, 12, families=kept, cache=cache)
    assert "count" not in data.batch(range(12)).groups
    only = Scenes("test", 7, 6, families=["count"], cache=cache)
    assert set(only.batch(range(6)).groups) == {"count"}


def test_the_digest_is_of_all_that_decides_the_contents(cache, scenes):
    assert scenes.digest() == Scenes("test", 7, 24, cache=cache, cells=(4, 4)).digest()
    base = Wanted("test", 7, 5, 48)
    others = [
        Wanted("val", 7, 5, 48),
        Wanted("test", 8, 5, 48),
        Wanted("test", 7, 6, 48),
        Wanted("test", 7, 5, 50),
        Wanted("test", 7, 5, 48, 3),
        Wanted("test", 7, 5, 48, 4, ("exist",)),
    ]
    assert len({fingerprint(one) for one in [base, base, *others]}) == 7


def test_the_digest_sees_a_change_of_the_program(monkeypatch):
    wanted = Wanted("test", 7, 5, 48)
    before = fingerprint(wanted)
    monkeypatch.setattr("overt.data.scenes.render.DARK", 0.5)
    assert fingerprint(wanted) != before


def test_the_cache_is_made_once(tmp_path, monkeypatch):
    said = []
    first = Scenes("val", 1, 5, size=32, cache=tmp_path, on_progress=lambda *a: said.append(a))
    assert said[-1] == (5, 5)
    monkeypatch.setattr(store, "make_files", None)
    again = Scenes("val", 1, 5, size=32, cache=tmp_path)
    assert again.folder == first.folder


def spoil_bytes(folder):
    path = folder / "images.npy"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def spoil_length(folder):
    path = folder / "tokens.npy"
    path.write_bytes(path.read_bytes()[:-3])


def spoil_by_loss(folder):
    (folder / "answers.npy").unlink()


def spoil_manifest(folder):
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize("spoil", [spoil_bytes, spoil_length, spoil_by_loss, spoil_manifest])
def test_a_damaged_cache_is_made_again_and_it_is_said(tmp_path, spoil):
    whole = Scenes("val", 1, 4, size=32, cache=tmp_path)
    before = whole.batch(range(4))
    spoil(whole.folder)
    with pytest.warns(UserWarning, match="made again"):
        again = Scenes("val", 1, 4, size=32, cache=tmp_path)
    after = again.batch(range(4))
    assert torch.equal(before.images, after.images) and torch.equal(before.tokens, after.tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scenes("val", 1, 4, size=32, cache=tmp_path)


def test_an_interrupted_build_leaves_nothing_that_is_taken_for_whole(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scenes("val", 1, 4, size=32, cache=tmp_path, on_progress=stop)
    assert not [p for p in (tmp_path / "scenes").iterdir() if p.is_dir()]
    assert len(Scenes("val", 1, 4, size=32, cache=tmp_path)) == 4


def test_processes_that_want_the_same_wait_for_one_another(tmp_path):
    code = (
        "import sys; from pathlib import Path; from overt.data.scenes import store\n"
        "from overt.data.scenes.making import Wanted, make_files\n"
        "def say(*a):\n    print('made', flush=True); return make_files(*a)\n"
        "store.make_files = say\n"
        "print(store.prepare(Wanted('val', 1, 200, 32), Path(sys.argv[1])))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [one.communicate()[0].decode().split() for one in started]
    assert [one.returncode for one in started] == [0, 0]
    assert sorted(len(lines) for lines in said) == [1, 2]
    assert said[0][-1] == said[1][-1]


def test_a_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="OVERT_CACHE"):
        prepare(Wanted("val", 1, 2, 32), tmp_path / "file")


def test_where_scenes_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    assert Scenes("val", 1, 2, size=32).folder.parent == tmp_path / "scenes"
    monkeypatch.delenv("OVERT_CACHE")
    assert default_cache() == Path.home() / ".cache" / "overt"


@pytest.mark.parametrize(
    "wrong",
    [
        {"families": ["riddle"]},
        {"families": []},
        {"cells": (0, 4)},
        {"cells": (65, 4)},
        {"size": 9},
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path, wrong):
    with pytest.raises(BadInput):
        Scenes("val", 1, 2, cache=tmp_path, **wrong)


def test_the_vocabulary_is_closed_and_never_changes(scenes, batch):
    assert scenes.vocabulary == vocabulary() == Vocabulary.build([vocabulary().words])
    assert not (batch.tokens == UNKNOWN).any()


def test_cover_of_one_pixel():
    owners = np.zeros((1, 4, 4), np.uint8)
    owners[0, 3, 0] = 2
    shares = cover(owners, (2, 2))
    assert shares.shape == (1, 8, 4)
    assert shares[0, 1].tolist() == [0, 0, 0.25, 0] and shares.sum() == 0.25


def test_few_scenes_need_no_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "_started", None)
    assert len(Scenes("val", 1, 3, size=32, cache=tmp_path, workers=4)) == 3
