"""Models, runs, maps and data by name, opened so that a scorecard can stream them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import files
from overt.data import sets
from overt.errors import BadInput, Failed
from overt.measure.scorecards.catalogue import catalogue
from overt.recipes import measuring
from overt.recipes.measuring import Opened, Wish
from tests.recipes import foreign, tiny

FEW = ("spearman", "mass_inside", "deletion_area@mask", "deletion_area@mean", "entropy", "accuracy")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three photos with a bright square, and maps of people who looked at it."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "maps").mkdir()
    for at in range(3):
        foreign.photo(folder / f"p{at}.png", (48, 64 + at))
        heat = np.zeros((48, 64), dtype=np.uint8)
        heat[20:40, 40:60] = 255
        Image.fromarray(heat).save(folder / "maps" / f"p{at}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "soft"
    tiny.run(tiny.recipe("scenes-soft", "data.train=4", "data.val=4", "data.test=6"), out)
    return out


def test_a_run_is_scored_on_its_own_test_set(run: Path, tmp_path: Path) -> None:
    card = measuring.score(Wish(str(run), measures=FEW, limit=4), tmp_path / "card")
    assert card.name == "scenes-soft, seed 0" and card.data["name"] == "scenes"
    assert len(card) == 16 and len(set(card.clusters)) == 4  # four questions a scene
    assert set(card.keys) == set(FEW)
    results = files.read_json(run / "results.json")
    samples = files.read_arrays(run / "samples.npz")
    assert list(samples["id"][:16]) == list(card.ids)
    np.testing.assert_allclose(samples["accuracy"][:16], card.values("accuracy"))
    np.testing.assert_allclose(samples["entropy"][:16], card.values("entropy"), atol=1e-4)
    inside = samples["mass_inside"][:16]
    np.testing.assert_allclose(inside, card.values("mass_inside"), atol=1e-4)
    assert results["status"] == "done"


def test_a_page_and_files_are_written_and_two_runs_compared(run: Path, tmp_path: Path) -> None:
    wish = Wish(str(run), measures=("entropy", "accuracy"), limit=2)
    card, other = measuring.run(wish, str(run), tmp_path, command=["overt", "measure"])
    assert other is not None and {one.mean for one in card.compare(other)} == {0.0}
    wanted = {"scorecard.json", "scorecard.csv", "samples.npz", "clock.json", "scorecard.html"}
    assert wanted | {"compared.json", "other"} <= {path.name for path in tmp_path.iterdir()}
    header, lines = measuring.differences(card.compare(other))
    assert len(header) == len(lines[0]) and lines[0][0] == "entropy"


def test_a_vision_transformer_on_photos_of_ones_own(shelf, photos: Path, tmp_path: Path) -> None:
    wish = Wish(str(shelf["vit"]), str(photos), FEW)
    card = measuring.score(wish, tmp_path / "card")
    assert card.name == "vit" and card.subject == "attention" and "gradient" in card.maps
    assert {"spearman", "deletion_area@mask", "deletion_area@mean"} <= set(card.keys)
    assert "accuracy" in card.skipped


def test_a_bare_encoder_has_maps_and_no_answer(shelf, tmp_path: Path) -> None:
    from tests.measure.scorecards.toys import Texts

    opened = measuring.opened_model(str(shelf["bert"]), None, "cpu", lambda line: None)
    assert opened.model is None and opened.over == "text" and opened.reader is not None
    assert opened.looks is not None
    (look,) = opened.looks.values()
    assert look(Texts(3).batch(range(3))).values.shape[:4] == (3, 1, 1, 1)


def test_a_language_model_answers_with_its_next_word(shelf) -> None:
    from tests.measure.scorecards.toys import Texts

    opened = measuring.opened_model(str(shelf["gpt2"]), None, "cpu", lambda line: None)
    batch = Texts(4).batch(range(4))
    with torch.no_grad():
        found = opened.model(batch).prediction
        assert batch.tokens is not None and batch.token_mask is not None
        for row in range(4):
            words = batch.tokens[row, batch.token_mask[row]][None]
            wanted = opened.model.model(input_ids=words).logits[0, -1]
            torch.testing.assert_close(found[row], wanted, atol=1e-4, rtol=1e-4)


def test_a_network_without_attention_has_a_prediction_and_no_map() -> None:
    net = torch.nn.Linear(2, 2)
    model = measuring.plain_network(net, lambda one, batch: one(torch.ones(1, 2)))
    assert model(None).attention == () and not model.training


def test_maps_stand_alone_or_beside_a_model(shelf, photos: Path, tmp_path: Path) -> None:
    maps = tmp_path / "theirs.npz"
    files.write_arrays(maps, {f"p{at}": np.ones((4, 4)) for at in range(3)})
    alone = measuring.score(Wish(str(maps), str(photos), ("sim",)), None)
    assert alone.name == alone.subject == "theirs"
    beside = measuring.score(Wish(str(shelf["vit"]), str(photos), ("sim",), maps), None)
    assert beside.maps[:2] == ("attention", "outside")
    own = measuring.score(Wish(str(photos / "maps"), str(photos), ("sim",)), None)
    assert own.intervals["maps", "sim"].mean == pytest.approx(1, abs=1e-4)


def test_photos_without_maps_have_no_truth(photos: Path, tmp_path: Path) -> None:
    foreign.photo(tmp_path / "alone.png")
    data = measuring.photos_in(tmp_path, (32, 32))
    assert data.batch([0]).target is None and len(data) == 1 and data.digest()
    told = measuring.photos_in(photos, (32, 32)).batch([0, 1, 2])
    assert told.target is not None and told.labels is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no photos"):
        measuring.photos_in(tmp_path / "empty", (32, 32))


def test_small_pictures_are_brought_to_the_size_of_the_model() -> None:
    from tests.measure.scorecards.toys import Pictures

    data = measuring.Enlarged(Pictures(3), (16, 16))
    batch = data.batch(range(3))
    assert batch.images is not None and batch.images.shape[-2:] == (16, 16)
    assert batch.geometry is not None and batch.geometry.canvas == (16, 16)
    assert data.digest() != measuring.Enlarged(Pictures(3), (8, 8)).digest() and len(data) == 3
    same = measuring.Enlarged(Pictures(3), (8, 8)).batch(range(3))
    assert torch.equal(same.images, Pictures(3).batch(range(3)).images)


@pytest.mark.parametrize("name", ["osie", "yelp_hat"])
def test_sets_of_people_are_opened_by_name(name: str, data_root: Path, needs) -> None:
    root = needs(data_root, name)
    data = measuring.named_data(name, Opened("x", size=(64, 64)), root)
    batch = data.batch([0])
    assert batch.target is not None
    if batch.images is not None:
        assert batch.images.shape[-2:] == (64, 64)


def test_every_data_set_is_opened_or_refused_in_a_sentence(tmp_path: Path) -> None:
    for one in sets.SETS:
        if one.name in ("scenes", "easyvqa"):
            continue
        with pytest.raises(BadInput, match=r"\.$"):
            measuring.named_data(one.name, Opened("x"), tmp_path)


def test_the_list_says_everything_of_every_measure() -> None:
    lines = measuring.listing()
    assert len(lines) == len(catalogue()) and all(len(line) == 6 for line in lines)
    first = lines[0]
    assert first[:4] == ["spearman", "higher", "-1 to 1", "correlation"] and first[4] == "truth"


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Wish("nowhere"), "'nowhere' is not a folder or a file"),
        (Wish("hf:some/model"), "name a data set behind the model"),
        (Wish("a\0b", "osie"), "NUL character"),
    ],
)
def test_what_is_wrong_at_first_sight_is_said_first(wish: Wish, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        measuring.check(wish, tmp_path)


def test_what_does_not_go_together_is_one_sentence_about_both() -> None:
    from tests.measure.scorecards.toys import Pictures, Texts

    with pytest.raises(BadInput, match="x looks at pictures, and texts has none"):
        measuring._goes_with(Opened("x", over="image"), Texts(2))
    measuring._goes_with(Opened("x", over="image"), Pictures(2))
    told = "x cannot be measured on y: no such key"
    with pytest.raises(BadInput, match=told), measuring._fitting("x", "y"):
        raise ValueError("no such key.\nmore")
    with pytest.raises(Failed, match="x could not be run on y"), measuring._fitting("x", "y"):
        raise IndexError("index out of range")


def test_a_run_is_not_written_over(run: Path) -> None:
    with pytest.raises(BadInput, match="holds a run"):
        measuring.check(Wish("x", "y"), run)
    with pytest.raises(BadInput, match="only a run has a test set"):
        measuring.opened_data("test", Opened("x"), None)


def test_a_run_without_a_model_is_refused(tmp_path: Path, run: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    with pytest.raises(BadInput, match="no finished run with a model"):
        measuring.score(Wish(str(copy)), None)


def test_the_end_of_a_path_is_the_name() -> None:
    assert measuring._short("/x/minilm/model/") == "minilm" and measuring._short("hf:a/b") == "b"
    assert replace(Wish("a"), model="b").model == "b"
