"""Reading runs: complete, unfinished and corrupt folders, and unique names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from overt import io
from overt.errors import UserError
from overt.viz.run_reader import read_runs


def test_complete_run_has_no_notes(run_folder: Callable[..., Path]) -> None:
    (run,) = read_runs([run_folder("soft attention")])
    assert run.notes == () and run.finished and run.name == "soft attention"
    assert len(run.gallery) == 8 and run.log[0]["step"] == 10
    assert run.results["seed"] == 0


@pytest.mark.parametrize(
    ("part", "note"),
    [
        ("results.json", "has no results.json"),
        ("log.jsonl", "has no log.jsonl"),
        ("gallery", "has no gallery"),
    ],
)
def test_missing_part_gives_a_note(run_folder: Callable[..., Path], part: str, note: str) -> None:
    folder = run_folder()
    path = folder / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run,) = read_runs([folder])
    assert len(run.notes) == 1 and run.notes[0].startswith(note)
    assert run.finished == (part != "results.json")


@pytest.mark.parametrize(
    ("status", "note"),
    [
        ("running", "still running"),
        ("stopped", "--resume"),
        ("failed", "non-finite loss at step 7"),
    ],
)
def test_unfinished_run_has_a_note(run_folder: Callable[..., Path], status: str, note: str) -> None:
    reason = {"reason": "non-finite loss at step 7"} if status == "failed" else {}
    (run,) = read_runs([run_folder(status=status, **reason)])
    assert not run.finished and note in run.notes[0]


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"a": NaN}', "\udcff"])
def test_unreadable_results_give_a_note(run_folder: Callable[..., Path], text: str) -> None:
    folder = run_folder()
    (folder / "results.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (run,) = read_runs([folder])
    assert run.results == {} and "cannot be read" in run.notes[0]


def test_truncated_last_log_line_is_skipped_with_a_note(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    with open(folder / "log.jsonl", "a") as file:
        file.write('{"stage": "train", "st')
    (run,) = read_runs([folder])
    assert run.notes == ("has one line in log.jsonl that cannot be read",)
    assert run.log[-1]["step"] == 1000


def test_corrupt_gallery_gives_a_note_with_the_file(
    run_folder: Callable[..., Path],
) -> None:
    folder = run_folder()
    (folder / "gallery" / "arrays.npz").write_bytes(b"no")
    (run,) = read_runs([folder])
    assert run.gallery == () and "arrays.npz" in run.notes[0]


def test_invalid_run_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not.*run folder"):
        read_runs([tmp_path])
    with pytest.raises(UserError, match=r"nowhere.*folder"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="run folder"):
        read_runs([])


def test_run_names_are_unique(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
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


def test_runs_of_one_recipe_are_named_by_seed(run_folder: Callable[..., Path]) -> None:
    folders = [run_folder(f"seed-{seed}", title="dots") for seed in (0, 3)]
    for folder, seed in zip(folders, (0, 3), strict=True):
        results = json.loads((folder / "results.json").read_text())
        (folder / "results.json").write_text(json.dumps({**results, "seed": seed}))
    assert [run.name for run in read_runs(folders)] == ["dots, seed 0", "dots, seed 3"]


def test_values_of_other_items_are_read_and_damage_is_noted(
    run_folder: Callable[..., Path],
) -> None:
    folder = run_folder()
    assert read_runs([folder])[0].elsewhere == {}
    values = {"answers": np.ones(2, np.float32), "answers.id": np.array(["a", "b"])}
    io.write_arrays(folder / "elsewhere.npz", values)
    (run,) = read_runs([folder])
    assert run.notes == () and set(run.elsewhere) == set(values)
    (folder / "elsewhere.npz").write_bytes(b"damaged")
    (run,) = read_runs([folder])
    assert run.elsewhere == {} and "other items" in run.notes[0]
