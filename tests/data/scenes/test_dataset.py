import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.attention import Kind
from overt.data.scenes import dataset, generate
from overt.data.scenes.dataset import (
    Scenes,
    TruthKind,
    cell_coverage,
    default_cache,
    prepare_scenes,
    scenes_digest,
    vocabulary,
)
from overt.data.scenes.generate import SceneSpec
from overt.data.scenes.questions import ALL_FAMILIES, ANSWERS
from overt.data.vocabulary import PAD, UNKNOWN, Vocabulary
from overt.errors import UserError
from overt.geometry import PixelGeometry
from tests.data.cache_checks import content, rng_state


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def scenes(cache) -> Scenes:
    return Scenes("test", 7, 24, cache=cache)


def test_generated_scenes_equal_those_read_to_the_last_bit(tmp_path):
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        data = Scenes("train", 3, 6, cache=tmp_path)
        found.append((content(data.batch([4, 0])), data.digest(), rng_state()))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def batch(scenes):
    return scenes.batch(range(24))


def test_cache_path_may_be_a_string(scenes, cache):
    assert Scenes("test", 7, 24, cache=str(cache)).folder == scenes.folder


def test_batches_have_each_image_once_with_its_questions(scenes, batch):
    assert len(scenes) == 24 and len(batch) == 96
    assert batch.images.shape == (24, 3, 64, 64) and batch.images.dtype == torch.uint8
    assert batch.image_of.tolist() == [i for i in range(24) for _ in range(4)]
    assert batch.ids[50] == "scenes-test-7-000012-2" and len(set(batch.ids)) == 96
    assert batch.geometry.canvas == (64, 64) and len(batch.geometry) == 24
    assert (scenes.name, scenes.split) == ("scenes", "test")


def test_batches_match_the_generated_questions(scenes, batch):
    row = 0
    for i in range(24):
        scene, questions = scenes.scene_and_questions(i)
        assert len(scenes.boxes(i)) == len(scenes.masks(i)) == len(scene.things)
        for question in questions:
            assert batch.text.texts[row] == " ".join(question.words)
            assert tuple(t for t in batch.text.tokens(row) if t) == question.words
            present = batch.token_mask[row]
            assert scenes.vocabulary.decode(batch.tokens[row][present].tolist()) == list(
                question.words
            )
            assert (batch.tokens[row][~present] == PAD).all()
            assert ANSWERS[batch.labels[row]] == question.answer
            assert batch.groups[row] == question.family
            content = scenes.content([i])[row % 4][: len(question.words)]
            assert content.tolist() == list(question.content)
            row += 1


@pytest.mark.parametrize("cells", [(8, 8), (4, 16), (7, 7), (10, 3)])
@pytest.mark.parametrize("truth", list(TruthKind))
def test_targets_agree_with_cover_masks(scenes, cache, cells, truth):
    """`PixelGeometry.cover_masks` computes the same shares independently."""
    data = Scenes("test", 7, 24, cache=cache, cells=cells, truth=truth)
    target = data.batch(range(5)).target
    target.check()
    row = 0
    for i in range(5):
        masks = data.masks(i)
        for question in data.scene_and_questions(i)[1]:
            things = sorted(getattr(question, truth.value))
            union = masks[things].any(dim=0) if things else torch.zeros(64, 64, dtype=torch.bool)
            want = PixelGeometry.identity(1, (64, 64)).cover_masks([union], cells)[0]
            torch.testing.assert_close(target.coverage[row, 0], want, rtol=1e-4, atol=1e-6)
            want = want / want.sum().clamp_min(1e-9)
            torch.testing.assert_close(target.weights[row, 0, 0, 0], want, rtol=1e-4, atol=1e-6)
            assert bool(target.rows[row, 0]) == bool(things)
            row += 1


def test_rows_without_evidence_are_zero_and_invisible(cache):
    scenes = Scenes("test", 7, 24, families=["exist", "count", "query-size"], cache=cache)
    batch = scenes.batch(range(24))
    localized = [q.localized for i in range(24) for q in scenes.scene_and_questions(i)[1]]
    assert not all(localized) and any(localized)
    assert batch.target.rows[:, 0].tolist() == localized
    sums = batch.target.weights.sum(dim=-1).flatten()
    torch.testing.assert_close(sums, torch.tensor(localized).float())
    assert batch.target.kind is Kind.PROBABILITY


def test_selected_targets_keep_their_geometry(batch):
    picked = batch.select(torch.tensor([5, 2]))
    torch.testing.assert_close(picked.target.weights[0], batch.target.weights[5])
    assert batch.target.keys.find("image").geometry.cells((8, 8)).shape == (96, 64, 4)


def test_batches_are_deterministic_copies(scenes, batch):
    again = scenes.batch([3, 1, 3])
    assert torch.equal(again.images[0], batch.images[3])
    assert torch.equal(again.tokens[4:8], batch.tokens[4:8])
    again.images.zero_()
    assert torch.equal(scenes.batch([3]).images[0], batch.images[3])


def test_out_of_range_index_raises(scenes):
    for wrong in (24, -1):
        with pytest.raises(UserError, match=str(wrong)):
            scenes.batch([wrong])
        with pytest.raises(UserError):
            scenes.scene_and_questions(wrong)


