"""Repairs: what is good stays, what is broken is set aside, and a resume ends as if nothing was."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import cli, files
from overt.data.features import FeatureCache
from overt.errors import BadInput, Damaged
from overt.recipes import doctor, repair
from tests.data import test_features as cached
from tests.recipes import tiny

Ran = Callable[[str], tuple[Path, dict[str, Any]]]


def save(folder: Path, text: str = "{}") -> Path:
    with files.writing(folder) as new:
        files.write_text(new / "state.json", text)
    return folder


def spoil(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def everything(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was stopped, with three checkpoints."""
    files.write_json(
        tmp_path / "results.json",
        {"status": "stopped", "recipe": "toy", "settings": {}, "seed": 0},
    )
    for step in (1, 2, 3):
        save(tmp_path / f"checkpoints/train/step-{step:09d}")
    return tmp_path


def test_a_whole_run_is_left_alone(run: Path) -> None:
    before = everything(run)
    assert repair.repairs(run) == [] and repair.repair(run) == []
    assert everything(run) == {**before, ".lock": b""}


def test_looking_changes_nothing_and_tells_what_would_be_done(run: Path) -> None:
    spoil(run / "checkpoints/train/step-000000003/state.json")
    dead = dead_process()
    machine, left = files._machine(), run / "checkpoints/train"
    (left / f".tmp-{machine}-{dead}-5-0-step-000000004").mkdir()
    (run / ".lock").write_text(f"process {dead} on here\n")
    before = everything(run)
    said = [one.sentence for one in repair.repairs(run)]
    told = [one.found for one in doctor.run_folder(run) if one.what == "repair"]
    assert everything(run) == before
    assert told == [f"would {one}" for one in said] and len(said) == 3
    assert f"process {dead} on here, which is no more" in said[0]
    assert "clear away" in said[1] and "--resume goes on from step-000000002" in said[2]
    assert repair.repair(run) == said
    assert repair.repairs(run) == [] == files.leftovers(left)
    assert files.holder(run) == ("", False)


def dead_process() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_broken_checkpoint_is_moved_and_not_deleted(run: Path) -> None:
    newest = run / "checkpoints/train/step-000000003"
    spoil(newest / "state.json")
    broken = everything(newest)
    repair.repair(run)
    assert not newest.exists()
    assert everything(run / "set-aside/checkpoints/train/step-000000003") == broken
    spoil(save(newest) / "state.json")
    repair.repair(run)  # the place is taken
    assert (run / "set-aside/checkpoints/train/step-000000003.1").is_dir()
    found, wrong = files.newest(run / "checkpoints/train", "step-")
    assert found is not None and found.name == "step-000000002" and wrong == []


def test_a_stage_without_a_whole_checkpoint_begins_again(run: Path) -> None:
    for step in (1, 2, 3):
        spoil(run / f"checkpoints/train/step-{step:09d}/state.json")
    said = repair.repair(run)
    assert len(said) == 3 and all("--resume begins the stage again" in one for one in said)
    assert files.newest(run / "checkpoints/train", "step-") == (None, [])
    assert len(list((run / "set-aside").rglob("step-*"))) == 3


def test_the_best_weights_come_from_their_checkpoint_where_that_is_left(run: Path) -> None:
    import torch

    stage = run / "checkpoints/train"
    for step in (4, 5):
        with files.writing(stage / f"step-{step:09d}") as new:
            files.write_json(new / "state.json", {"best_step": 4})
            files.write_tensors(new / "model.safetensors", {"w": torch.tensor([float(step)])})
    with files.writing(stage / "best") as new:
        files.write_tensors(new / "model.safetensors", {"w": torch.tensor([4.0])})
    wanted = everything(stage / "best")
    spoil(stage / "best/model.safetensors")
    assert any(one.wrong and one.what == "best of train" for one in doctor.run_folder(run))
    (said,) = repair.repair(run)
    assert "its weights are those of step-000000004" in said
    assert everything(stage / "best") == wanted
    shutil.rmtree(stage / "step-000000004")
    spoil(stage / "best/model.safetensors")
    assert repair.repair(run) == []  # nobody knows them any more
    assert any(one.wrong for one in doctor.run_folder(run))


