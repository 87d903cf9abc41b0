"""Run folders: which folders a run can use, resume, locks and output files."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.experiments import run_folder, settings
from overt.experiments.recipe import Recipe
from tests.toys import HOLD_LOCKS

WriteRun = Callable[..., dict[str, Any]]


@pytest.fixture
def recipe(toy_table: Any) -> Recipe:
    return toy_table.rows[0].recipe()


def claim_error(out: Path, recipe: Recipe, seed: int = 0, resume: bool = False) -> str:
    before = sorted(out.rglob("*")) if len(out.name) < 256 and out.is_dir() else None
    with pytest.raises(UserError) as caught:
        run_folder.check_claim(out, recipe, seed, resume=resume)
    if before is not None:
        assert [p for p in sorted(out.rglob("*")) if p.name != ".lock"] == [
            p for p in before if p.name != ".lock"
        ]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_new_or_empty_folder_can_be_used(tmp_path: Path, recipe: Recipe) -> None:
    assert run_folder.check_claim(tmp_path / "new" / "deep", recipe, 0, resume=False) is None
    assert not (tmp_path / "new").exists()
    (tmp_path / ".lock").touch()
    assert run_folder.check_claim(tmp_path, recipe, 0, resume=False) is None


def test_a_folder_with_other_files_raises(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "thesis.tex").touch()
    assert "is not empty (it has thesis.tex)" in claim_error(tmp_path, recipe)


def test_a_finished_run_is_not_overwritten(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe, seed=3)
    message = claim_error(tmp_path, recipe)
    assert (
        f"{tmp_path} already has a finished run of toy with seed 3: show it with `overt report"
        in message
    )
    assert message.endswith("Its settings differ: the seed is 0, was 3.")
    found = run_folder.check_claim(tmp_path, recipe, 3, resume=True)
    assert found is not None and found.is_finished


def test_an_unfinished_run_needs_resume(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe, status="stopped")
    assert "an unfinished run of toy with seed 0: add --resume" in claim_error(tmp_path, recipe)
    found = run_folder.check_claim(tmp_path, recipe, 0, resume=True)
    assert found is not None and not found.is_finished


def test_final_results_without_a_manifest_are_not_finished(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe)
    (tmp_path / io.MANIFEST).unlink()
    found = run_folder.check_claim(tmp_path, recipe, 0, resume=True)
    assert found is not None and found.has_final_results and not found.is_finished


def test_resume_with_other_settings_raises(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe, status="running")
    other = settings.apply(recipe, ["train.rate=0.5", "data.limit=7"])
    message = claim_error(tmp_path, other, seed=2, resume=True)
    assert (
        "data.limit is 7, was none; train.rate is 0.5, was 0.001; the seed is 2, was 0." in message
    )


def test_a_new_setting_at_its_default_can_be_resumed(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe, status="running")
    results = io.read_json(tmp_path / "results.json")
    del results["settings"]["train.patience"]
    io.write_json(tmp_path / "results.json", results)
    assert run_folder.check_claim(tmp_path, recipe, 0, resume=True) is not None
    other = settings.apply(recipe, ["train.patience=7"])
    assert "train.patience is 7, was none." in claim_error(tmp_path, other, resume=True)


def test_resume_with_another_recipe_raises(
    tmp_path: Path, toy_table: Any, write_run: WriteRun
) -> None:
    write_run(tmp_path, toy_table.rows[0].recipe(), status="running")
    message = claim_error(tmp_path, toy_table.rows[2].recipe(), resume=True)
    assert "the recipe is toy-stated, was toy." in message


def test_resume_without_a_run_raises(tmp_path: Path, recipe: Recipe) -> None:
    assert "cannot resume" in claim_error(tmp_path, recipe, resume=True)
    assert "cannot resume" in claim_error(tmp_path / "new", recipe, resume=True)


@pytest.mark.parametrize("name", ["file", "file/below", "pipe/below", "loop", "nul\0", "x" * 300])
def test_paths_that_cannot_be_folders_raise(tmp_path: Path, recipe: Recipe, name: str) -> None:
    import os

    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    claim_error(tmp_path / name, recipe)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"status": "done", "recipe": "toy", "settings": [], "seed": 0}', ""]
)
def test_invalid_results_raise_corrupt_file_error(
    tmp_path: Path, recipe: Recipe, text: str
) -> None:
    (tmp_path / run_folder.RESULTS).write_text(text)
    with pytest.raises(CorruptFileError, match=r"results\.json"):
        run_folder.check_claim(tmp_path, recipe, 0, resume=True)


def test_a_run_locked_by_another_process_raises(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe, status="running")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCKS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for resume in (False, True):
            assert str(other.pid) in claim_error(tmp_path, recipe, resume=resume)
        other.communicate("")
    assert run_folder.check_claim(tmp_path, recipe, 0, resume=True) is not None


def test_only_rank_zero_checks_the_folder(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, recipe, status="running")
    monkeypatch.setenv("RANK", "1")
    assert run_folder.check_claim(tmp_path, recipe, 0, resume=False) is None
    assert run_folder.check_claim(tmp_path, recipe, 0, resume=True) is not None


def test_a_run_that_failed_before_saving_frees_its_folder(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe, status="failed")
    (tmp_path / "log.jsonl").touch()
    found = run_folder.read_run(tmp_path)
    assert found is not None and found.is_empty and not run_folder.has_progress(tmp_path)
    other = settings.apply(recipe, ["train.rate=0.5"])
    assert run_folder.check_claim(tmp_path, other, 3, resume=False) is None
    assert run_folder.check_claim(tmp_path, recipe, 0, resume=True) is not None
    assert "train.rate is 0.5" in claim_error(tmp_path, other, resume=True)


def test_a_run_that_failed_after_saving_keeps_its_folder(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe, status="failed")
    (tmp_path / "checkpoints").mkdir()
    assert run_folder.has_progress(tmp_path)
    assert "an unfinished run of toy with seed 0: add --resume" in claim_error(tmp_path, recipe)


def test_killed_and_stopped_runs_have_progress(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    assert not run_folder.has_progress(tmp_path)
    for status in ("running", "stopped", "done"):
        write_run(tmp_path / status, recipe, status=status)
        assert run_folder.has_progress(tmp_path / status)


def test_check_claim_with_a_held_lock_does_not_lock_again(
    tmp_path: Path, recipe: Recipe, write_run: WriteRun
) -> None:
    write_run(tmp_path, recipe, status="stopped")
    (tmp_path / io.MANIFEST).unlink(missing_ok=True)
    with io.lock(tmp_path):
        with pytest.raises(UserError, match="in use"):
            run_folder.check_claim(tmp_path, recipe, 0, resume=True)
        found = run_folder.check_claim(tmp_path, recipe, 0, resume=True, locked=True)
        assert found is not None and not found.is_finished
        with pytest.raises(UserError, match="an unfinished run"):
            run_folder.check_claim(tmp_path, recipe, 0, resume=False, locked=True)


@pytest.mark.parametrize("name", ["results.json", "manifest.json", "log.jsonl"])
def test_refuse_run_folder_raises_for_a_run(tmp_path: Path, name: str) -> None:
    run_folder.refuse_run_folder(tmp_path)
    run_folder.refuse_run_folder(tmp_path / "new")
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"run.*saved model"):
        run_folder.refuse_run_folder(tmp_path)


def test_output_files_need_an_existing_folder_outside_runs(tmp_path: Path) -> None:
    assert run_folder.check_output_file(tmp_path / "a.html") == tmp_path / "a.html"
    page = tmp_path / "new" / "report.html"
    assert run_folder.check_output_file(tmp_path / "new", page) == page
    for out, file in ((tmp_path / "no" / "a.html", None), (tmp_path / "no" / "new", page)):
        with pytest.raises(UserError, match=r"/no .*not exist"):
            run_folder.check_output_file(out, file)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / io.MANIFEST).touch()
    (tmp_path / run_folder.RESULTS).touch()
    with pytest.raises(UserError, match="finished run"):
        run_folder.check_output_file(tmp_path / "a.html")
    (tmp_path / io.MANIFEST).unlink()
    with io.atomic_folder(tmp_path / "model") as folder:
        io.write_json(folder / "config.json", {})
    with pytest.raises(UserError, match=r"model.*finished"):
        run_folder.check_output_file(tmp_path / "model" / "a.html")


def test_the_manifest_of_another_program_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / io.MANIFEST).write_text('{"name": "a web page", "start_url": "/"}')
    assert run_folder.check_output_file(tmp_path / "a.html") == tmp_path / "a.html"
    assert run_folder.check_folder_path(tmp_path / "runs" / "a") == tmp_path / "runs" / "a"


@pytest.mark.parametrize("marks", [(run_folder.RESULTS, "log.jsonl"), (io.MANIFEST,)])
def test_a_run_inside_another_run_or_model_raises(
    tmp_path: Path, recipe: Recipe, marks: tuple[str, ...]
) -> None:
    """A folder inside a saved model would corrupt it: its manifest does not list the folder."""
    there = tmp_path / "run"
    if io.MANIFEST in marks:
        with io.atomic_folder(there) as folder:
            io.write_json(folder / "config.json", {})
    else:
        there.mkdir()
        for name in marks:
            (there / name).touch()
    (tmp_path / "link").symlink_to(there)
    for out in (there / "sub", there / "a" / "b", tmp_path / "link" / "sub"):
        assert "inside" in claim_error(out, recipe)
        with pytest.raises(UserError, match=r"inside .*/run\b"):
            run_folder.check_output_file(out, out / "report.html")
    assert not (there / "sub").exists()
