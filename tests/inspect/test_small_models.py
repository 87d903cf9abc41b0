"""The installed models: they answer as they did in the demo, and need no folder."""

from pathlib import Path

import pytest

from overt import io
from overt.errors import UserError
from overt.inspect import look, small_models
from overt.inspect.load_model import load_model, locate_model
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.viz.gallery_sample import load_gallery


@pytest.mark.parametrize("name", small_models.NAMES)
def test_installed_models_answer_as_in_the_demo(name: str) -> None:
    run = small_models.find_small_model(f"overt:{name}")
    io.verify(run)
    sample = load_gallery(run / "gallery")[0]
    loaded = load_model(locate_model(f"overt:{name}"), name)
    assert loaded.spec is not None
    given = small_models.example_input(f"overt:{name}", loaded.spec.generates_text)
    assert given is not None
    viewed = look.view_model(loaded, given)
    assert viewed.panels
    assert sample.prediction in viewed.answers[0][0]
    if name != "aligned-captions":  # a caption has no probability
        assert viewed.answers[0][1] == pytest.approx(sample.confidence, abs=1e-3)


def test_the_server_offers_them_where_no_demo_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = ModelCache(find_models([]))
    assert tuple(cache.names) == small_models.NAMES
    assert all("problem" not in one and one["examples"] for one in cache.describe_all())
    assert cache.examples("hard-attention")[0]["text"].endswith("?")


def test_look_takes_the_example_of_an_installed_model(tmp_path: Path) -> None:
    look.look("overt:hard-attention", [], tmp_path / "look.html", look.ViewOptions())
    assert (tmp_path / "look.html").exists()


def test_an_unknown_installed_model_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="hard-attention"):
        locate_model("overt:soft")


def test_models_are_copied_without_checkpoints_and_maps(tmp_path: Path) -> None:
    small_models.copy_models(small_models.FOLDER, tmp_path / "copies")
    run = tmp_path / "copies" / "self-supervised"
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["gallery", "model"]
    assert all(sample.cells is None for sample in load_gallery(run / "gallery"))


def test_look_takes_a_sample_of_a_run_by_its_id(tmp_path: Path) -> None:
    run = small_models.find_small_model("overt:hard-attention")
    first, other = load_gallery(run / "gallery")[:2]
    drawn = {
        chosen: look.look(str(run), given, tmp_path / "look.html", look.ViewOptions()).panels
        for chosen, given in (("none", []), ("first", [first.id]), ("other", [other.id]))
    }
    maps = {name: panels[0].attention.weights for name, panels in drawn.items()}
    assert maps["none"].equal(maps["first"]) and not maps["first"].equal(maps["other"])
    with pytest.raises(UserError, match="image"):
        look.look(str(run), ["no such sample"], tmp_path / "look.html", look.ViewOptions())
