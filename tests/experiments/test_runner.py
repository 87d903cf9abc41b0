"""Complete tiny runs: output files, errors, signals and exact resume."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt import cli, io, nn
from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.data.scenes.dataset import Scenes
from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError
from overt.experiments import evaluate, run_folder, runner, settings
from overt.experiments.recipe import PublishedValue, RunContext, TrainConfig
from overt.geometry import PixelGeometry
from overt.inspect import load_model
from overt.inspect.inputs import ModelInput
from overt.inspect.look import view_model
from overt.inspect.measure import open_measured
from overt.nn.inner_checkpoint import load_inner_weights
from overt.nn.vqa.vision_language import VisionLanguageVQA
from overt.papers.catalog import build, recipes
from overt.papers.ltpa.vgg import VGGAttention
from overt.train import Reporter
from overt.viz.gallery_sample import load_gallery
from tests.experiments import tiny
from tests.nn import tiny as tiny_models

FinishedRun = Callable[[str], tuple[Path, dict[str, Any]]]
# Self-supervision trains twice, hard attention has weights of 0 and 1, and captions have no
# accuracy; all three have separate tests.
NAMES = [name for name in recipes() if not name.startswith(("ssa-", "han-", "vgp-", "a2-"))]
ON_DISK = {
    "cifar10-cnn": ("cifar10", nn.SmallCNN),
    "cifar100-cnn": ("cifar100", nn.SmallCNN),
    "trec-attention": ("trec6", nn.TextClassifier),
    "easyvqa-soft": ("easyvqa", nn.VQA),
    "ltpa-cifar10": ("cifar10", VGGAttention),
    "ltpa-cifar100": ("cifar100", VGGAttention),
    "ltpa-svhn": ("svhn", VGGAttention),
    "ltpa-cub": ("cub", VGGAttention),
}
# On scenes; the other scene recipes are VQA.
SCENES_MODELS = {"ltpa-scenes": VGGAttention, "scenes-vlm": VisionLanguageVQA}
# Results that are not means over test samples.
OVERALL = ("ece", "transfer_", "prefill", "decode", "cache", "wrong_by_")
KEYS = """schema status recipe settings seed device world_size versions commit command data paper
ours steps epochs parameters flops seconds samples_per_second peak_memory""".split()
# Values that may differ between two equal runs: times, memory, the command line and the commit.
CLOCK = {"started", "seconds", "samples_per_second", "peak_memory", "command", "commit"}


def reproducible_output(out: Path) -> dict[str, Any]:
    """Read the output of a run that does not depend on time or place."""
    results = io.read_json(out / "results.json")
    samples = io.read_arrays(out / "samples.npz")
    return {
        "results": {key: value for key, value in results.items() if key not in CLOCK},
        "samples": {name: array.tolist() for name, array in samples.items()},
        "weights": (out / "model/model.safetensors").read_bytes(),
        "log": (out / "log.jsonl").read_bytes(),
        "gallery": io.digest(out / "gallery/samples.json"),
    }


def check_same(one: Path, other: Path) -> None:
    found, wanted = reproducible_output(one), reproducible_output(other)
    for part in wanted:  # by repr, because NaN is not equal to NaN
        assert repr(found[part]) == repr(wanted[part]), part


# Output of a run


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_and_writes_the_documented_output(
    finished_run: FinishedRun, name: str
) -> None:
    out, results = finished_run(name)
    assert set(KEYS) <= set(results)
    assert io.read_json(out / "results.json") == results
    assert (results["schema"], results["status"], results["recipe"]) == (1, "done", name)
    assert results["settings"] == settings.to_json(tiny.recipe(name))
    steps = 4 if name == "scenes-vlm" else 2  # the encoder has a stage of its own
    assert (results["seed"], results["world_size"], results["steps"]) == (0, 1, steps)
    assert results["command"] == f"overt run {name}" and results["device"].startswith("cpu")
    assert {"python", "torch", "overt"} <= set(results["versions"])
    own = results["data"][:3]  # datasets of transfer may follow
    assert [one["split"] for one in own] == ["train", "val", "test"]
    assert all(1 <= one["n"] <= 16 for one in own)
    for one in results["data"]:
        assert re.fullmatch("[0-9a-f]{64}", one["hash"])
    for fact in ("parameters", "flops", "seconds", "samples_per_second", "peak_memory"):
        assert results[fact] > 0
    io.verify(out)
    elsewhere = any(measure.startswith("transfer_") for measure in results["ours"])
    wanted = set(runner.SEALED_FILES) - (set() if elsewhere else {"elsewhere.npz"})
    assert set(io.verify(out)["files"]) == wanted
    assert (out / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_results_are_means_over_one_row_per_test_sample(
    finished_run: FinishedRun, name: str
) -> None:
    out, results = finished_run(name)
    samples = io.read_arrays(out / "samples.npz")
    n = results["data"][2]["n"] * (4 if name.startswith("scenes") else 1)
    assert {len(array) for array in samples.values()} == {n}
    assert len(set(samples["id"].tolist())) == n
    assert results["ours"]["accuracy"]["n"] == n
    for measure, one in results["ours"].items():
        wanted = {"value", "unit", "direction", "split", "n", "low", "high", "version"}
        assert wanted == set(one)
        assert one["split"] == "test" and one["direction"] in ("higher", "lower", "neither")
        if measure.startswith(OVERALL):
            continue
        values = [value for value in samples[measure].tolist() if value == value]
        assert one["n"] == len(values)
        assert one["value"] == pytest.approx(sum(values) / len(values), abs=1e-9)
        if one["low"] is None:  # constant values have no interval
            assert one["high"] is None and len(set(values)) == 1
        else:
            assert one["low"] <= one["value"] <= one["high"]
    right = samples["prediction"] == samples["truth"]
    np.testing.assert_array_equal(right, samples["accuracy"] == 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_gallery_shows_test_samples(finished_run: FinishedRun, name: str) -> None:
    out, _ = finished_run(name)
    samples = io.read_arrays(out / "samples.npz")
    rows = {one: row for row, one in enumerate(samples["id"].tolist())}
    shown = load_gallery(out / "gallery")
    groups = samples["group"].tolist()
    assert {one.group for one in shown} == set(groups)
    assert len(shown) >= min(len(groups), evaluate.GALLERY_SIZE)
    for one in shown:
        row = rows[one.id]
        assert (one.prediction, one.truth) == (samples["prediction"][row], samples["truth"][row])
        assert one.scores["accuracy"] == samples["accuracy"][row]
        assert (one.image is None) == (name == "trec-attention")
        attends = name.startswith(("scenes-soft", "scenes-truth", "scenes-vlm", "easyvqa", "ltpa"))
        assert (one.cells is not None) == attends
        if one.cells is not None:
            assert one.cells.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_saved_model_gives_the_predictions_of_the_run(
    finished_run: FinishedRun, name: str, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, results = finished_run(name)
    tiny.use_small_readers(monkeypatch)
    kind = ON_DISK[name][1] if name in ON_DISK else SCENES_MODELS.get(name, nn.VQA)
    model = kind.from_pretrained(out / "model")
    assert sum(p.numel() for p in model.parameters()) == results["parameters"]
    experiment = build(tiny.recipe(name), RunContext(tmp_path, 0, "cpu", few))
    batch = experiment.example()
    with torch.no_grad():
        logits = model(batch).prediction
    samples = io.read_arrays(out / "samples.npz")
    first = slice(len(batch))
    assert batch.ids == tuple(samples["id"][first].tolist())
    sure, chosen = logits.softmax(dim=-1).max(dim=-1)
    np.testing.assert_allclose(sure.numpy(), samples["confidence"][first], atol=1e-5)
    np.testing.assert_array_equal((chosen == batch.labels).numpy(), samples["accuracy"][first])


@pytest.mark.long
@pytest.mark.parametrize("name", list(ON_DISK))
def test_recipes_read_the_official_files(
    name: str, data_root: Path, needs: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    root = needs(data_root, ON_DISK[name][0])
    results = tiny.run(tiny.recipe(name), tmp_path / "a", data_root=root)
    assert results["status"] == "done" and results["data"][2]["n"] == 16
    io.verify(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("scenes-soft", {"task"}),
        ("scenes-truth", {"task", "attention"}),
        ("cifar10-cnn", {"task"}),
        ("trec-attention", {"task", "redundancy"}),
    ],
)
def test_the_log_has_the_losses_of_the_recipe_and_no_times(
    finished_run: FinishedRun, name: str, wanted: set[str]
) -> None:
    import json

    lines = [
        json.loads(line) for line in (finished_run(name)[0] / "log.jsonl").read_text().splitlines()
    ]
    assert {loss for line in lines for loss in line.get("losses", {})} == wanted
    assert {line["split"] for line in lines} == {"train", "val"}
    assert not any("time" in key or "second" in key for line in lines for key in line)


def test_results_include_published_values(finished_run: FinishedRun) -> None:
    assert finished_run("scenes-soft")[1]["paper"] == {}
    stated = finished_run("trec-attention")[1]["paper"]["accuracy"]
    assert stated["value"] == 0.812 and stated["direction"] == "higher"
    assert runner.published_json(PublishedValue(1.5, "nats", False, "Table 1")) == {
        "value": 1.5,
        "unit": "nats",
        "direction": "lower",
        "source": "Table 1",
    }


@pytest.mark.long
def test_the_same_seed_gives_the_same_run_and_another_does_not(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    tiny.run(tiny.recipe("scenes-soft"), tmp_path / "a")
    check_same(tmp_path / "a", finished_run("scenes-soft")[0])
    tiny.run(tiny.recipe("scenes-soft"), tmp_path / "b", seed=1)
    one, other = (reproducible_output(tmp_path / name)["weights"] for name in "ab")
    assert one != other


def test_the_folder_can_be_a_string(finished_run: FinishedRun) -> None:
    out, results = finished_run("scenes-none")
    recipe = tiny.recipe("scenes-none")
    again = runner.run(recipe, str(out), build, seed=results["seed"], device="cpu", resume=True)
    assert again == results


def test_a_finished_run_is_returned_unchanged(finished_run: FinishedRun) -> None:
    out, results = finished_run("scenes-soft")
    before = (out / "results.json").stat().st_mtime_ns
    assert tiny.run(tiny.recipe("scenes-soft"), out, resume=True) == results
    assert (out / "results.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="finished run"):
        tiny.run(tiny.recipe("scenes-soft"), out)


# Runs that end early


def test_a_run_without_data_frees_its_folder(few: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "a", tiny.recipe("trec-attention")
    with pytest.raises(UserError, match=r"train_5500.*missing"):
        tiny.run(recipe, out, data_root=tmp_path)
    found = run_folder.read_run(out)
    assert found is not None and found.is_empty and found.results["status"] == "failed"
    assert "train_5500.label is missing" in found.results["reason"]
    with pytest.raises(CorruptFileError, match="train_5500"):  # the same folder with other settings
        tiny.run(tiny.recipe("trec-attention", "train.rate=0.5"), out, data_root=few)
    with pytest.MonkeyPatch.context() as patch:
        tiny.use_small_readers(patch)
        with pytest.raises(UserError, match=r"was 0\.5"):
            tiny.run(recipe, out, data_root=few, resume=True)
        assert tiny.run(recipe, out, data_root=few)["status"] == "done"
    io.verify(out)


def test_a_run_without_data_can_be_resumed(few: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "a", tiny.recipe("trec-attention")
    with pytest.raises(UserError):
        tiny.run(recipe, out, data_root=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        tiny.use_small_readers(patch)
        done = tiny.run(recipe, out, data_root=few, resume=True)
    assert done["status"] == "done" and "reason" not in done


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ZeroDivisionError("oh\nno"), "failed"),
        (RunError("no space."), "failed"),
        (MemoryError(), "failed"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_trained_weights_survive_a_later_error(
    finished_run: FinishedRun, tmp_path: Path, error: BaseException, status: str
) -> None:
    out, recipe = tmp_path / "a", tiny.recipe("scenes-soft")

    def fail(*args: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.Evaluator, "evaluate", fail)
        with pytest.raises(type(error)):
            tiny.run(recipe, out)
    found = run_folder.read_run(out)
    assert found is not None and found.results["status"] == status and not found.is_empty
    if status == "failed":
        assert found.results["reason"] == (" ".join(str(error).split()) or type(error).__name__)
    with pytest.raises(UserError, match="add --resume"):
        tiny.run(recipe, out)
    with pytest.MonkeyPatch.context() as patch:  # no training is repeated
        patch.setattr(Reporter, "step", fail)
        tiny.run(recipe, out, resume=True)
    check_same(out, finished_run("scenes-soft")[0])


@pytest.mark.long
def test_a_run_does_not_resume_on_other_data(tmp_path: Path) -> None:
    """The readers or the files may have changed since, with as many items."""
    out, recipe = tmp_path / "a", tiny.recipe("scenes-soft")
    step = Reporter.step

    def interrupt(self: Reporter, at: int, means: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        step(self, at, means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "step", interrupt)
        with pytest.raises(RunInterrupted):
            tiny.run(recipe, out)
    stopped = io.read_json(out / "results.json")
    assert stopped["data"][0]["n"] > 0
    for _ in range(2):  # the attempt that failed does not change what is compared
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scenes, "digest", lambda self: "0" * 64)
            with pytest.raises(UserError, match=r"data: scenes.*0{12}"):
                tiny.run(recipe, out, resume=True)
        assert io.read_json(out / "results.json")["data"] == stopped["data"]
    assert tiny.run(recipe, out, resume=True)["data"] == stopped["data"]


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_step_and_the_run_resumes(
    finished_run: FinishedRun, tmp_path: Path, number: int, code: int
) -> None:
    out, recipe = tmp_path / "a", tiny.recipe("scenes-soft")
    step = Reporter.step

    def interrupt(self: Reporter, at: int, means: Any) -> None:
        os.kill(os.getpid(), number)
        step(self, at, means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "step", interrupt)
        with pytest.raises(RunInterrupted, match=r"1 of 2 .* --resume") as caught:
            tiny.run(recipe, out, title="mine")
    assert caught.value.code == code
    assert io.read_json(out / "results.json")["status"] == "stopped"
    assert tiny.run(recipe, out, resume=True)["title"] == "mine"
    one, other = reproducible_output(out), reproducible_output(finished_run("scenes-soft")[0])
    assert one["weights"] == other["weights"] and one["log"] == other["log"]


@pytest.mark.long
def test_sigterm_outside_training_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    former = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(evaluate.Evaluator, "evaluate", interrupt)
    with pytest.raises(RunInterrupted, match="with --resume") as caught:
        tiny.run(tiny.recipe("scenes-none"), tmp_path / "a")
    assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) == former
    assert io.read_json(tmp_path / "a/results.json")["status"] == "stopped"
    monkeypatch.undo()
    assert tiny.run(tiny.recipe("scenes-none"), tmp_path / "a", resume=True)["status"] == "done"


def test_a_full_disk_does_not_hide_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = io.write_json, []

    def full(path: Path, value: Any) -> None:
        if path.name == "results.json" and written:
            raise RunError("no space left.")
        written.append(path)
        write(path, value)

    monkeypatch.setattr(io, "write_json", full)
    with pytest.raises(UserError, match="is missing"):
        tiny.run(tiny.recipe("cifar10-cnn"), tmp_path / "a", data_root=tmp_path)


# Machine information


def test_the_commit_is_that_of_this_checkout_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = runner.git_commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", found)
    installed = tmp_path / "venv/overt/experiments/runner.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(runner, "__file__", str(installed))
    assert runner.git_commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    try:
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    except OSError:
        pytest.skip("there is no git here")
    assert runner.git_commit() is None  # installed inside another project


def test_the_device_is_described_by_name_and_threads() -> None:
    assert re.fullmatch(r"cpu \S+, \d+ threads", runner.describe_device(torch.device("cpu")))


# Killed processes


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
    _, output = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def wait_for(process: "subprocess.Popen[str]", there: Callable[[], bool]) -> bool:
    """Return whether the condition held before the process ended."""
    while process.poll() is None:
        if there():
            return True
        time.sleep(0.002)
    return False


def reached(out: Path, step: int) -> Callable[[], bool]:
    """Return a check for a checkpoint of this or a later step."""
    parent = out / "checkpoints/train"
    return lambda: any(int(one.name[5:]) >= step for one in parent.glob("step-*[0-9]"))


@pytest.fixture(scope="module", params=[1, 2], ids=lambda value: f"accumulate-{value}")
def uninterrupted_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[str, ...]]:
    """Run without interruption; return its folder and settings."""
    out = tmp_path_factory.mktemp("whole") / "a"
    sets = (*SETTINGS, f"train.accumulate={request.param}")
    finish(start(out, sets=sets))
    return out, sets


@pytest.mark.long
def test_a_run_killed_at_any_moment_resumes_exactly(
    uninterrupted_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    """SIGKILL before, between and during checkpoints, and at the end."""
    uninterrupted, sets = uninterrupted_run
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
    check_same(out, uninterrupted)
    io.verify(out)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_names_resume(
    uninterrupted_run: tuple[Path, tuple[str, ...]], tmp_path: Path, number: int, code: int
) -> None:
    uninterrupted, sets = uninterrupted_run
    out = tmp_path / "a"
    process = start(out, sets=sets)
    assert wait_for(process, reached(out, 4))
    process.send_signal(number)
    output = finish(process, code)
    last = output.splitlines()[-1]
    assert (
        last.startswith("overt: stopped and saved at step ") and "with --resume continues" in last
    )
    assert io.read_json(out / "results.json")["status"] == "stopped"
    assert "--resume" in finish(start(out, sets=sets), 2)
    finish(start(out, "--resume", sets=sets))
    check_same(out, uninterrupted)


# Tables of real runs


@pytest.mark.long
def test_a_table_prints_mean_and_deviation_and_reuses_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["table", "scenes", "--out", str(tmp_path), "--seeds", "2", "--device", "cpu"]
    args += ["--rows", "no-attention,soft-held-out"]
    args += [word for one in tiny.SETS for word in ("--set", one)]
    args += [
        "--set",
        "data.limit=48",
    ]  # two rounds of test scenes, because one round may lack the family "relate"
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


@pytest.mark.long
def test_a_table_prints_published_values(
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


def test_a_folder_claimed_meanwhile_by_another_run_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run of the same folder starts and stops between the check and the lock."""
    recipe, out, plain = tiny.recipe("scenes-none"), tmp_path / "a", io.lock
    other = {"status": "stopped", "recipe": recipe.name, "settings": {}, "seed": 7}

    @contextmanager
    def late(folder: Path, wait: bool = False) -> Iterator[None]:
        io.write_json(out / "results.json", other)
        (out / "checkpoints").mkdir(exist_ok=True)
        with plain(folder, wait):
            yield

    monkeypatch.setattr(runner.io, "lock", late)
    with pytest.raises(UserError, match=r"scenes-none.*seed 7"):
        tiny.run(recipe, out)
    assert io.read_json(out / "results.json") == other


