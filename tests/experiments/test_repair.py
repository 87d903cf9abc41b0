"""Repair of runs and caches: corrupt files are set aside and remade on resume."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import cli, io
from overt.data.feature_cache import FeatureCache
from overt.errors import CorruptFileError, RunError, UserError
from overt.experiments import repair
from overt.inspect import doctor
from tests.data import test_feature_cache as feature_cache_tests
from tests.experiments import tiny

FinishedRun = Callable[[str], tuple[Path, dict[str, Any]]]


def save(folder: Path, text: str = "{}") -> Path:
    with io.atomic_folder(folder) as new:
        io.write_text(new / "state.json", text)
    return folder


def corrupt_file(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a stopped run with three checkpoints."""
    io.write_json(
        tmp_path / "results.json",
        {"status": "stopped", "recipe": "toy", "settings": {}, "seed": 0},
    )
    for step in (1, 2, 3):
        save(tmp_path / f"checkpoints/train/step-{step:09d}")
    return tmp_path


def test_an_intact_run_is_unchanged(run: Path) -> None:
    before = read_files(run)
    assert repair.plan_repairs(run) == [] and repair.repair(run) == []
    assert read_files(run) == {**before, ".lock": b""}


def test_plan_repairs_changes_nothing_and_describes_the_repairs(run: Path) -> None:
    corrupt_file(run / "checkpoints/train/step-000000003/state.json")
    dead = dead_process()
    machine, left = io._machine_id(), run / "checkpoints/train"
    (left / f".tmp-{machine}-{dead}-5-0-step-000000004").mkdir()
    (run / ".lock").write_text(f"process {dead} on here\n")
    before = read_files(run)
    messages = [one.description for one in repair.plan_repairs(run)]
    reported = [one.found for one in doctor.check_run_folder(run) if one.what == "repair"]
    assert read_files(run) == before
    assert reported == [f"would {one}" for one in messages] and len(messages) == 3
    assert f"process {dead} on here" in messages[0]
    assert "remove" in messages[1] and "--resume continues from step-000000002" in messages[2]
    assert repair.repair(run) == messages
    assert repair.plan_repairs(run) == [] == io.stale_temporaries(left)
    assert io.lock_holder(run) == ("", False)


def dead_process() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_corrupt_checkpoint_is_moved_instead_of_deleted(run: Path) -> None:
    newest = run / "checkpoints/train/step-000000003"
    corrupt_file(newest / "state.json")
    broken = read_files(newest)
    repair.repair(run)
    assert not newest.exists()
    assert read_files(run / "set-aside/checkpoints/train/step-000000003") == broken
    corrupt_file(save(newest) / "state.json")
    repair.repair(run)  # a folder of this name exists
    assert (run / "set-aside/checkpoints/train/step-000000003.1").is_dir()
    found, wrong = io.newest(run / "checkpoints/train", "step-")
    assert found is not None and found.name == "step-000000002" and wrong == []


def test_a_stage_without_intact_checkpoint_restarts(run: Path) -> None:
    for step in (1, 2, 3):
        corrupt_file(run / f"checkpoints/train/step-{step:09d}/state.json")
    messages = repair.repair(run)
    assert len(messages) == 3 and all("--resume restarts the stage" in one for one in messages)
    assert io.newest(run / "checkpoints/train", "step-") == (None, [])
    assert len(list((run / "set-aside").rglob("step-*"))) == 3


def test_best_weights_are_restored_from_their_checkpoint(run: Path) -> None:
    import torch

    stage = run / "checkpoints/train"
    for step in (4, 5):
        with io.atomic_folder(stage / f"step-{step:09d}") as new:
            io.write_json(new / "state.json", {"best_step": 4})
            io.write_tensors(new / "model.safetensors", {"w": torch.tensor([float(step)])})
    with io.atomic_folder(stage / "best") as new:
        io.write_tensors(new / "model.safetensors", {"w": torch.tensor([4.0])})
    wanted = read_files(stage / "best")
    corrupt_file(stage / "best/model.safetensors")
    assert any(one.wrong and one.what == "best of train" for one in doctor.check_run_folder(run))
    (messages,) = repair.repair(run)
    assert "from step-000000004" in messages
    assert read_files(stage / "best") == wanted
    shutil.rmtree(stage / "step-000000004")
    corrupt_file(stage / "best/model.safetensors")
    assert repair.repair(run) == []  # the weights are lost
    assert any(one.wrong for one in doctor.check_run_folder(run))


def test_a_folder_moved_by_a_dead_process_is_restored(run: Path) -> None:
    newest = run / "checkpoints/train/step-000000003"
    aside = newest.with_name(f".old-{io._machine_id()}-{dead_process()}-5-0-{newest.name}")
    newest.rename(aside)
    (messages,) = repair.repair(run)
    assert messages.startswith("restore") and io.is_intact(newest)


