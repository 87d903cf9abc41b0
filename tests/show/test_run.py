"""A run is read whatever state it is in, and what is missing becomes a sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from overt.errors import BadInput
from overt.show.run import read_runs


def test_a_whole_run_has_nothing_to_say(run_folder: Callable[..., Path]) -> None:
    (run,) = read_runs([run_folder("soft attention")])
    assert run.notes == () and run.finished and run.name == "soft attention"
    assert len(run.gallery) == 8 and run.log[0]["step"] == 10
    assert run.results["seed"] == 0


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("results.json", "has no results.json"),
        ("log.jsonl", "has no log.jsonl, so it has no curves"),
        ("gallery", "has no gallery"),
    ],
)
def test_a_missing_part_is_a_sentence(
    run_folder: Callable[..., Path], part: str, sentence: str
) -> None:
    folder = run_folder()
    path = folder / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run,) = read_runs([folder])
    assert len(run.notes) == 1 and run.notes[0].startswith(sentence)
    assert run.finished == (part != "results.json")


@pytest.mark.parametrize(
    ("status", "sentence"),
    [("running", "still going"), ("stopped", "--resume"), ("failed", "non-finite loss at step 7")],
)
def test_an_unfinished_run_says_so(
    run_folder: Callable[..., Path], status: str, sentence: str
) -> None:
    reason = {"reason": "non-finite loss at step 7"} if status == "failed" else {}
    (run,) = read_runs([run_folder(status=status, **reason)])
    assert not run.finished and sentence in run.notes[0]


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"a": NaN}', "\udcff"])
def test_results_that_cannot_be_read_are_a_sentence(
    run_folder: Callable[..., Path], text: str
) -> None:
    folder = run_folder()
    (folder / "results.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (run,) = read_runs([folder])
    assert run.results == {} and "cannot be read" in run.notes[0]


def test_a_half_written_last_line_is_passed_over_and_said(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    with open(folder / "log.jsonl", "a") as file:
        file.write('{"stage": "train", "st')
    (run,) = read_runs([folder])
    assert run.notes == ("has one line in log.jsonl that cannot be read",)
    assert run.log[-1]["step"] == 1000


def test_a_damaged_gallery_is_a_sentence_that_names_the_file(
    run_folder: Callable[..., Path],
) -> None:
    folder = run_folder()
    (folder / "gallery" / "arrays.npz").write_bytes(b"no")
    (run,) = read_runs([folder])
    assert run.gallery == () and "arrays.npz" in run.notes[0]


def test_a_folder_that_is_no_run_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no run"):
        read_runs([tmp_path])
    with pytest.raises(BadInput, match="nowhere is not a folder"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(BadInput, match="at least one run folder"):
        read_runs([])


def test_every_run_has_a_name_of_its_own(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    first = run_folder("soft attention")
    second = tmp_path / "other" / "soft attention"
    shutil.copytree(first, second)
    titled = run_folder("no attention", title="mean pooling")
    names = [run.name for run in read_runs([first, second, titled, first])]
    assert names == ["runs/soft attention", "other/soft attention", "mean pooling"]
    again = run_folder("truth-supervised", title="mean pooling")
    names = [run.name for run in read_runs([titled, again])]
    assert names == ["runs/no attention", "runs/truth-supervised"]
    far = tmp_path / "far" / "runs" / "soft attention"
    shutil.copytree(first, far)
    names = [run.name for run in read_runs([first, far])]
    assert names == ["runs/soft attention (1)", "runs/soft attention (2)"]


def test_seeds_of_one_recipe_are_told_apart_by_their_seed(run_folder: Callable[..., Path]) -> None:
    folders = [run_folder(f"seed-{seed}", title="dots") for seed in (0, 3)]
    for folder, seed in zip(folders, (0, 3), strict=True):
        results = json.loads((folder / "results.json").read_text())
        (folder / "results.json").write_text(json.dumps({**results, "seed": seed}))
    assert [run.name for run in read_runs(folders)] == ["dots, seed 0", "dots, seed 3"]