# --- third-party models


class NoiseImages:
    """Noise images of two classes; the target is every cell."""

    name = "dots"

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 8

    def digest(self) -> str:
        return f"dots {self.split}"

    def batch(self, indices: Sequence[int]) -> Batch:
        draw = torch.Generator().manual_seed(len(self.split))
        images = torch.randint(0, 256, (8, 3, 32, 32), generator=draw, dtype=torch.uint8)
        return Batch(
            ids=tuple(f"{self.split}-{at}" for at in indices),
            images=images[list(indices)],
            geometry=PixelGeometry.identity(len(indices), (32, 32)),
            labels=torch.tensor([at % 2 for at in indices]),
        )


@dataclass(frozen=True)
class Section:
    limit: int | None = None
    width: float = 1.0


@dataclass(frozen=True)
class UserRecipe:
    """A user's recipe with a third-party model."""

    name: str = "mine"
    about: str = "dots"
    data: Section = Section()
    model: Section = Section()
    train: TrainConfig = TrainConfig(epochs=1, batch=4, card=0)  # noqa: RUF009  # frozen

    @property
    def paper(self) -> dict[str, PublishedValue]:
        return {}

    def network(self) -> torch.nn.Module:
        from transformers import ViTImageProcessor

        processor = ViTImageProcessor(size={"height": 32, "width": 32})
        return nn.wrap(tiny_models.vit(), processor=processor)

    def build(self, context: RunContext) -> Any:
        from overt.experiments.builders import classification_experiment

        test = evaluate.Evaluator(NoiseImages("test"), ("one", "two", "three"))
        return classification_experiment(
            self.network(), NoiseImages("train"), None, test, self.train, context
        )


