"""Whole runs, tiny: what they leave, how they end, and that going on changes nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt import cli, files, models
from overt.errors import BadInput, Damaged, Failed, Stopped
from overt.recipes import evaluation, folder, recipes, running, settings
from overt.recipes.recipe import Context, Figure
from overt.show.sample import load_gallery
from overt.train import Reporter
from tests.recipes import tiny

Ran = Callable[[str], tuple[Path, dict[str, Any]]]
# Those of self-supervision train twice, those of hard attention keep 0 and 1 in the place of
# shares, and captions are neither right nor wrong; all three have tests of their own.
NAMES = [name for name in recipes() if not name.startswith(("ssa-", "han-", "vgp-", "a2-"))]
ON_DISK = {
    "cifar10-cnn": ("cifar10", models.SmallCNN),
    "cifar100-cnn": ("cifar100", models.SmallCNN),
    "trec-attention": ("trec6", models.TextClassifier),
    "easyvqa-soft": ("easyvqa", models.VQA),
    "ltpa-cifar10": ("cifar10", models.VGGAttention),
    "ltpa-cifar100": ("cifar100", models.VGGAttention),
    "ltpa-svhn": ("svhn", models.VGGAttention),
    "ltpa-cub": ("cub", models.VGGAttention),
}
MADE = {"ltpa-scenes": models.VGGAttention}  # of scenes; the others answer questions
KEYS = """schema status recipe settings seed device world_size versions commit command data paper
ours steps epochs parameters flops seconds samples_per_second peak_memory""".split()
# What may differ between two runs of the same: clocks, memory, the words it was started with, and
# the state of the checkout.
CLOCK = {"started", "seconds", "samples_per_second", "peak_memory", "command", "commit"}


def lasting(out: Path) -> dict[str, Any]:
    """What a run leaves that does not depend on the clock or on where it is."""
    results = files.read_json(out / "results.json")
    samples = files.read_arrays(out / "samples.npz")
    return {
        "results": {key: value for key, value in results.items() if key not in CLOCK},
        "samples": {name: array.tolist() for name, array in samples.items()},
        "weights": (out / "model/model.safetensors").read_bytes(),
        "log": (out / "log.jsonl").read_bytes(),
        "gallery": files.digest(out / "gallery/samples.json"),
    }


def check_same(one: Path, other: Path) -> None:
    found, wanted = lasting(one), lasting(other)
    for part in wanted:  # by their words, because NaN is not equal to NaN
        assert repr(found[part]) == repr(wanted[part]), part


# What a run leaves


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_and_leaves_what_is_documented(ran: Ran, name: str) -> None:
    out, results = ran(name)
    assert set(KEYS) <= set(results)
    assert files.read_json(out / "results.json") == results
    assert (results["schema"], results["status"], results["recipe"]) == (1, "done", name)
    assert results["settings"] == settings.to_json(tiny.recipe(name))
    assert (results["seed"], results["world_size"], results["steps"]) == (0, 1, 2)
    assert results["command"] == f"overt run {name}" and results["device"].startswith("cpu")
    assert {"python", "torch", "overt"} <= set(results["versions"])
    own = results["data"][:3]  # others may follow that the model was taken to
    assert [one["split"] for one in own] == ["train", "val", "test"]
    assert all(1 <= one["n"] <= 16 for one in own)
    for one in results["data"]:
        assert re.fullmatch("[0-9a-f]{64}", one["hash"])
    for fact in ("parameters", "flops", "seconds", "samples_per_second", "peak_memory"):
        assert results[fact] > 0
    files.verify(out)
    elsewhere = any(measure.startswith("transfer_") for measure in results["ours"])
    wanted = set(running.LOOSE) - (set() if elsewhere else {"elsewhere.npz"})
    assert set(files.verify(out)["files"]) == wanted
    assert (out / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")


@pytest.mark.parametrize("name", NAMES)
def test_one_row_a_test_sample_and_the_numbers_are_their_means(ran: Ran, name: str) -> None:
    out, results = ran(name)
    samples = files.read_arrays(out / "samples.npz")
    n = results["data"][2]["n"] * (4 if name.startswith("scenes") else 1)
    assert {len(array) for array in samples.values()} == {n}
    assert len(set(samples["id"].tolist())) == n
    assert results["ours"]["accuracy"]["n"] == n
    for measure, one in results["ours"].items():
        assert {"value", "unit", "direction", "split", "n", "low", "high"} == set(one)
        assert one["split"] == "test" and one["direction"] in ("higher", "lower", "neither")
        if measure == "ece" or measure.startswith("transfer_"):
            continue  # not a mean, and not of the samples of the test
        values = [value for value in samples[measure].tolist() if value == value]
        assert one["n"] == len(values)
        assert one["value"] == pytest.approx(sum(values) / len(values), abs=1e-9)
        assert one["low"] <= one["value"] <= one["high"]
    right = samples["prediction"] == samples["truth"]
    np.testing.assert_array_equal(right, samples["accuracy"] == 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_gallery_shows_samples_of_the_test(ran: Ran, name: str) -> None:
    out, _ = ran(name)
    samples = files.read_arrays(out / "samples.npz")
    rows = {one: row for row, one in enumerate(samples["id"].tolist())}
    shown = load_gallery(out / "gallery")
    groups = samples["group"].tolist()
    assert {one.group for one in shown} == set(groups)
    assert len(shown) >= min(len(groups), evaluation.SHOWN)
    for one in shown:
        row = rows[one.id]
        assert (one.prediction, one.truth) == (samples["prediction"][row], samples["truth"][row])
        assert one.scores["accuracy"] == samples["accuracy"][row]
        assert (one.image is None) == (name == "trec-attention")
        attends = name in ("scenes-soft", "scenes-truth", "easyvqa-soft") or name.startswith("ltpa")
        assert (one.cells is not None) == attends
        if one.cells is not None:
            assert one.cells.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_saved_model_answers_as_the_run_did(
    ran: Ran, name: str, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, results = ran(name)
    tiny.expect_few(monkeypatch)
    kind = ON_DISK[name][1] if name in ON_DISK else MADE.get(name, models.VQA)
    model = kind.from_pretrained(out / "model")
    assert sum(p.numel() for p in model.parameters()) == results["parameters"]
    experiment = tiny.recipe(name).build(Context(tmp_path, 0, "cpu", few))
    batch = experiment.example()
    with torch.no_grad():
        logits = model(batch).prediction
    samples = files.read_arrays(out / "samples.npz")
    first = slice(len(batch))
    assert batch.ids == tuple(samples["id"][first].tolist())
    sure, chosen = logits.softmax(dim=-1).max(dim=-1)
    np.testing.assert_allclose(sure.numpy(), samples["confidence"][first], atol=1e-5)
    np.testing.assert_array_equal((chosen == batch.labels).numpy(), samples["accuracy"][first])


@pytest.mark.parametrize("name", list(ON_DISK))
def test_recipes_read_the_official_files(
    name: str, data_root: Path, needs: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    root = needs(data_root, ON_DISK[name][0])
    results = tiny.run(tiny.recipe(name), tmp_path / "a", data_root=root)
    assert results["status"] == "done" and results["data"][2]["n"] == 16
    files.verify(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("scenes-soft", {"task"}),
        ("scenes-truth", {"task", "attention"}),
        ("cifar10-cnn", {"task"}),
        ("trec-attention", {"task", "redundancy"}),
    ],
)
def test_the_log_has_the_losses_of_the_recipe_and_no_clock(
    ran: Ran, name: str, wanted: set[str]
) -> None:
    import json

    lines = [json.loads(line) for line in (ran(name)[0] / "log.jsonl").read_text().splitlines()]
    assert {loss for line in lines for loss in line.get("losses", {})} == wanted
    assert {line["split"] for line in lines} == {"train", "val"}
    assert not any("time" in key or "second" in key for line in lines for key in line)


def test_the_paper_stands_beside_ours(ran: Ran) -> None:
    assert ran("scenes-soft")[1]["paper"] == {}
    stated = ran("trec-attention")[1]["paper"]["accuracy"]
    assert stated["value"] == 0.812 and stated["direction"] == "higher"
    assert running.stated(Figure(1.5, "nats", False, "Table 1")) == {
        "value": 1.5,
        "unit": "nats",
        "direction": "lower",
        "source": "Table 1",
    }


def test_the_same_seed_gives_the_same_run_and_another_does_not(ran: Ran, tmp_path: Path) -> None:
    tiny.run(tiny.recipe("scenes-soft"), tmp_path / "a")
    check_same(tmp_path / "a", ran("scenes-soft")[0])
    tiny.run(tiny.recipe("scenes-soft"), tmp_path / "b", seed=1)
    one, other = (lasting(tmp_path / name)["weights"] for name in "ab")
    assert one != other


def test_a_folder_may_be_named_by_text(ran: Ran) -> None:
    out, results = ran("scenes-none")
    recipe = tiny.recipe("scenes-none")
    again = running.run(recipe, str(out), seed=results["seed"], device="cpu", resume=True)
    assert again == results


def test_a_finished_run_is_returned_as_it_is(ran: Ran) -> None:
    out, results = ran("scenes-soft")
    before = (out / "results.json").stat().st_mtime_ns
    assert tiny.run(tiny.recipe("scenes-soft"), out, resume=True) == results
    assert (out / "results.json").stat().st_mtime_ns == before
    with pytest.raises(BadInput, match="holds a finished run"):
        tiny.run(tiny.recipe("scenes-soft"), out)


# Runs that end early


def test_a_run_that_finds_no_data_leaves_the_folder_free(few: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "a", tiny.recipe("trec-attention")
    with pytest.raises(BadInput, match=r"train_5500\.label is missing"):
        tiny.run(recipe, out, data_root=tmp_path)
    held = folder.look(out)
    assert held is not None and held.blank and held.results["status"] == "failed"
    assert "train_5500.label is missing" in held.results["reason"]
    with pytest.raises(Damaged, match="train_5500"):  # the same folder, and other settings
        tiny.run(tiny.recipe("trec-attention", "train.rate=0.5"), out, data_root=few)
    with pytest.MonkeyPatch.context() as patch:
        tiny.expect_few(patch)
        with pytest.raises(BadInput, match=r"was 0\.5"):
            tiny.run(recipe, out, data_root=few, resume=True)
        assert tiny.run(recipe, out, data_root=few)["status"] == "done"
    files.verify(out)


def test_a_run_that_found_no_data_can_be_resumed(few: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "a", tiny.recipe("trec-attention")
    with pytest.raises(BadInput):
        tiny.run(recipe, out, data_root=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        tiny.expect_few(patch)
        done = tiny.run(recipe, out, data_root=few, resume=True)
    assert done["status"] == "done" and "reason" not in done


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ZeroDivisionError("oh\nno"), "failed"),
        (Failed("no space."), "failed"),
        (MemoryError(), "failed"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_what_was_trained_outlives_an_error_after_it(
    ran: Ran, tmp_path: Path, error: BaseException, status: str
) -> None:
    out, recipe = tmp_path / "a", tiny.recipe("scenes-soft")

    def fail(*args: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation.Judge, "evaluate", fail)
        with pytest.raises(type(error)):
            tiny.run(recipe, out)
    held = folder.look(out)
    assert held is not None and held.results["status"] == status and not held.blank
    if status == "failed":
        assert held.results["reason"] == (" ".join(str(error).split()) or type(error).__name__)
    with pytest.raises(BadInput, match="add --resume"):
        tiny.run(recipe, out)
    with pytest.MonkeyPatch.context() as patch:  # what is trained is not trained again
        patch.setattr(Reporter, "step", fail)
        tiny.run(recipe, out, resume=True)
    check_same(out, ran("scenes-soft")[0])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_step_and_the_run_goes_on(
    ran: Ran, tmp_path: Path, number: int, code: int
) -> None:
    out, recipe = tmp_path / "a", tiny.recipe("scenes-soft")
    step = Reporter.step

    def interrupt(self: Reporter, at: int, means: Any) -> None:
        os.kill(os.getpid(), number)
        step(self, at, means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "step", interrupt)
        with pytest.raises(Stopped, match=r"step 1 of 2 .* --resume goes on") as caught:
            tiny.run(recipe, out, title="mine")
    assert caught.value.code == code
    assert files.read_json(out / "results.json")["status"] == "stopped"
    assert tiny.run(recipe, out, resume=True)["title"] == "mine"
    one, other = lasting(out), lasting(ran("scenes-soft")[0])
    assert one["weights"] == other["weights"] and one["log"] == other["log"]


def test_sigterm_while_nothing_trains_is_answered_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    former = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(evaluation.Judge, "evaluate", interrupt)
    with pytest.raises(Stopped, match="with --resume") as caught:
        tiny.run(tiny.recipe("scenes-none"), tmp_path / "a")
    assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) == former
    assert files.read_json(tmp_path / "a/results.json")["status"] == "stopped"
    monkeypatch.undo()
    assert tiny.run(tiny.recipe("scenes-none"), tmp_path / "a", resume=True)["status"] == "done"


def test_a_full_disk_does_not_hide_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = files.write_json, []

    def full(path: Path, value: Any) -> None:
        if path.name == "results.json" and written:
            raise Failed("no space left.")
        written.append(path)
        write(path, value)

    monkeypatch.setattr(files, "write_json", full)
    with pytest.raises(BadInput, match="is missing"):
        tiny.run(tiny.recipe("cifar10-cnn"), tmp_path / "a", data_root=tmp_path)


# What is told about the machine


def test_the_commit_is_that_of_this_checkout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = running.commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", found)
    installed = tmp_path / "venv/overt/recipes/running.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(running, "__file__", str(installed))
    assert running.commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    try:
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    except OSError:
        pytest.skip("there is no git here")
    assert running.commit() is None  # installed below somebody's project


def test_a_device_is_called_by_its_name() -> None:
    assert re.fullmatch(r"cpu \S+, \d+ threads", running.describe(torch.device("cpu")))


# In processes of their own, killed


SETTINGS = (
    "data.limit=48",
    "model.width=0.25",
    "train.epochs=3",
    "train.batch=4",
    "train.save_every=4",
)


def start(out: Path, *words: str, sets: Sequence[str] = SETTINGS) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "overt", "run", "scenes-soft", "--out", str(out)]
    command += ["--device", "cpu", *words]
    command += [word for one in sets for word in ("--set", one)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    _, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said


def wait_for(process: "subprocess.Popen[str]", there: Callable[[], bool]) -> bool:
    """Whether it came to be before the process ended."""
    while process.poll() is None:
        if there():
            return True
        time.sleep(0.002)
    return False


def reached(out: Path, step: int) -> Callable[[], bool]:
    """Whether there is a checkpoint of this step or of a later one."""
    parent = out / "checkpoints/train"
    return lambda: any(int(one.name[5:]) >= step for one in parent.glob("step-*[0-9]"))


@pytest.fixture(scope="module", params=[1, 2], ids=lambda value: f"accumulate-{value}")
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[str, ...]]:
    """A run that nobody disturbs, and its settings."""
    out = tmp_path_factory.mktemp("whole") / "a"
    sets = (*SETTINGS, f"train.accumulate={request.param}")
    finish(start(out, sets=sets))
    return out, sets


@pytest.mark.long
def test_killed_at_any_moment_a_run_ends_the_same(
    whole: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    """SIGKILL before the first checkpoint, between and in the midst of them, and at the end."""
    undisturbed, sets = whole
    out = tmp_path / "a"
    moments: list[tuple[Callable[[], bool], float]] = [
        ((out / "results.json").exists, 0.0),
        ((out / "log.jsonl").exists, 0.01),
        (reached(out, 4), 0.0),
        (reached(out, 8), 0.03),
        (reached(out, 12), 0.01),
        ((out / "model").exists, 0.0),
        ((out / "samples.npz").exists, 0.005),
    ]
    kills = 0
    for there, later in moments:
        resume = ["--resume"] if (out / "results.json").exists() else []
        process = start(out, *resume, sets=sets)
        if wait_for(process, there):
            time.sleep(later)
            process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
    finish(start(out, "--resume", sets=sets))
    assert kills >= 4
    check_same(out, undisturbed)
    files.verify(out)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_answered_with_the_way_to_go_on(
    whole: tuple[Path, tuple[str, ...]], tmp_path: Path, number: int, code: int
) -> None:
    undisturbed, sets = whole
    out = tmp_path / "a"
    process = start(out, sets=sets)
    assert wait_for(process, reached(out, 4))
    process.send_signal(number)
    said = finish(process, code)
    last = said.splitlines()[-1]
    assert last.startswith("overt: stopped at step ") and "with --resume goes on" in last
    assert files.read_json(out / "results.json")["status"] == "stopped"
    assert "--resume" in finish(start(out, sets=sets), 2)
    finish(start(out, "--resume", sets=sets))
    check_same(out, undisturbed)


# Tables of real runs


def test_a_table_prints_ours_with_deviation_and_reuses_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["table", "scenes", "--out", str(tmp_path), "--seeds", "2", "--device", "cpu"]
    args += ["--rows", "no-attention,soft-held-out"]
    args += [word for one in tiny.SETS for word in ("--set", one)]
    args += ["--set", "data.limit=48"]  # two rounds of test scenes: one has no relate
    assert cli.main(args) == 0
    out, err = capsys.readouterr()
    number = r"-?\d+\.\d+ ± \d+\.\d+"
    line = next(line for line in out.splitlines() if line.startswith("no-attention"))
    assert re.fullmatch(rf"no-attention +{number}( +–)+ +2 +2 run", line)
    line = next(line for line in out.splitlines() if line.startswith("soft-held-out"))
    assert re.fullmatch(rf"soft-held-out( +{number}){{7}} +2 +2 run", line)
    assert err.count("done in") == 4
    assert cli.main(args) == 0
    out, err = capsys.readouterr()
    assert err.count("reused from") == 4 and out.count("2 reused") == 2


def test_a_table_stands_beside_the_papers_figures(
    data_root: Path,
    needs: Callable[[Path, str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = needs(data_root, "trec6")
    args = ["table", "baselines", "--out", str(tmp_path), "--seeds", "2", "--device", "cpu"]
    args += ["--data", str(root), "--rows", "trec"]
    args += [word for one in tiny.SETS for word in ("--set", one)]
    assert cli.main(args) == 0
    out, _ = capsys.readouterr()
    line = next(line for line in out.splitlines() if line.startswith("trec"))
    assert re.match(r"trec +0\.\d{3} ± 0\.\d{3} +0\.812 ", line)
