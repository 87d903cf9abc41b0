from pathlib import Path

import pytest

from overt.errors import BadInput
from overt.serve import shelf as shelves
from overt.serve.shelf import Offered, Shelf, offer
from tests.recipes import foreign


def test_a_folder_of_runs_offers_those_that_attend_first(demo: Path):
    found = offer([str(demo)])
    assert [one.name for one in found] == ["soft", "average"]
    assert found[0].run == demo / "soft" and found[0].folder == demo / "soft" / "model"


def test_a_run_and_a_model_are_offered_by_name(demo: Path):
    assert [one.name for one in offer([str(demo / "soft")])] == ["soft"]
    model = str(demo / "soft" / "model")
    assert offer([model]) == [Offered(model, demo / "soft" / "model")]


def test_without_a_name_it_is_the_demo(demo: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="run `overt demo`"):
        offer([])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(demo)
    assert len(offer([])) == 2


def test_runs_without_words_are_told_apart_from_no_runs(demo: Path, tmp_path: Path):
    import shutil

    shutil.copytree(demo / "soft", tmp_path / "old" / "soft")
    (tmp_path / "old" / "soft" / "model" / "spoken.json").unlink()
    with pytest.raises(BadInput, match="run them again"):
        offer([str(tmp_path / "old")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no model"):
        offer([str(tmp_path / "empty")])


def test_only_a_few_models_are_open_at_a_time(demo: Path, monkeypatch):
    monkeypatch.setattr(shelves, "OPEN", 1)
    shelf = Shelf(offer([str(demo)]))
    first = shelf.subject("soft")
    assert shelf.subject("soft") is first
    shelf.subject("average")
    assert shelf.subject("soft") is not first


def test_what_a_model_takes_is_known_before_it_is_opened(demo: Path):
    shelf = Shelf(offer([str(demo)]))
    about = shelf.about("soft")
    assert about["reads"] and about["looks"] and about["examples"]
    assert set(about["maps"]) == {"raw", "gradient", "search"} and about["wants"] == "Question"
    with pytest.raises(BadInput, match="there are soft, average"):
        shelf.about("../soft")


@pytest.mark.parametrize(
    ("name", "maps", "boxed", "writes"),
    [
        ("hard", {"raw", "gradient", "search"}, False, False),
        ("boxes", {"raw", "gradient", "rollout"}, True, False),
        ("captioner", {"raw", "gradient"}, True, True),
    ],
)
def test_every_kind_of_run_says_what_it_takes(kinds: Path, name, maps, boxed, writes):
    about = Shelf(offer([str(kinds)])).about(name)
    assert set(about["maps"]) == maps
    assert (about["boxed"], about["writes"], about["looks"]) == (boxed, writes, True)


def test_the_captions_of_an_example_are_no_question(kinds: Path):
    shelf = Shelf(offer([str(kinds)]))
    assert shelf.examples("captioner")[0]["text"] is None
    [one] = shelf.examples("boxes")
    assert one["text"] == "the red ball / what colour" and one["truth"] == "first"
    assert shelf.examples("hard")[0]["truth"] is None  # no answer of this network is called so


def test_a_run_that_cannot_be_asked_says_why(kinds: Path, tmp_path: Path):
    import shutil

    from overt import files
    from overt.recipes.spoken import Mute, beside

    shutil.copytree(kinds / "captioner", tmp_path / "run")
    told = beside(Mute("it looks at regions of a detector, which is no part of overt"))
    files.write_json(tmp_path / "run" / "model" / "spoken.json", told["spoken.json"])
    with pytest.raises(BadInput, match="regions of a detector"):
        offer([str(tmp_path / "run")])
    shutil.copytree(kinds / "hard", tmp_path / "hard")
    assert [one.name for one in offer([str(tmp_path)])] == ["hard"]  # the others of a folder can


@pytest.mark.parametrize(
    ("name", "reads", "looks"), [("bert", True, False), ("vit", False, True), ("clip", True, True)]
)
def test_what_models_of_others_take_is_told_by_their_files(tmp_path: Path, name, reads, looks):
    shelf = Shelf(offer([str(foreign.Shelf(tmp_path)[name])]))
    about = shelf.about(shelf.names[0])
    assert (about["reads"], about["looks"]) == (reads, looks)


def test_examples_are_those_of_the_run(demo: Path):
    shelf = Shelf(offer([str(demo)]))
    found = shelf.examples("soft")
    assert len(found) == 3 and found[0]["text"] == "what colour is the ball"
    assert found[0]["picture"].startswith("data:image/png;base64,")


def test_a_model_of_other_people_has_no_examples(tmp_path: Path):
    folder = foreign.Shelf(tmp_path)["bert"]
    shelf = Shelf(offer([str(folder)]))
    [name] = shelf.names
    assert shelf.examples(name) == [] and "search" not in shelf.about(name)["maps"]