def test_a_run_in_use_is_not_repaired(run: Path) -> None:
    corrupt_file(run / "checkpoints/train/step-000000003/state.json")
    before = read_files(run)
    with io.lock(run):
        with pytest.raises(UserError, match=rf"in use.*process {os.getpid()}"):
            repair.repair(run)
        reported = {one.what: one.found for one in doctor.check_run_folder(run)}
        assert "in use by process" in reported["lock"] and "in use by" in reported["repair"]
    assert read_files(run) == {**before, ".lock": b""}


def test_corrupt_cache_shards_are_set_aside_and_remade(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    feature_cache_tests.build_cache(cache)
    wanted = feature_cache_tests.file_hashes(cache)
    corrupt_file(cache / "shard-00001/features.npy")
    assert [one.wrong for one in doctor.check_run_folder(cache)].count(True) == 1
    (messages,) = repair.repair(cache)
    assert "shard-00001" in messages and "keeps the intact ones" in messages
    with pytest.raises(CorruptFileError, match=r"00001.*missing"):
        FeatureCache(cache)
    encoded: list[int] = []

    def encode(batch: Any) -> Any:
        encoded.extend(batch.labels.tolist())
        return feature_cache_tests.encode(batch)

    feature_cache_tests.build_cache(cache, encode)
    shutil.rmtree(cache / "set-aside")
    assert feature_cache_tests.file_hashes(cache) == wanted and {
        label // 10 for label in encoded
    } == {
        3,
        4,
        5,
    }
    for name in ("cache.json", "manifest.json"):  # metadata of the cache
        corrupt_file(cache / name)
        assert len(repair.repair(cache)) == 2
        feature_cache_tests.build_cache(cache)
        shutil.rmtree(cache / "set-aside")
        assert feature_cache_tests.file_hashes(cache) == wanted


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["samples.npz", "report.html", "model/model.safetensors", "manifest.json"]
)
def test_resume_restores_corrupt_files_of_a_finished_run(
    finished_run: FinishedRun, tmp_path: Path, name: str
) -> None:
    whole = finished_run("scenes-none")[0]
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    corrupt_file(out / name)
    assert any(one.wrong for one in doctor.check_run_folder(out))
    assert all("set aside" in messages for messages in repair.repair(out))
    assert (out / "set-aside" / name.partition("/")[0]).exists()
    tiny.run(tiny.recipe("scenes-none"), out, resume=True)
    assert not any(one.wrong for one in doctor.check_run_folder(out))
    for kept in ("samples.npz", "model/model.safetensors", "log.jsonl"):
        assert (out / kept).read_bytes() == (whole / kept).read_bytes()


def test_unreadable_results_are_left_for_the_user(run: Path) -> None:
    corrupt_file(run / "results.json")
    io.write_manifest(run, [])
    (run / "results.json").write_text("{")
    assert repair.plan_repairs(run) == []
    assert any(one.wrong and one.what == "results" for one in doctor.check_run_folder(run))


def test_doctor_repair_repairs_and_reports(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt_file(run / "checkpoints/train/step-000000003/state.json")
    assert cli.main(["doctor", str(run)]) == 2
    assert (run / "checkpoints/train/step-000000003").exists()
    capsys.readouterr()
    assert cli.main(["doctor", "--repair", str(run)]) == 0
    messages = capsys.readouterr().out
    assert f"repair: set aside {run}/checkpoints/train/step-000000003: " in messages.replace(
        "\n", ""
    )
    assert cli.main(["doctor", "--repair", str(run)]) == 0
    assert "repair: nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["none"], ["empty"], ["file"], ["hf:gpt2"]])
def test_doctor_repair_of_other_paths_fails(
    tmp_path: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert cli.main(["doctor", "--repair", *words]) == 2
    messages = capsys.readouterr().err
    assert len(messages.splitlines()) == 1 and " run" in messages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE, errno.EIO, errno.EACCES])
def test_files_with_read_errors_are_not_set_aside(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    before = read_files(run)
    plain = os.open

    def short(path: str, flags: int, *rest: Any) -> int:
        if "state.json" in str(path):
            raise OSError(code, os.strerror(code))
        return plain(path, flags, *rest)

    monkeypatch.setattr(io.os, "open", short)
    with pytest.raises(RunError, match="not be read"):
        repair.repair(run)
    with pytest.raises(RunError, match="not be read"):
        doctor.check_run_folder(run)
    monkeypatch.undo()
    assert read_files(run) == {**before, ".lock": b""}


def test_a_transient_digest_error_moves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrong = io.digest, ["once"]

    def flicker(path: Path) -> str:
        return wrong.pop() if wrong and "step-000000003" in str(path) else plain(path)

    monkeypatch.setattr(io, "digest", flicker)
    repair.repair(run)
    assert (run / "checkpoints/train/step-000000003").is_dir()


def test_repair_with_too_little_memory_moves_nothing(run: Path) -> None:
    """As under `ulimit -v`: no memory above that in use can be allocated."""
    before = read_files(run)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from overt.experiments.repair import repair\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        "repair(Path(sys.argv[1]))"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, check=False)
    assert read_files(run) == {**before, ".lock": b""}
