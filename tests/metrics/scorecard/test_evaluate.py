"""`scorecard`: values independent of portions and processes, and resume after a kill."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt import io, metrics
from overt.attention import AttentionMap, grid
from overt.errors import UserError
from overt.metrics.scorecard.evaluate import _claim_folder, image_clusters, load_with_truth
from overt.metrics.scorecard.metric_context import RANDOM
from overt.targets.surrogate.generate import WorkerShare
from overt.testing import PlantedCell, PlantedWord
from tests.metrics.scorecard import multiprocess_run
from tests.metrics.scorecard.toys import Pictures, Texts, partly_true_map, small_bert

ROOT = Path(__file__).resolve().parents[3]
FINAL = ("scorecard.json", "scorecard.csv", "samples.npz")


def assert_same_numbers(one: metrics.Scorecard, two: metrics.Scorecard, near: float = 0.0) -> None:
    assert one.ids == two.ids and one.maps == two.maps and one.keys == two.keys
    for pair, values in one.numbers.items():
        np.testing.assert_allclose(values, two.numbers[pair], atol=near, err_msg=str(pair))


@pytest.mark.long
def test_the_true_map_ranks_first_and_the_random_map_last() -> None:
    """For every faithfulness metric, in its declared direction.

    The same with all baselines and more samples: tests/parity/test_measures_planted.py.
    """
    names = [e.key for e in metrics.available_metrics() if e.key.endswith("@mask")] + [
        "deletion_area"
    ]
    model, maps = PlantedCell(gain=6.0), {"half": partly_true_map(0.5, None)}
    # with 30 images the half-true and the random map differ by .0002 under blur: by chance
    card = metrics.scorecard(model, Pictures(120), names, maps, portion=60)
    assert len(card.keys) == 12 + 3
    for key in card.keys:
        sign = {"higher": 1, "lower": -1}[card.about(key)["direction"]]
        means = [sign * card.intervals[m, key].mean for m in ("attention", "half", RANDOM)]
        assert means[0] > means[1] > means[2], f"{key}: {means}"
    assert {one.verdict for one in card.against(RANDOM)} == {"better"}


def test_the_deciding_word_scores_better_than_every_control() -> None:
    card = metrics.scorecard(PlantedWord(), Texts(30), ["comprehensiveness", "flips"], portion=30)
    for control in ("other sample", "shuffled", RANDOM, "centre", "uniform"):
        assert {one.verdict for one in card.against(control)} == {"better"}


@pytest.mark.long
@pytest.mark.parametrize("data", [Pictures(7), Texts(7)], ids=["pictures", "texts"])
def test_values_do_not_depend_on_the_portion_size(data) -> None:
    model = PlantedCell(gain=3.0) if isinstance(data, Pictures) else PlantedWord()
    names = ["agreement", "deletion_area", "flips", "infidelity@imputed", "gini", "stability"]
    cards = [metrics.scorecard(model, data, names, portion=size) for size in (3, 7)]
    assert_same_numbers(cards[0], cards[1], 2e-4)  # imputation is solved to a tolerance


@pytest.mark.long
def test_values_of_a_transformers_model_do_not_depend_on_padding() -> None:
    names = ["spearman", "deletion_area@mask", "flips@mean", "output_change_permuted"]
    names += ["gradient_agreement@mask", "entropy"]
    model, texts = small_bert(), Texts(5)
    cards = [metrics.scorecard(model, texts, names, over="text", portion=size) for size in (2, 5)]
    assert set(cards[0].keys) == set(names)
    assert_same_numbers(cards[0], cards[1], 1e-4)


def test_a_limit_selects_the_first_samples_with_the_same_values() -> None:
    whole = metrics.scorecard(PlantedCell(), Pictures(10), ["spearman", "flips"])
    some = metrics.scorecard(PlantedCell(), Pictures(10), ["spearman", "flips"], limit=4)
    assert some.ids == whole.ids[:4] and some.data["items"] == 4
    for pair, values in some.numbers.items():
        np.testing.assert_array_equal(values, whole.numbers[pair][:4])


def test_the_seed_changes_controls_but_not_the_values_of_the_model() -> None:
    one, two = (metrics.scorecard(PlantedCell(), Pictures(6), ["cc"], seed=s) for s in (0, 1))
    assert not np.array_equal(one.numbers[RANDOM, "cc"], two.numbers[RANDOM, "cc"])
    assert np.array_equal(one.values("cc"), two.values("cc"))


def test_samples_of_one_image_are_one_cluster_in_any_batch() -> None:
    data = Pictures(6, double=True)
    whole = image_clusters(data.batch(range(6)))
    assert len(set(whole)) == 3 and whole[0] == whole[1]
    assert image_clusters(data.batch([1])) == whole[1:2]
    assert image_clusters(Texts(3).batch(range(3))) == ("toy-0", "toy-1", "toy-2")
    assert len(set(metrics.scorecard(PlantedCell(), data, ["cc"]).clusters)) == 3


def test_unavailable_metrics_are_skipped_with_a_reason() -> None:
    card = metrics.scorecard(
        None,
        Pictures(4),
        ["nss", "cc", "deletion_area", "accuracy"],
        {"half": partly_true_map(0.5, None)},
    )
    assert card.keys == ("cc",) and card.subject == "half" and card.name == "half"
    assert card.skipped["nss"] == "the dataset has no single fixations"
    assert card.skipped["deletion_area@blur"] == "there are only maps and no model"
    assert set(card.seconds) == {"maps", "cc"}


def test_a_dataset_without_ground_truth_skips_metrics_that_need_it() -> None:
    class Bare(Pictures):
        def batch(self, indices):
            from dataclasses import replace

            return replace(super().batch(indices), target=None)

    batch, truth = load_with_truth(Bare(3), range(3))
    assert truth is None and len(batch) == 3
    card = metrics.scorecard(PlantedCell(), Bare(3), ["cc", "flips@mask"])
    assert card.keys == ("flips@mask",)
    assert "no target" in card.skipped["cc"]


def test_a_model_is_evaluated_in_eval_mode_and_its_mode_restored() -> None:
    class EvalModeModel(PlantedCell):
        def encode(self, batch):
            assert not self.training
            return super().encode(batch)

    model = EvalModeModel().train()
    metrics.scorecard(model, Pictures(3), ["cc"])
    assert model.training and all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": None}, "needs.*model"),
        ({"limit": 0}, "got 0, 16 and 256"),
        ({"portion": 0}, "got 3, 0 and 256"),
        ({"measures": ["cat"]}, "unknown metric 'cat'"),
        ({"share": WorkerShare(0, 2)}, "several processes"),
    ],
)
def test_bad_input_raises_with_its_values(more, message: str) -> None:
    given = {"model": PlantedCell(), "data": Pictures(3), "measures": ["cc"], **more}
    with pytest.raises(UserError, match=message):
        metrics.scorecard(**given)


def test_uniform_maps_of_different_grids_do_not_differ_in_concentration() -> None:
    """A uniform map of 64 cells has a larger entropy than one of 16, but is not wider."""

    def even(side: int):
        return lambda batch: AttentionMap.from_cells(
            torch.ones(len(batch), side**2) / side**2, grid(side, side, geometry=batch.geometry)
        )

    names = ["cc", "mass_inside", "entropy", "effective_support", "gini", "hoyer"]
    fine, coarse = (
        metrics.scorecard(None, Pictures(4), names, {"even": even(side)}, name=f"{side}")
        for side in (8, 4)
    )
    assert fine.key_counts is not None and fine.key_counts.tolist() == [64.0] * 4
    assert [one.key for one in fine.compare(coarse)] == ["mass_inside"]
    assert fine.not_compared(coarse).startswith("not compared: entropy, effective_support, gini")


# --- in a folder


def test_progress_is_reported_and_a_finished_folder_is_reused(tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    data, model = Pictures(10), PlantedCell()
    card = metrics.scorecard(
        model,
        data,
        ["cc"],
        portion=4,
        shard=5,
        out=tmp_path,
        progress=lambda done, total: reported.append((done, total)),
    )
    assert reported == [(4, 10), (5, 10), (9, 10), (10, 10)]
    before = {name: (tmp_path / name).read_bytes() for name in FINAL}
    calls: list[list[int]] = []
    batch = data.batch
    data.batch = lambda indices: calls.append(list(indices)) or batch(indices)
    again = metrics.scorecard(model, data, ["cc"], portion=4, shard=5, out=tmp_path)
    assert_same_numbers(card, again)
    assert calls == [[0, 1, 2, 3], [5, 6, 7, 8]]  # the first portion of each part is compared
    np.testing.assert_array_equal(again.key_counts, [16] * 10)
    assert before == {name: (tmp_path / name).read_bytes() for name in FINAL}


def test_a_folder_of_another_evaluation_raises(tmp_path: Path) -> None:
    metrics.scorecard(PlantedCell(), Pictures(4), ["cc"], out=tmp_path)
    with pytest.raises(UserError, match="model, seed"):
        metrics.scorecard(PlantedCell(gain=1.0), Pictures(4), ["cc"], seed=2, out=tmp_path)


def random_look(seed: int, after: int = 0):
    """Return a map function that is true for the first `after` samples and random for the rest."""

    def look(batch):
        rows = []
        for name, truth in zip(batch.ids, batch.target.weights[:, 0, 0, 0], strict=True):
            number = int(name.split("-")[1])
            noise = torch.rand(16, generator=torch.Generator().manual_seed(100 * seed + number))
            rows.append(truth if number < after else noise)
        return AttentionMap.from_cells(torch.stack(rows), grid(4, 4, geometry=batch.geometry))

    return look


def test_another_map_of_the_same_name_raises(tmp_path: Path) -> None:
    """Maps are identified by their values: a new map never gets the stored numbers."""
    ask = ["mass_inside"]
    first = metrics.scorecard(
        None, Pictures(8), ask, {"mine": random_look(0)}, out=tmp_path, shard=4
    )
    with pytest.raises(UserError, match=r"'mine' .*part 0"):
        metrics.scorecard(
            None, Pictures(8), ask, {"mine": random_look(0, after=8)}, out=tmp_path, shard=4
        )
    again = metrics.scorecard(
        None, Pictures(8), ask, {"mine": random_look(0)}, out=tmp_path, shard=4
    )
    assert_same_numbers(first, again)
    later = tmp_path / "later"  # the same values in the first part, others in the second
    metrics.scorecard(None, Pictures(8), ask, {"mine": random_look(0, after=4)}, out=later, shard=4)
    with pytest.raises(UserError, match="part 1"):
        metrics.scorecard(
            None, Pictures(8), ask, {"mine": random_look(1, after=4)}, out=later, shard=4
        )


def test_a_map_that_differs_only_in_the_last_sample_raises(tmp_path: Path) -> None:
    ask, data = ["mass_inside"], Pictures(12)
    metrics.scorecard(None, data, ask, {"mine": random_look(0)}, out=tmp_path, portion=4)

    def last(batch):
        found, other = random_look(0)(batch), random_look(1)(batch)
        changed = torch.tensor([name.endswith("11") for name in batch.ids])
        values = torch.where(changed[:, None, None, None, None], other.values, found.values)
        return replace(found, values=values)

    with pytest.raises(UserError, match=r"'mine' .*later.* 0"):
        metrics.scorecard(None, data, ask, {"mine": last}, out=tmp_path, portion=4)


def sink_look(largest: int):
    """Return a map function with most weight on cell 0; `largest` is the largest other cell."""

    def look(batch):
        rows = 1e-4 * torch.rand(len(batch), 16, generator=torch.Generator().manual_seed(3))
        rows[:, 0], rows[:, largest] = 1.0, 3e-4
        return AttentionMap.from_cells(rows, grid(4, 4, geometry=batch.geometry))

    return look


def test_maps_that_differ_only_in_small_weights_raise(tmp_path: Path) -> None:
    metrics.scorecard(None, Pictures(4), ["spearman"], {"mine": sink_look(5)}, out=tmp_path)
    with pytest.raises(UserError, match=r"'mine' .*first item"):
        metrics.scorecard(None, Pictures(4), ["spearman"], {"mine": sink_look(9)}, out=tmp_path)


def test_maps_that_differ_by_rounding_count_as_the_same(tmp_path: Path) -> None:
    """As on another machine: hashes differ, and the first items are close."""

    def rounded(batch):
        found = random_look(0)(batch)
        return replace(found, values=found.values * (1 + 1e-6))

    first = metrics.scorecard(None, Pictures(8), ["cc"], {"mine": random_look(0)}, out=tmp_path)
    assert_same_numbers(
        first, metrics.scorecard(None, Pictures(8), ["cc"], {"mine": rounded}, out=tmp_path)
    )


def test_a_map_with_a_digest_is_computed_again_for_the_first_portion_only(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(batch):
        calls.append(len(batch))
        return random_look(0)(batch)

    counted.digest = "seed 0"
    options = {"out": tmp_path, "portion": 4, "shard": 12}
    first = metrics.scorecard(None, Pictures(12), ["cc"], {"mine": counted}, **options)
    calls.clear()
    assert_same_numbers(
        first, metrics.scorecard(None, Pictures(12), ["cc"], {"mine": counted}, **options)
    )
    assert calls == [4]


def test_a_part_of_an_older_release_is_compared_by_first_items(tmp_path: Path) -> None:
    options = {"out": tmp_path, "portion": 4}
    first = metrics.scorecard(None, Pictures(8), ["cc"], {"mine": random_look(0)}, **options)
    place = tmp_path / "parts" / "part-00000"
    arrays = io.read_arrays(place / "probe.npz")
    older = {name: arrays[name][:2] for name in ("map mine", "visible mine")}
    files = {path.name: path.read_bytes() for path in place.iterdir() if path.suffix != ".npz"}
    numbers = io.read_arrays(place / "numbers.npz")
    shutil.rmtree(place)
    with io.atomic_folder(place) as temporary:
        for name in ("part.json", "clock.json"):
            (temporary / name).write_bytes(files[name])
        io.write_arrays(temporary / "numbers.npz", numbers)
        io.write_arrays(temporary / "probe.npz", older)
    assert_same_numbers(
        first, metrics.scorecard(None, Pictures(8), ["cc"], {"mine": random_look(0)}, **options)
    )
    with pytest.raises(UserError, match="first items"):
        metrics.scorecard(None, Pictures(8), ["cc"], {"mine": random_look(1)}, **options)


@pytest.mark.parametrize("name", ["uniform", "other sample", "attention", "model", "a|b", ""])
def test_a_map_named_like_a_control_raises(name: str) -> None:
    with pytest.raises(UserError, match=r"map.*named"):
        metrics.scorecard(PlantedCell(), Pictures(4), ["cc"], {name: random_look(0)})


class CallableModel:
    """A model that is not a module: a class called with a batch."""

    def __init__(self, gain: float) -> None:
        self.inner = PlantedCell(gain=gain).eval()

    def __call__(self, batch):
        return self.inner(batch)


def test_another_model_of_the_same_class_raises(tmp_path: Path) -> None:
    metrics.scorecard(CallableModel(1.0), Pictures(4), ["cc"], out=tmp_path)
    with pytest.raises(UserError, match="first items"):
        metrics.scorecard(CallableModel(4.0), Pictures(4), ["cc"], out=tmp_path)
    metrics.scorecard(CallableModel(1.0), Pictures(4), ["cc"], out=tmp_path)


def test_a_folder_of_an_older_metric_version_raises(tmp_path: Path, monkeypatch) -> None:
    metrics.scorecard(PlantedCell(), Pictures(4), ["mass_inside"], out=tmp_path)
    older = replace(metrics.mass_inside.info, version=1)
    monkeypatch.setattr(metrics.mass_inside, "info", older)
    with pytest.raises(UserError, match="measures"):
        metrics.scorecard(PlantedCell(), Pictures(4), ["mass_inside"], out=tmp_path)


def test_the_judged_map_and_the_estimated_time_are_announced(tmp_path: Path) -> None:
    reported: list[tuple[str, float]] = []
    for _ in range(2):
        card = metrics.scorecard(
            PlantedCell(), Pictures(6), ["cc"], out=tmp_path,
            announce=lambda judged, seconds: reported.append((judged, seconds)),
        )  # fmt: skip
    assert card.judged == reported[0][0] == "attention: the model's only map, over image 4x4"
    assert reported[0][1] > 0 and reported[1][1] == 0  # all parts exist


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_without_scored_parts_is_replaced(tmp_path: Path, rank: int) -> None:
    """A run that failed at once (a map lacks a sample) does not block the corrected run."""

    def broken(batch):
        raise UserError("no map of sample 7")

    with pytest.raises(UserError, match=r"no map.*sample"):
        metrics.scorecard(None, Pictures(4), ["cc"], {"broken": broken}, out=tmp_path)
    assert (tmp_path / "plan.json").is_file()
    true_maps, data = {"partly_true_map": partly_true_map(1.0, None)}, Pictures(4)
    if rank:  # another process that is earlier than the first does not replace the plan
        _claim_folder(tmp_path, {"other": 1}, "key", first=False)
        assert "broken" in (tmp_path / "plan.json").read_text()
    card = metrics.scorecard(None, data, ["cc"], true_maps, out=tmp_path)
    assert "partly_true_map" in (tmp_path / "plan.json").read_text() and len(card) == 4
    (tmp_path / "scorecard.json").unlink()  # a finished part alone is enough to raise
    with pytest.raises(UserError, match="differs in seed:"):
        metrics.scorecard(None, data, ["cc"], true_maps, seed=1, out=tmp_path)
    shutil.rmtree(tmp_path / "parts")
    (tmp_path / "scorecard.json").touch()  # and a finished scorecard alone
    with pytest.raises(UserError, match="differs in seed:"):
        metrics.scorecard(None, data, ["cc"], true_maps, seed=1, out=tmp_path)


@pytest.mark.long
def test_resume_after_sigkill_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    multiprocess_run.run(whole)
    command = [
        sys.executable,
        "-m",
        "tests.metrics.scorecard.multiprocess_run",
        str(broken),
        "0.5",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for parts in (1, 2):
        started = subprocess.Popen(command, cwd=ROOT, env=environment)
        until = time.monotonic() + 300
        while len(list(broken.glob("parts/part-*"))) < parts and time.monotonic() < until:
            time.sleep(0.02)
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert len(list(broken.glob("parts/part-*"))) < 4
    multiprocess_run.run(broken)
    for name in FINAL:
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name


@pytest.mark.long
def test_two_processes_write_the_same_bytes_as_one(tmp_path: Path) -> None:
    multiprocess_run.run(tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.metrics.scorecard.multiprocess_run", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in FINAL:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


MEMORY = """
import resource, torch
torch.set_num_threads(1)
from overt import io, metrics
from overt.attention import AttentionMap, grid
from overt.data.batch import Batch

class Many:
    name, split = "many", "test"
    def __len__(self): return 10_000
    def digest(self): return "many"
    def batch(self, indices):
        rows = [torch.rand(196, generator=torch.Generator().manual_seed(i)) for i in indices]
        target = AttentionMap.from_cells(torch.stack(rows), grid(14, 14)).normalize()
        return Batch(tuple(f"m{i}" for i in indices), target=target)

def look(batch):
    return AttentionMap.from_cells(batch.target.weights[:, 0, 0, 0].flip(-1), grid(14, 14))

card = metrics.scorecard(
    None, Many(), ["spearman", "cc", "sim", "js", "mass_inside", "entropy"], {"theirs": look},
    portion=256,
)
assert len(card) == 10_000 and card.intervals["theirs", "spearman"].count == 10_000
print(len(str(card)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
def test_ten_thousand_maps_fit_into_two_gigabytes() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout.split()[1]) * unit < 2 * 2**30
