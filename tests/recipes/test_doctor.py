"""The doctor: what it finds on a machine, and in run folders that are whole, broken or busy."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import files
from overt.errors import BadInput
from overt.recipes import doctor, folder
from overt.recipes.doctor import Finding

Write = Callable[..., dict[str, Any]]


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {one.what: one for one in findings}


def test_the_machine_has_what_overt_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    import torch

    monkeypatch.delenv("OVERT_DATA", raising=False)
    found = by_name(doctor.machine(tmp_path))
    assert found["python"].found.startswith(platform.python_version())
    assert found["torch"].found == torch.__version__
    assert {"accelerate", "numpy", "cpu", "data folder", "cache folder", "browser"} <= set(found)
    assert found["data folder"].found == str(tmp_path)
    assert (found["data scenes"].found, found["data cifar10"].found) == ("here", "not here")
    assert found["data cifar10"].advice
    assert not any(one.wrong for one in found.values())


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: None if p in ("rich", "timm") else known(p))
    found = by_name(list(doctor._packages()))
    assert found["rich"].wrong and found["rich"].advice == "pip install 'rich>=14'"
    assert found["extra timm"].found == "timm missing" and not found["extra timm"].wrong
    assert found["extra timm"].advice == "pip install 'timm>=1.0' if you want it"


def test_a_package_that_is_too_old_is_named_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = {"transformers": "4.57.1", "torch": "2.9.0+cpu", "numpy": "2.0.0rc1"}
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: old.get(p) or known(p))
    found = by_name(list(doctor._packages()))
    assert found["extra hf"].found == "transformers 4.57.1 is older than 5.17"
    assert found["extra hf"].advice == "pip install 'transformers>=5.17' if you want it"
    assert found["torch"].wrong and found["torch"].found == "2.9.0+cpu is older than 2.11."
    assert not found["numpy"].wrong and found["numpy"].found == "2.0.0rc1"


def test_an_extra_that_lacks_much_is_installed_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    found = by_name(list(doctor._packages()))
    assert found["extra dev"].advice == "pip install '.[dev]' in the checkout if you want it"
    assert found["extra dev"].found.endswith(" more")


def test_a_broken_torch_is_a_finding_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcuda.so:\n cannot open")

    monkeypatch.setattr(importlib, "import_module", broken)
    (found,) = doctor._devices()
    assert found.wrong and found.found == "cannot be imported: libcuda.so: cannot open."


def test_a_data_folder_that_is_not_there_is_wrong(tmp_path: Path) -> None:
    (found,) = doctor._data(tmp_path / "none")
    assert found.wrong and "--data names" in found.found


def test_a_finished_run_is_whole(tmp_path: Path, toy_table: Any, write_run: Write) -> None:
    recipe = toy_table.rows[0].recipe()
    write_run(tmp_path, recipe, seed=4)
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with files.writing(tmp_path / "checkpoints/main/step-000000002") as new:
        files.write_text(new / "state.json", "{}")
    found = by_name(doctor.run_folder(tmp_path))
    assert not any(one.wrong for one in found.values())
    assert found["results"].found == "a finished run of toy with seed 4, done"
    assert found["files"].found == "1 files are as they were written"
    assert found["checkpoints of main"].found == "the newest whole one is step-000000002"
    assert found["log"].found == "2 lines"
    assert found["lock"].found.startswith("free")


def test_what_is_broken_is_named(tmp_path: Path, toy_table: Any, write_run: Write) -> None:
    write_run(tmp_path, toy_table.rows[0].recipe())
    with open(tmp_path / folder.RESULTS, "a") as file:
        file.write(" ")
    for step in (1, 2):
        with files.writing(tmp_path / f"checkpoints/main/step-{step}") as new:
            files.write_text(new / "state.json", "{}")
    (tmp_path / "checkpoints/main/step-2/state.json").write_text("[]")
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st')
    wrong = [one for one in doctor.run_folder(tmp_path) if one.wrong]
    assert [one.what for one in wrong] == ["results", "files", "checkpoints of main"]
    assert str(tmp_path / folder.RESULTS) in wrong[0].found
    assert str(tmp_path / folder.RESULTS) in wrong[1].found
    assert "step-2 is broken" in wrong[2].found and "older one is used" in wrong[2].advice
    found = by_name(doctor.run_folder(tmp_path))
    assert found["log"].found == "2 lines; its last line is cut off"


def test_an_unfinished_run_says_how_to_go_on(
    tmp_path: Path, toy_table: Any, write_run: Write
) -> None:
    write_run(tmp_path, toy_table.rows[0].recipe(), status="failed", reason="the loss is NaN.")
    found = by_name(doctor.run_folder(tmp_path))
    assert found["results"].found.endswith("failed: the loss is NaN.")
    assert "--resume" in found["results"].advice
    assert "none yet" in found["manifest"].found and "none" in found["checkpoints"].found


def test_unreadable_results_are_a_finding(tmp_path: Path) -> None:
    (tmp_path / folder.RESULTS).write_text("{")
    found = by_name(doctor.run_folder(tmp_path))
    assert found["results"].wrong and "results.json" in found["results"].found


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(BadInput, match=str(path)):
            doctor.run_folder(path)
