"""The doctor: findings about the machine, and about valid, corrupt and unfinished run folders."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import io
from overt.errors import UserError
from overt.experiments import run_folder
from overt.inspect import doctor
from overt.inspect.doctor import Finding

WriteRun = Callable[..., dict[str, Any]]


def index_findings(findings: list[Finding]) -> dict[str, Finding]:
    return {one.what: one for one in findings}


def test_the_machine_has_what_overt_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    import torch

    monkeypatch.delenv("OVERT_DATA", raising=False)
    found = index_findings(doctor.check_machine(tmp_path))
    assert found["python"].found.startswith(platform.python_version())
    assert found["torch"].found == torch.__version__
    assert {"einops", "numpy", "cpu", "data folder", "cache folder", "browser"} <= set(found)
    assert found["data folder"].found == str(tmp_path)
    assert (found["data scenes"].found, found["data cifar10"].found) == ("found", "not found")
    assert found["data cifar10"].advice
    assert not any(one.wrong for one in found.values())


def test_problems_come_first_and_datasets_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: None if p == "einops" else known(p))
    found = doctor.check_machine(tmp_path)
    assert found[0].what == "einops" and found[0].wrong and not found[1].wrong
    names = [one.what for one in found]
    assert names[1:5] == ["overt", "python", "torch", "cpu"]
    assert names.index("browser") < names.index("data folder") < names.index("data scenes")
    assert all(name.startswith("data ") for name in names[names.index("data folder") :])


def test_absent_datasets_share_a_line(tmp_path: Path) -> None:
    found = doctor.check_machine(tmp_path)
    absent = [one.what for one in found if one.found == "not found"]
    brief = doctor.brief_findings(found)
    assert len(brief) == len(found) - len(absent) + 1 and len(absent) > 9
    assert brief[-1].found.startswith(f"{len(absent)}: ") and "cifar10" in brief[-1].found
    assert doctor.brief_findings([Finding("cpu", "2 cores")]) == [Finding("cpu", "2 cores")]


def test_a_missing_package_is_found_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda p: None if p in ("einops", "rich", "timm") else known(p)
    )
    found = index_findings(list(doctor._packages()))
    assert found["einops"].wrong and found["einops"].advice == "pip install 'einops>=0.8'"
    assert found["extra cli"].advice == "pip install 'rich>=14' if needed"
    assert found["extra timm"].found == "timm missing" and not found["extra timm"].wrong
    assert found["extra timm"].advice == "pip install 'timm>=1.0' if needed"


def test_a_too_old_package_is_found_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = {"transformers": "4.50.1", "torch": "2.5.0+cpu", "numpy": "2.0.0rc1"}
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: old.get(p) or known(p))
    found = index_findings(list(doctor._packages()))
    assert found["extra hf"].found == "transformers 4.50.1 is older than 4.53"
    assert found["extra hf"].advice == "pip install 'transformers>=4.53' if needed"
    assert found["torch"].wrong and found["torch"].found == "2.5.0+cpu is older than 2.6."
    assert not found["numpy"].wrong and found["numpy"].found == "2.0.0rc1"


def test_an_extra_with_many_missing_packages_is_installed_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    found = index_findings(list(doctor._packages()))
    assert found["extra dev"].advice == "pip install '.[dev]' in the checkout if needed"
    assert found["extra dev"].found.endswith(" more")


def test_a_broken_torch_is_a_finding_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcuda.so:\n cannot open")

    monkeypatch.setattr(importlib, "import_module", broken)
    (found,) = doctor._devices()
    assert found.wrong and found.found == "cannot be imported: libcuda.so: cannot open."


def test_a_missing_data_folder_is_found(tmp_path: Path) -> None:
    (found,) = doctor._data(tmp_path / "none")
    assert found.wrong and "--data" in found.found


def test_a_finished_run_has_no_problems(
    tmp_path: Path, toy_table: Any, write_run: WriteRun
) -> None:
    recipe = toy_table.rows[0].recipe()
    write_run(tmp_path, recipe, seed=4)
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with io.atomic_folder(tmp_path / "checkpoints/main/step-000000002") as new:
        io.write_text(new / "state.json", "{}")
    found = index_findings(doctor.check_run_folder(tmp_path))
    assert not any(one.wrong for one in found.values())
    assert found["results"].found == "a finished run of toy with seed 4, done"
    assert found["files"].found == "1 files are unchanged"
    assert found["checkpoints of main"].found == "the newest valid one is step-000000002"
    assert found["log"].found == "2 lines"
    assert found["lock"].found.startswith("free")


def test_corrupt_files_of_a_run_are_found(
    tmp_path: Path, toy_table: Any, write_run: WriteRun
) -> None:
    write_run(tmp_path, toy_table.rows[0].recipe())
    with open(tmp_path / run_folder.RESULTS, "a") as file:
        file.write(" ")
    for step in (1, 2):
        with io.atomic_folder(tmp_path / f"checkpoints/main/step-{step}") as new:
            io.write_text(new / "state.json", "{}")
    (tmp_path / "checkpoints/main/step-2/state.json").write_text("[]")
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st')
    wrong = [one for one in doctor.check_run_folder(tmp_path) if one.wrong]
    assert [one.what for one in wrong] == ["results", "files", "checkpoints of main"]
    assert str(tmp_path / run_folder.RESULTS) in wrong[0].found
    assert str(tmp_path / run_folder.RESULTS) in wrong[1].found
    assert "step-2 is corrupt" in wrong[2].found and "older one is used" in wrong[2].advice
    found = index_findings(doctor.check_run_folder(tmp_path))
    assert found["log"].found == "2 lines; the last line is truncated"


def test_an_unfinished_run_is_found_with_resume_advice(
    tmp_path: Path, toy_table: Any, write_run: WriteRun
) -> None:
    write_run(tmp_path, toy_table.rows[0].recipe(), status="failed", reason="the loss is NaN.")
    found = index_findings(doctor.check_run_folder(tmp_path))
    assert found["results"].found.endswith("failed: the loss is NaN.")
    assert "--resume" in found["results"].advice
    assert "none yet" in found["manifest"].found and "none" in found["checkpoints"].found


def test_unreadable_results_are_a_finding(tmp_path: Path) -> None:
    (tmp_path / run_folder.RESULTS).write_text("{")
    found = index_findings(doctor.check_run_folder(tmp_path))
    assert found["results"].wrong and "results.json" in found["results"].found


def test_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=str(path)):
            doctor.check_run_folder(path)
