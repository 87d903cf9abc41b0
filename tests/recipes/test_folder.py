"""Which folder a run may have, and what is said about one it may not have."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import folder, settings
from overt.recipes.recipe import Recipe
from tests.toys import HOLD

Write = Callable[..., dict[str, Any]]


@pytest.fixture
def recipe(toy_table: Any) -> Recipe:
    return toy_table.rows[0].recipe()


def refused(out: Path, recipe: Recipe, seed: int = 0, resume: bool = False) -> str:
    before = sorted(out.rglob("*")) if len(out.name) < 256 and out.is_dir() else None
    with pytest.raises(BadInput) as caught:
        folder.claim(out, recipe, seed, resume=resume)
    if before is not None:
        assert [p for p in sorted(out.rglob("*")) if p.name != ".lock"] == [
            p for p in before if p.name != ".lock"
        ]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_new_or_empty_folder_is_free(tmp_path: Path, recipe: Recipe) -> None:
    assert folder.claim(tmp_path / "new" / "deep", recipe, 0, resume=False) is None
    assert not (tmp_path / "new").exists()
    (tmp_path / ".lock").touch()
    assert folder.claim(tmp_path, recipe, 0, resume=False) is None


def test_files_of_another_kind_are_left_alone(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "thesis.tex").touch()
    assert "is not empty (it holds thesis.tex); choose a new or an empty folder." in refused(
        tmp_path, recipe
    )


def test_a_finished_run_is_not_run_over(tmp_path: Path, recipe: Recipe, write_run: Write) -> None:
    write_run(tmp_path, recipe, seed=3)
    said = refused(tmp_path, recipe)
    assert (
        f"{tmp_path} holds a finished run of toy with seed 3; look at it with `overt report" in said
    )
    assert said.endswith("or choose another folder. It is not this one: the seed is 0, was 3.")
    held = folder.claim(tmp_path, recipe, 3, resume=True)
    assert held is not None and held.done


def test_an_unfinished_run_goes_on_only_when_asked(
    tmp_path: Path, recipe: Recipe, write_run: Write
) -> None:
    write_run(tmp_path, recipe, status="stopped")
    assert "an unfinished run of toy with seed 0; add --resume to go on" in refused(
        tmp_path, recipe
    )
    held = folder.claim(tmp_path, recipe, 0, resume=True)
    assert held is not None and not held.done


def test_final_results_without_a_manifest_are_not_the_end(
    tmp_path: Path, recipe: Recipe, write_run: Write
) -> None:
    write_run(tmp_path, recipe)
    (tmp_path / files.MANIFEST).unlink()
    held = folder.claim(tmp_path, recipe, 0, resume=True)
    assert held is not None and held.says_done and not held.done


def test_a_run_goes_on_only_as_it_began(tmp_path: Path, recipe: Recipe, write_run: Write) -> None:
    write_run(tmp_path, recipe, status="running")
    other = settings.apply(recipe, ["train.rate=0.5", "data.limit=7"])
    said = refused(tmp_path, other, seed=2, resume=True)
    assert "data.limit is 7, was none; train.rate is 0.5, was 0.001; the seed is 2, was 0." in said


def test_a_setting_that_came_later_is_no_difference_at_its_default(
    tmp_path: Path, recipe: Recipe, write_run: Write
) -> None:
    write_run(tmp_path, recipe, status="running")
    results = files.read_json(tmp_path / "results.json")
    del results["settings"]["train.patience"]
    files.write_json(tmp_path / "results.json", results)
    assert folder.claim(tmp_path, recipe, 0, resume=True) is not None
    other = settings.apply(recipe, ["train.patience=7"])
    assert "train.patience is 7, was none." in refused(tmp_path, other, resume=True)


def test_another_recipe_is_named(tmp_path: Path, toy_table: Any, write_run: Write) -> None:
    write_run(tmp_path, toy_table.rows[0].recipe(), status="running")
    said = refused(tmp_path, toy_table.rows[2].recipe(), resume=True)
    assert "the recipe is toy-stated, was toy." in said


def test_nothing_to_resume_is_said(tmp_path: Path, recipe: Recipe) -> None:
    assert "there is no run to resume in" in refused(tmp_path, recipe, resume=True)
    assert "there is no run to resume in" in refused(tmp_path / "new", recipe, resume=True)


@pytest.mark.parametrize("name", ["file", "file/below", "pipe/below", "loop", "nul\0", "x" * 300])
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, recipe: Recipe, name: str) -> None:
    import os

    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / name, recipe)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"status": "done", "recipe": "toy", "settings": [], "seed": 0}', ""]
)
def test_results_that_are_not_results_are_damaged(
    tmp_path: Path, recipe: Recipe, text: str
) -> None:
    (tmp_path / folder.RESULTS).write_text(text)
    with pytest.raises(Damaged, match=r"results\.json"):
        folder.claim(tmp_path, recipe, 0, resume=True)


def test_a_run_in_the_hands_of_another_process_is_refused(
    tmp_path: Path, recipe: Recipe, write_run: Write
) -> None:
    write_run(tmp_path, recipe, status="running")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for resume in (False, True):
            assert str(other.pid) in refused(tmp_path, recipe, resume=resume)
        other.communicate("")
    assert folder.claim(tmp_path, recipe, 0, resume=True) is not None


def test_only_the_first_of_several_processes_judges(
    tmp_path: Path, recipe: Recipe, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, recipe, status="running")
    monkeypatch.setenv("RANK", "1")
    assert folder.claim(tmp_path, recipe, 0, resume=False) is None
    assert folder.claim(tmp_path, recipe, 0, resume=True) is not None


def test_a_run_that_failed_before_it_saved_does_not_keep_its_folder(
    tmp_path: Path, recipe: Recipe, write_run: Write
) -> None:
    write_run(tmp_path, recipe, status="failed")
    (tmp_path / "log.jsonl").touch()
    held = folder.look(tmp_path)
    assert held is not None and held.blank and not folder.begun(tmp_path)
    other = settings.apply(recipe, ["train.rate=0.5"])
    assert folder.claim(tmp_path, other, 3, resume=False) is None
    assert folder.claim(tmp_path, recipe, 0, resume=True) is not None
    assert "train.rate is 0.5" in refused(tmp_path, other, resume=True)


def test_a_run_that_failed_later_keeps_it(tmp_path: Path, recipe: Recipe, write_run: Write) -> None:
    write_run(tmp_path, recipe, status="failed")
    (tmp_path / "checkpoints").mkdir()
    assert folder.begun(tmp_path)
    assert "an unfinished run of toy with seed 0; add --resume" in refused(tmp_path, recipe)


def test_a_killed_or_stopped_run_is_begun_and_an_empty_folder_is_not(
    tmp_path: Path, recipe: Recipe, write_run: Write
) -> None:
    assert not folder.begun(tmp_path)
    for status in ("running", "stopped", "done"):
        write_run(tmp_path / status, recipe, status=status)
        assert folder.begun(tmp_path / status)