def test_image_size_does_not_change_the_questions(cache, scenes):
    large = Scenes("test", 7, 3, size=96, cache=cache).batch(range(3))
    small = scenes.batch(range(3))
    assert large.text.texts == small.text.texts and torch.equal(large.labels, small.labels)
    assert large.images.shape[-1] == 96
    assert (large.target.weights - small.target.weights).abs().max() < 0.15


def test_family_can_be_left_out(cache):
    kept = [family for family in ALL_FAMILIES if family != "count"]
    data = Scenes("train", 7, 12, families=kept, cache=cache)
    assert "count" not in data.batch(range(12)).groups
    only = Scenes("test", 7, 6, families=["count"], cache=cache)
    assert set(only.batch(range(6)).groups) == {"count"}


def test_digest_depends_on_every_field_of_the_spec(cache, scenes):
    assert scenes.digest() == Scenes("test", 7, 24, cache=cache, cells=(4, 4)).digest()
    base = SceneSpec("test", 7, 5, 48)
    others = [
        SceneSpec("val", 7, 5, 48),
        SceneSpec("test", 8, 5, 48),
        SceneSpec("test", 7, 6, 48),
        SceneSpec("test", 7, 5, 50),
        SceneSpec("test", 7, 5, 48, 3),
        SceneSpec("test", 7, 5, 48, 4, ("exist",)),
    ]
    assert len({scenes_digest(one) for one in [base, base, *others]}) == 7


def test_digest_depends_on_the_generator_constants(monkeypatch):
    spec = SceneSpec("test", 7, 5, 48)
    before = scenes_digest(spec)
    monkeypatch.setattr("overt.data.scenes.render.DARK", 0.5)
    assert scenes_digest(spec) != before


def test_cache_is_generated_once(tmp_path, monkeypatch):
    progress = []
    first = Scenes("val", 1, 5, size=32, cache=tmp_path, on_progress=lambda *a: progress.append(a))
    assert progress[-1] == (5, 5)
    monkeypatch.setattr(dataset, "write_arrays", None)
    again = Scenes("val", 1, 5, size=32, cache=tmp_path)
    assert again.folder == first.folder


def change_byte(folder):
    path = folder / "images.npy"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def truncate_file(folder):
    path = folder / "tokens.npy"
    path.write_bytes(path.read_bytes()[:-3])


def delete_file(folder):
    (folder / "answers.npy").unlink()


def corrupt_manifest(folder):
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize("corrupt", [change_byte, truncate_file, delete_file, corrupt_manifest])
def test_corrupt_cache_is_regenerated_with_a_warning(tmp_path, corrupt):
    original = Scenes("val", 1, 4, size=32, cache=tmp_path)
    before = original.batch(range(4))
    corrupt(original.folder)
    with pytest.warns(UserWarning, match="generated again"):
        again = Scenes("val", 1, 4, size=32, cache=tmp_path)
    after = again.batch(range(4))
    assert torch.equal(before.images, after.images) and torch.equal(before.tokens, after.tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scenes("val", 1, 4, size=32, cache=tmp_path)


def test_interrupted_build_leaves_no_cache_folder(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scenes("val", 1, 4, size=32, cache=tmp_path, on_progress=stop)
    assert not [p for p in (tmp_path / "scenes").iterdir() if p.is_dir()]
    assert len(Scenes("val", 1, 4, size=32, cache=tmp_path)) == 4


@pytest.mark.long
def test_processes_with_the_same_spec_generate_it_once(tmp_path):
    code = (
        "import sys; from pathlib import Path; from overt.data.scenes import dataset\n"
        "from overt.data.scenes.generate import SceneSpec, write_arrays\n"
        "def say(*a):\n    print('made', flush=True); return write_arrays(*a)\n"
        "dataset.write_arrays = say\n"
        "print(dataset.prepare_scenes(SceneSpec('val', 1, 200, 32), Path(sys.argv[1])))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [one.communicate()[0].decode().split() for one in started]
    assert [one.returncode for one in started] == [0, 0]
    assert sorted(len(lines) for lines in outputs) == [1, 2]
    assert outputs[0][-1] == outputs[1][-1]


def test_unwritable_cache_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="OVERT_CACHE"):
        prepare_scenes(SceneSpec("val", 1, 2, 32), tmp_path / "file")


def test_default_cache_is_from_the_environment_or_the_home_folder(monkeypatch, tmp_path):
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
def test_invalid_options_raise(tmp_path, wrong):
    with pytest.raises(UserError):
        Scenes("val", 1, 2, cache=tmp_path, **wrong)


def test_vocabulary_contains_every_word(scenes, batch):
    assert scenes.vocabulary == vocabulary() == Vocabulary.build([vocabulary().words])
    assert not (batch.tokens == UNKNOWN).any()


def test_cell_coverage_of_one_pixel():
    owners = np.zeros((1, 4, 4), np.uint8)
    owners[0, 3, 0] = 2
    shares = cell_coverage(owners, (2, 2))
    assert shares.shape == (1, 8, 4)
    assert shares[0, 1].tolist() == [0, 0, 0.25, 0] and shares.sum() == 0.25


def test_few_scenes_need_no_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "_run_workers", None)
    assert len(Scenes("val", 1, 3, size=32, cache=tmp_path, workers=4)) == 3
