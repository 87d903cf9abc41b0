"""`overt measure`: scorecards of models, runs, maps and datasets by name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt import io
from overt.data import catalog
from overt.errors import RunError, UserError
from overt.inspect import measure
from overt.inspect.measure import MeasuredModel, MeasureRequest
from overt.metrics.scorecard.catalog import available_metrics
from tests.experiments import foreign, tiny

METRICS = (
    "spearman",
    "mass_inside",
    "deletion_area@mask",
    "deletion_area@mean",
    "entropy",
    "accuracy",
)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three photos with a bright square, and human attention maps of it."""
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


@pytest.mark.long
def test_a_run_is_evaluated_on_its_own_test_set(run: Path, tmp_path: Path) -> None:
    scorecard = measure.compute_scorecard(
        MeasureRequest(str(run), measures=METRICS, limit=16), tmp_path / "card"
    )
    assert scorecard.name == "scenes-soft, seed 0" and scorecard.data["name"] == "scenes"
    assert len(scorecard) == 16 and len(set(scorecard.clusters)) == 4  # four questions per scene
    assert set(scorecard.keys) == set(METRICS)
    results = io.read_json(run / "results.json")
    samples = io.read_arrays(run / "samples.npz")
    assert list(samples["id"][:16]) == list(scorecard.ids)
    np.testing.assert_allclose(samples["accuracy"][:16], scorecard.values("accuracy"))
    np.testing.assert_allclose(samples["entropy"][:16], scorecard.values("entropy"), atol=1e-4)
    inside = samples["mass_inside"][:16]
    np.testing.assert_allclose(inside, scorecard.values("mass_inside"), atol=1e-4)
    assert results["status"] == "done"


class Questions:
    """Images with 1, 2, 3 ... questions."""

    def __len__(self) -> int:
        return 4

    def batch(self, indices: Sequence[int]) -> range:
        return range(sum(index + 1 for index in indices))


@pytest.mark.parametrize(("samples", "items"), [(1, 1), (2, 2), (3, 2), (6, 3), (99, 4)])
def test_a_limit_counts_samples_and_keeps_items_whole(samples: int, items: int) -> None:
    assert measure.count_items(Questions(), samples) == items


@pytest.mark.long
def test_report_files_are_written_and_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    request = MeasureRequest(str(run), measures=("entropy", "accuracy"), limit=8)
    scorecard, other = measure.run_measure(
        request, str(run), tmp_path, command=["overt", "measure"]
    )
    assert other is not None and {one.mean for one in scorecard.compare(other)} == {0.0}
    wanted = {"scorecard.json", "scorecard.csv", "samples.npz", "clock.json", "scorecard.html"}
    assert wanted | {"compared.json", "other"} <= {path.name for path in tmp_path.iterdir()}
    header, lines = measure.difference_table(scorecard.compare(other))
    assert len(header) == len(lines[0]) and lines[0][0] == "entropy"


@pytest.mark.long
def test_a_vision_transformer_is_measured_on_custom_photos(
    shelf, photos: Path, tmp_path: Path
) -> None:
    request = MeasureRequest(str(shelf["vit"]), str(photos), METRICS)
    scorecard = measure.compute_scorecard(request, tmp_path / "card")
    assert (
        scorecard.name == "vit"
        and scorecard.subject == "attention"
        and "gradient" in scorecard.maps
    )
    assert {"spearman", "deletion_area@mask", "deletion_area@mean"} <= set(scorecard.keys)
    assert "accuracy" in scorecard.skipped


@pytest.mark.long
def test_an_encoder_without_head_has_maps_and_no_prediction(shelf, tmp_path: Path) -> None:
    from tests.metrics.scorecard.toys import Texts

    opened = measure.open_measured(str(shelf["bert"]), None, "cpu", lambda line: None)
    assert opened.model is None and opened.over == "text" and opened.reader is not None
    assert opened.looks is not None
    (look,) = opened.looks.values()
    assert look(Texts(3).batch(range(3))).values.shape[:4] == (3, 1, 1, 1)


@pytest.mark.long
def test_a_language_model_predicts_its_next_token(shelf) -> None:
    from tests.metrics.scorecard.toys import Texts

    opened = measure.open_measured(str(shelf["gpt2"]), None, "cpu", lambda line: None)
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
    model = measure.without_attention(net, lambda one, batch: one(torch.ones(1, 2)))
    assert model(None).attention == () and not model.training


@pytest.mark.long
def test_maps_are_measured_alone_or_next_to_a_model(shelf, photos: Path, tmp_path: Path) -> None:
    maps = tmp_path / "theirs.npz"
    io.write_arrays(maps, {f"p{at}": np.ones((4, 4)) for at in range(3)})
    alone = measure.compute_scorecard(MeasureRequest(str(maps), str(photos), ("sim",)), None)
    assert alone.name == alone.subject == "theirs"
    combined = measure.compute_scorecard(
        MeasureRequest(str(shelf["vit"]), str(photos), ("sim",), maps), None
    )
    assert combined.maps[:2] == ("attention", "outside")
    own = measure.compute_scorecard(
        MeasureRequest(str(photos / "maps"), str(photos), ("sim",)), None
    )
    assert own.intervals["maps", "sim"].mean == pytest.approx(1, abs=1e-4)