def test_a_folder_that_a_dead_writer_had_set_aside_is_put_back(run: Path) -> None:
    newest = run / "checkpoints/train/step-000000003"
    aside = newest.with_name(f".old-{files._machine()}-{dead_process()}-5-0-{newest.name}")
    newest.rename(aside)
    (said,) = repair.repair(run)
    assert said.startswith("put back") and files.is_whole(newest)


def test_a_process_at_work_is_not_disturbed(run: Path) -> None:
    spoil(run / "checkpoints/train/step-000000003/state.json")
    before = everything(run)
    with files.lock(run):
        with pytest.raises(BadInput, match=f"in use by process {os.getpid()}"):
            repair.repair(run)
        told = {one.what: one.found for one in doctor.run_folder(run)}
        assert "in use by process" in told["lock"] and "in use by" in told["repair"]
    assert everything(run) == {**before, ".lock": b""}


def test_broken_shards_of_a_cache_are_set_aside_and_made_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cached.make(cache)
    wanted = cached.tree(cache)
    spoil(cache / "shard-00001/features.npy")
    assert [one.wrong for one in doctor.run_folder(cache)].count(True) == 1
    (said,) = repair.repair(cache)
    assert "shard-00001" in said and "keeps the whole ones" in said
    with pytest.raises(Damaged, match="shard-00001 is missing"):
        FeatureCache(cache)
    asked: list[int] = []

    def encode(batch: Any) -> Any:
        asked.extend(batch.labels.tolist())
        return cached.encode(batch)

    cached.make(cache, encode)
    shutil.rmtree(cache / "set-aside")
    assert cached.tree(cache) == wanted and {label // 10 for label in asked} == {3, 4, 5}
    for name in ("cache.json", "manifest.json"):  # what the cache says of itself
        spoil(cache / name)
        assert len(repair.repair(cache)) == 2
        cached.make(cache)
        shutil.rmtree(cache / "set-aside")
        assert cached.tree(cache) == wanted


@pytest.mark.parametrize(
    "name", ["samples.npz", "report.html", "model/model.safetensors", "manifest.json"]
)
def test_a_finished_run_is_made_whole_again_by_a_resume(
    ran: Ran, tmp_path: Path, name: str
) -> None:
    whole = ran("scenes-none")[0]
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    spoil(out / name)
    assert any(one.wrong for one in doctor.run_folder(out))
    assert all("set aside" in said for said in repair.repair(out))
    assert (out / "set-aside" / name.partition("/")[0]).exists()
    tiny.run(tiny.recipe("scenes-none"), out, resume=True)
    assert not any(one.wrong for one in doctor.run_folder(out))
    for kept in ("samples.npz", "model/model.safetensors", "log.jsonl"):
        assert (out / kept).read_bytes() == (whole / kept).read_bytes()


def test_results_that_cannot_be_told_are_left_for_the_user(run: Path) -> None:
    spoil(run / "results.json")
    files.seal(run, [])
    (run / "results.json").write_text("{")
    assert repair.repairs(run) == []
    assert any(one.wrong and one.what == "results" for one in doctor.run_folder(run))


def test_the_command_repairs_says_so_and_is_done(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(run / "checkpoints/train/step-000000003/state.json")
    assert cli.main(["doctor", str(run)]) == 2
    assert (run / "checkpoints/train/step-000000003").exists()
    capsys.readouterr()
    assert cli.main(["doctor", "--repair", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"repair: set aside {run}/checkpoints/train/step-000000003: " in said.replace("\n", "")
    assert cli.main(["doctor", "--repair", str(run)]) == 0
    assert "repair: nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["none"], ["empty"], ["file"], ["hf:gpt2"]])
def test_what_cannot_be_repaired_is_refused(
    tmp_path: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert cli.main(["doctor", "--repair", *words]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and " run" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
