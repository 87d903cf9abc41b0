"""The model cache: found models, their descriptions, examples, and corrupt runs."""

from pathlib import Path

import pytest

from overt.errors import UserError
from overt.inspect.server import model_cache
from overt.inspect.server.model_cache import ModelCache, ServedModel, find_models
from tests.experiments import foreign


def test_runs_with_attention_are_listed_first(demo: Path):
    found = find_models([str(demo)])
    assert [one.name for one in found] == ["soft", "average"]
    assert found[0].run == demo / "soft" and found[0].folder == demo / "soft" / "model"


def test_a_run_and_a_model_folder_are_found_by_path(demo: Path):
    assert [one.name for one in find_models([str(demo / "soft")])] == ["soft"]
    model = str(demo / "soft" / "model")
    assert find_models([model]) == [ServedModel(model, demo / "soft" / "model")]


def test_the_default_folder_is_the_demo(demo: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(demo)
    assert len(find_models([])) == 2


def test_runs_without_an_inference_spec_and_missing_runs_raise(demo: Path, tmp_path: Path):
    import shutil

    shutil.copytree(demo / "soft", tmp_path / "old" / "soft")
    (tmp_path / "old" / "soft" / "model" / "spoken.json").unlink()
    with pytest.raises(UserError, match="run them again"):
        find_models([str(tmp_path / "old")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"not.*model folder"):
        find_models([str(tmp_path / "empty")])


@pytest.mark.parametrize("name", ["spoken.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "null", '{"format": 3}', "\x00"])
def test_a_corrupt_run_is_listed_with_its_problem(
    demo: Path, tmp_path: Path, name: str, content: str
):
    import shutil

    shutil.copytree(demo, tmp_path / "runs")
    (tmp_path / "runs" / "soft" / "model" / name).write_text(content)
    found = ModelCache(find_models([str(tmp_path / "runs")])).describe_all()
    assert next(one for one in found if one["name"] == "average")["maps"]
    if name == "spoken.json":  # the page reads this file first
        [broken] = [one for one in found if one["name"] == "soft"]
        assert set(broken) == {"name", "problem"} and "spoken.json" in broken["problem"]


def test_a_name_that_is_not_unicode_does_not_break_the_list(demo: Path, tmp_path: Path):
    import json
    import os
    import shutil

    odd = os.fsdecode(b"\xff\xfe soft")
    shutil.copytree(demo / "soft", tmp_path / "runs" / odd)
    cache = ModelCache(find_models([str(tmp_path / "runs")]))
    assert cache.names == ["\\udcff\\udcfe soft"]
    json.dumps(cache.describe_all(), ensure_ascii=False).encode()  # as a response
    (tmp_path / "runs" / odd / "model" / "spoken.json").write_text("{")
    json.dumps(cache.describe_all(), ensure_ascii=False).encode()


def test_only_a_few_models_are_loaded_at_a_time(demo: Path, monkeypatch):
    monkeypatch.setattr(model_cache, "MAX_LOADED", 1)
    cache = ModelCache(find_models([str(demo)]))
    first = cache.load("soft")
    assert cache.load("soft") is first
    cache.load("average")
    assert cache.load("soft") is not first


def test_a_model_is_described_without_loading_it(demo: Path):
    cache = ModelCache(find_models([str(demo)]))
    about = cache.describe("soft")
    assert about["reads"] and about["looks"] and about["examples"]
    assert (
        set(about["maps"]) == {"attention", "gradient", "search"} and about["wants"] == "Question"
    )
    with pytest.raises(UserError, match="soft, average"):
        cache.describe("../soft")


@pytest.mark.parametrize(
    ("name", "maps", "boxed", "writes"),
    [
        ("hard", {"attention", "gradient", "search"}, False, False),
        ("boxes", {"attention", "gradient", "rollout"}, True, False),
        ("captioner", {"attention", "gradient"}, True, True),
    ],
)
def test_each_kind_of_run_describes_its_inputs(kinds: Path, name, maps, boxed, writes):
    about = ModelCache(find_models([str(kinds)])).describe(name)
    assert set(about["maps"]) == maps
    assert (about["boxed"], about["writes"], about["looks"]) == (boxed, writes, True)


def test_captions_of_an_example_are_not_a_question(kinds: Path):
    cache = ModelCache(find_models([str(kinds)]))
    assert cache.examples("captioner")[0]["text"] is None
    [one] = cache.examples("boxes")
    assert one["text"] == "the red ball / what colour" and one["truth"] == "first"
    assert cache.examples("hard")[0]["truth"] is None  # this network has no such answer


def test_a_run_that_is_not_interactive_raises_with_the_reason(kinds: Path, tmp_path: Path):
    import shutil

    from overt import io
    from overt.experiments.inference_spec import NotInteractive, spec_files

    shutil.copytree(kinds / "captioner", tmp_path / "run")
    files = spec_files(
        NotInteractive("it looks at regions of a detector, which is no part of overt")
    )
    io.write_json(tmp_path / "run" / "model" / "spoken.json", files["spoken.json"])
    with pytest.raises(UserError, match=r"regions.*detector"):
        find_models([str(tmp_path / "run")])
    shutil.copytree(kinds / "hard", tmp_path / "hard")
    assert [one.name for one in find_models([str(tmp_path)])] == [
        "hard"
    ]  # other runs of the folder are interactive


@pytest.mark.parametrize(
    ("name", "reads", "looks"), [("bert", True, False), ("vit", False, True), ("clip", True, True)]
)
def test_inputs_of_hub_models_are_read_from_their_files(tmp_path: Path, name, reads, looks):
    cache = ModelCache(find_models([str(foreign.Shelf(tmp_path)[name])]))
    about = cache.describe(cache.names[0])
    assert (about["reads"], about["looks"]) == (reads, looks)


def test_examples_are_those_of_the_run(demo: Path):
    cache = ModelCache(find_models([str(demo)]))
    found = cache.examples("soft")
    assert len(found) == 3 and found[0]["text"] == "what colour is the ball"
    assert found[0]["picture"].startswith("data:image/png;base64,")


def test_a_hub_model_has_no_examples(tmp_path: Path):
    folder = foreign.Shelf(tmp_path)["bert"]
    cache = ModelCache(find_models([str(folder)]))
    [name] = cache.names
    assert cache.examples(name) == [] and "search" not in cache.describe(name)["maps"]