class UnsavableModel(torch.nn.Module):
    """A model without a save method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 3))

    def encode(self, batch: Batch) -> torch.Tensor:
        assert batch.images is not None
        return batch.images.float().mean(dim=(2, 3)) / 255

    def decide(self, features: torch.Tensor, mask: Any = None) -> nn.Output:
        shares = AttentionMap.from_cells(torch.ones(len(features), 1), grid(1, 1))
        return nn.Output(features @ self.weight, (shares.normalize(),))

    def forward(self, batch: Batch) -> nn.Output:
        return self.decide(self.encode(batch))


class UnsavableRecipe(UserRecipe):
    """A recipe whose model has no save method."""

    def network(self) -> torch.nn.Module:
        return UnsavableModel()


def check_trained(model: Any, out: Path) -> None:
    """Check that a model has the saved weights of a run, and that these were trained."""
    kept = type(model).from_pretrained(out / "model").state_dict()
    first = tiny_models.vit().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert not torch.equal(kept["classifier.weight"], first["classifier.weight"])


def test_a_run_of_a_wrapped_model_can_be_viewed_and_measured(tmp_path: Path) -> None:
    out = tmp_path / "run"
    results = runner.run(UserRecipe(), out, UserRecipe.build, device="cpu", show_progress=False)
    assert results["status"] == "done"
    assert io.read_json(out / "model/config.json")["model_type"] == "vit"
    subject = load_model.load_model(load_model.locate_model(str(out)))
    check_trained(subject.model, out)
    photo = np.zeros((40, 50, 3), np.uint8)
    assert view_model(subject, ModelInput(None, photo)).panels
    opened = open_measured(str(out), None, "cpu", lambda line: None)
    assert opened.model is not None and opened.over == "image"


def test_a_run_of_any_module_saves_its_weights(tmp_path: Path) -> None:
    out = tmp_path / "run"
    runner.run(UnsavableRecipe(), out, UnsavableRecipe.build, device="cpu", show_progress=False)
    io.verify(out / "model")
    assert io.read_tensors(out / "model/model.safetensors")["weight"].shape == (3, 3)
    with pytest.raises(UserError, match="from_pretrained"):
        load_model.load_model(load_model.locate_model(str(out)))
    again = UnsavableModel()
    load_inner_weights(again, out / "model")
    assert bool(again.weight.any())


def test_a_run_of_a_registered_recipe_with_a_wrapped_model_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    runner.run(UserRecipe(), out, UserRecipe.build, device="cpu", show_progress=False)
    monkeypatch.setattr("overt.papers.catalog.recipes", lambda: {"mine": UserRecipe})
    monkeypatch.setattr("overt.papers.catalog.build", UserRecipe.build)
    opened = open_measured(str(out), None, "cpu", lambda line: None)
    assert opened.model is not None
    check_trained(opened.model.model, out)