@pytest.mark.long
def test_photos_without_maps_have_no_ground_truth(photos: Path, tmp_path: Path) -> None:
    foreign.photo(tmp_path / "alone.png")
    data = measure.photo_folder(tmp_path, (32, 32))
    assert data.batch([0]).target is None and len(data) == 1 and data.digest()
    batch = measure.photo_folder(photos, (32, 32)).batch([0, 1, 2])
    assert batch.target is not None and batch.labels is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no photos"):
        measure.photo_folder(tmp_path / "empty", (32, 32))


def test_images_are_resized_to_the_size_of_the_model() -> None:
    from tests.metrics.scorecard.toys import Pictures

    data = measure.ResizedImages(Pictures(3), (16, 16))
    batch = data.batch(range(3))
    assert batch.images is not None and batch.images.shape[-2:] == (16, 16)
    assert batch.geometry is not None and batch.geometry.canvas == (16, 16)
    assert data.digest() != measure.ResizedImages(Pictures(3), (8, 8)).digest() and len(data) == 3
    same = measure.ResizedImages(Pictures(3), (8, 8)).batch(range(3))
    assert torch.equal(same.images, Pictures(3).batch(range(3)).images)


@pytest.mark.long
@pytest.mark.parametrize("name", ["osie", "yelp_hat"])
def test_human_attention_datasets_are_opened_by_name(name: str, data_root: Path, needs) -> None:
    root = needs(data_root, name)
    data = measure.named_dataset(name, MeasuredModel("x", size=(64, 64)), root)
    batch = data.batch([0])
    assert batch.target is not None
    if batch.images is not None:
        assert batch.images.shape[-2:] == (64, 64)


def test_missing_datasets_raise_a_user_error(tmp_path: Path) -> None:
    for one in catalog.DATASETS:
        if one.name in ("scenes", "easyvqa"):
            continue
        with pytest.raises(UserError, match=r"\.$"):
            measure.named_dataset(one.name, MeasuredModel("x"), tmp_path)


def test_list_metrics_describes_each_metric() -> None:
    lines = measure.list_metrics()
    assert len(lines) == len(available_metrics()) and all(len(line) == 7 for line in lines)
    first = lines[0]
    assert first[:2] == ["spearman", "Spearman's rank correlation of two maps"]
    assert first[2:6] == ["higher", "-1 to 1", "correlation", "truth"]


@pytest.mark.parametrize(
    ("measure_request", "message"),
    [
        (MeasureRequest("nowhere"), "'nowhere'.*exist"),
        (MeasureRequest("hf:some/model"), "dataset.*model"),
        (MeasureRequest("a\0b", "osie"), "NUL character"),
    ],
)
def test_invalid_requests_are_rejected_first(
    measure_request: MeasureRequest, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        measure.check_request(measure_request, tmp_path)


def test_errors_of_a_model_and_a_dataset_name_both() -> None:
    from tests.metrics.scorecard.toys import Pictures, Texts

    with pytest.raises(UserError, match=r"x .*images.*texts"):
        measure.check_modality(MeasuredModel("x", over="image"), Texts(2))
    measure.check_modality(MeasuredModel("x", over="image"), Pictures(2))
    message = "x .* y: no such key"
    with pytest.raises(UserError, match=message), measure.measuring_errors("x", "y"):
        raise ValueError("no such key.\nmore")
    with (
        pytest.raises(RunError, match=r"x .*failed.* y"),
        measure.measuring_errors("x", "y"),
    ):
        raise IndexError("index out of range")


@pytest.mark.long
def test_a_run_folder_is_not_overwritten(run: Path) -> None:
    with pytest.raises(UserError, match="a run folder"):
        measure.check_request(MeasureRequest("x", "y"), run)
    with pytest.raises(UserError, match="own test set"):
        measure.open_dataset("test", MeasuredModel("x"), None)


@pytest.mark.long
def test_a_run_without_a_model_is_rejected(tmp_path: Path, run: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    with pytest.raises(UserError, match="finished run"):
        measure.compute_scorecard(MeasureRequest(str(copy)), None)


def test_short_names_are_the_end_of_the_path() -> None:
    assert measure._short("/x/minilm/model/") == "minilm" and measure._short("hf:a/b") == "b"
    assert replace(MeasureRequest("a"), model="b").model == "b"


def test_scorecards_are_not_written_into_inputs_or_saved_models(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "photos").mkdir()
    with io.atomic_folder(tmp_path / "saved") as folder:
        io.write_json(folder / "config.json", {})
    request = measure.MeasureRequest(str(tmp_path / "model"), str(tmp_path / "photos"))
    for out, message in (
        ("photos", "photos is an input"),
        ("model", "model is an input"),
        ("saved", "saved is a saved"),
        ("saved/card", "is inside .*/saved"),
    ):
        with pytest.raises(UserError, match=message):
            measure.check_request(request, tmp_path / out)
    measure.check_request(request, tmp_path / "card")
