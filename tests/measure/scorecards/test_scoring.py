"""Streaming: no number hangs on portions or processes, and work that was killed goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from overt import measure
from overt.attention import AttentionMap, grid
from overt.errors import BadInput
from overt.measure.scorecards.scoring import _claim, clusters_of, known
from overt.measure.scorecards.sight import RANDOM
from overt.supervise.surrogate.making import Share
from overt.testing import PlantedCell, PlantedWord
from tests.measure.scorecards import many
from tests.measure.scorecards.toys import Pictures, Texts, small_bert, told

ROOT = Path(__file__).resolve().parents[3]
FINAL = ("scorecard.json", "scorecard.csv", "samples.npz")


def same(one: measure.Scorecard, two: measure.Scorecard, near: float = 0.0) -> None:
    assert one.ids == two.ids and one.maps == two.maps and one.keys == two.keys
    for pair, values in one.numbers.items():
        np.testing.assert_allclose(values, two.numbers[pair], atol=near, err_msg=str(pair))


def test_the_truthful_map_is_first_and_the_random_one_last() -> None:
    """By every measure of faithfulness, in the direction it declares.

    With all baselines, over more samples, tests/parity/test_measures_planted.py asks the same.
    """
    names = [e.key for e in measure.catalogue() if e.key.endswith("@mask")] + ["deletion_area"]
    model, maps = PlantedCell(gain=6.0), {"half": told(0.5, None)}
    card = measure.scorecard(model, Pictures(30), names, maps, portion=30)
    assert len(card.keys) == 12 + 3
    for key in card.keys:
        sign = {"higher": 1, "lower": -1}[card.about(key)["direction"]]
        means = [sign * card.intervals[m, key].mean for m in ("attention", "half", RANDOM)]
        assert means[0] > means[1] > means[2], f"{key}: {means}"
    assert {one.verdict for one in card.against(RANDOM)} == {"better"}


def test_a_word_that_decides_is_told_from_any_control() -> None:
    card = measure.scorecard(PlantedWord(), Texts(30), ["comprehensiveness", "flips"], portion=30)
    for control in ("shuffled", RANDOM, "centre", "uniform"):
        assert {one.verdict for one in card.against(control)} == {"better"}


@pytest.mark.long
@pytest.mark.parametrize("data", [Pictures(7), Texts(7)], ids=["pictures", "texts"])
def test_the_size_of_a_portion_changes_no_number(data) -> None:
    model = PlantedCell(gain=3.0) if isinstance(data, Pictures) else PlantedWord()
    names = ["agreement", "deletion_area", "flips", "infidelity@imputed", "gini", "stability"]
    cards = [measure.scorecard(model, data, names, portion=size) for size in (3, 7)]
    same(cards[0], cards[1], 2e-4)  # what is imputed is solved to a tolerance


def test_padding_changes_no_number_of_a_model_of_somebody_else() -> None:
    names = ["spearman", "deletion_area@mask", "flips@mean", "output_change_permuted"]
    names += ["gradient_agreement@mask", "entropy"]
    model, texts = small_bert(), Texts(5)
    cards = [measure.scorecard(model, texts, names, over="text", portion=size) for size in (2, 5)]
    assert set(cards[0].keys) == set(names)
    same(cards[0], cards[1], 1e-4)


def test_a_limit_takes_the_first_and_leaves_their_numbers() -> None:
    whole = measure.scorecard(PlantedCell(), Pictures(10), ["spearman", "flips"])
    some = measure.scorecard(PlantedCell(), Pictures(10), ["spearman", "flips"], limit=4)
    assert some.ids == whole.ids[:4] and some.data["items"] == 4
    for pair, values in some.numbers.items():
        np.testing.assert_array_equal(values, whole.numbers[pair][:4])


def test_another_seed_draws_otherwise_and_leaves_the_model_alone() -> None:
    one, two = (measure.scorecard(PlantedCell(), Pictures(6), ["cc"], seed=s) for s in (0, 1))
    assert not np.array_equal(one.numbers[RANDOM, "cc"], two.numbers[RANDOM, "cc"])
    assert np.array_equal(one.values("cc"), two.values("cc"))


def test_samples_of_one_picture_are_one_cluster_in_any_batch() -> None:
    data = Pictures(6, double=True)
    whole = clusters_of(data.batch(range(6)))
    assert len(set(whole)) == 3 and whole[0] == whole[1]
    assert clusters_of(data.batch([1])) == whole[1:2]
    assert clusters_of(Texts(3).batch(range(3))) == ("toy-0", "toy-1", "toy-2")
    assert len(set(measure.scorecard(PlantedCell(), data, ["cc"]).clusters)) == 3


def test_what_cannot_be_asked_is_said_and_the_rest_is_asked() -> None:
    card = measure.scorecard(
        None, Pictures(4), ["nss", "cc", "deletion_area", "accuracy"], {"half": told(0.5, None)}
    )
    assert card.keys == ("cc",) and card.subject == "half" and card.name == "half"
    assert card.skipped["nss"] == "the data set has no single fixations"
    assert card.skipped["deletion_area@blur"] == "there are maps and no model"
    assert set(card.seconds) == {"maps", "cc"}


def test_a_data_set_without_a_truth_is_measured_by_what_needs_none() -> None:
    class Bare(Pictures):
        def batch(self, indices):
            from dataclasses import replace

            return replace(super().batch(indices), target=None)

    batch, truth = known(Bare(3), range(3))
    assert truth is None and len(batch) == 3
    card = measure.scorecard(PlantedCell(), Bare(3), ["cc", "flips@mask"])
    assert card.keys == ("flips@mask",)
    assert "does not say where attention should be" in card.skipped["cc"]


def test_a_model_in_training_is_asked_in_evaluation_and_left_as_found() -> None:
    class Moody(PlantedCell):
        def encode(self, batch):
            assert not self.training
            return super().encode(batch)

    model = Moody().train()
    measure.scorecard(model, Pictures(3), ["cc"])
    assert model.training and all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": None}, "needs a model, or maps"),
        ({"limit": 0}, "nothing to measure"),
        ({"portion": 0}, "nothing to measure"),
        ({"measures": ["cat"]}, "there is no measure 'cat'"),
        ({"share": Share(0, 2)}, "many processes meet in a folder"),
    ],
)
def test_bad_input_is_a_sentence(more, said: str) -> None:
    given = {"model": PlantedCell(), "data": Pictures(3), "measures": ["cc"], **more}
    with pytest.raises(BadInput, match=said):
        measure.scorecard(**given)


def test_even_maps_of_other_grids_do_not_differ_in_shape() -> None:
    """An even map of 64 cells has more nats than one of 16, and is no wider."""

    def even(side: int):
        return lambda batch: AttentionMap.from_cells(
            torch.ones(len(batch), side**2) / side**2, grid(side, side, geometry=batch.geometry)
        )

    names = ["cc", "mass_inside", "entropy", "effective_support", "gini", "hoyer"]
    fine, coarse = (
        measure.scorecard(None, Pictures(4), names, {"even": even(side)}, name=f"{side}")
        for side in (8, 4)
    )
    assert fine.key_counts is not None and fine.key_counts.tolist() == [64.0] * 4
    assert [one.key for one in fine.compare(coarse)] == ["mass_inside"]
    assert fine.not_compared(coarse).startswith("not compared: entropy, effective_support, gini")


# --- in a folder


def test_progress_is_told_and_a_finished_folder_is_read(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    data, model = Pictures(10), PlantedCell()
    card = measure.scorecard(
        model,
        data,
        ["cc"],
        portion=4,
        shard=5,
        out=tmp_path,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == [(4, 10), (5, 10), (9, 10), (10, 10)]
    before = {name: (tmp_path / name).read_bytes() for name in FINAL}
    data.images = data.images[:0]  # nothing is measured again: no batch could be made
    again = measure.scorecard(model, data, ["cc"], portion=4, shard=5, out=tmp_path)
    same(card, again)
    np.testing.assert_array_equal(again.key_counts, [16] * 10)
    assert before == {name: (tmp_path / name).read_bytes() for name in FINAL}


def test_the_folder_of_another_work_is_refused(tmp_path: Path) -> None:
    measure.scorecard(PlantedCell(), Pictures(4), ["cc"], out=tmp_path)
    with pytest.raises(BadInput, match="differs in model, seed; choose another folder"):
        measure.scorecard(PlantedCell(gain=1.0), Pictures(4), ["cc"], seed=2, out=tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_of_which_nothing_was_scored_is_replaced(tmp_path: Path, rank: int) -> None:
    """What failed at once, as maps that lack a sample do, does not block what was repaired."""

    def broken(batch):
        raise BadInput("there is no map of the sample")

    with pytest.raises(BadInput, match="no map of the sample"):
        measure.scorecard(None, Pictures(4), ["cc"], {"broken": broken}, out=tmp_path)
    assert (tmp_path / "plan.json").is_file()
    told_maps, data = {"told": told(1.0, None)}, Pictures(4)
    if rank:  # a process that comes before the first leaves the plan to it, and its part counts
        _claim(tmp_path, {"other": 1}, "key", first=False)
        assert "broken" in (tmp_path / "plan.json").read_text()
    card = measure.scorecard(None, data, ["cc"], told_maps, out=tmp_path)
    assert "told" in (tmp_path / "plan.json").read_text() and len(card) == 4
    (tmp_path / "scorecard.json").unlink()  # a part alone is work too
    with pytest.raises(BadInput, match="differs in seed; choose another folder"):
        measure.scorecard(None, data, ["cc"], told_maps, seed=1, out=tmp_path)
    shutil.rmtree(tmp_path / "parts")
    (tmp_path / "scorecard.json").touch()  # and so is a card alone
    with pytest.raises(BadInput, match="differs in seed; choose another folder"):
        measure.scorecard(None, data, ["cc"], told_maps, seed=1, out=tmp_path)


@pytest.mark.long
def test_killed_at_random_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    many.run(whole)
    command = [sys.executable, "-m", "tests.measure.scorecards.many", str(broken), "0.15"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for parts in (1, 2):
        started = subprocess.Popen(command, cwd=ROOT, env=environment)
        until = time.monotonic() + 300
        while len(list(broken.glob("parts/part-*"))) < parts and time.monotonic() < until:
            time.sleep(0.02)
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert len(list(broken.glob("parts/part-*"))) < 4
    many.run(broken)
    for name in FINAL:
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name


@pytest.mark.long
def test_two_processes_come_to_the_bytes_of_one(tmp_path: Path) -> None:
    many.run(tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.measure.scorecards.many", str(tmp_path / "two")]
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
from overt import measure
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

card = measure.scorecard(
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
