"""Runs are compared on the same samples or not at all, and the numbers are those of slow copies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overt.errors import BadInput
from overt.measure import statistics
from overt.show.run import Run
from overt.show.versus import shared_rows, verdict, versus

N = 60
RNG = np.random.default_rng(0)
RIGHT = RNG.random(N) < 0.4


def a_run(name: str, ids: range = range(N), data: str = "scenes", **columns: np.ndarray) -> Run:
    """A run that measured these columns of these samples; `truth` is a, a prediction is a or b."""
    ours = {
        key: {"value": float(values[0]), "direction": "higher", "n": len(values)}
        for key, values in columns.items()
        if values.dtype.kind == "f"
    }
    samples = {"id": np.array([f"q{i}" for i in ids]), **columns}
    results: dict[str, Any] = {"ours": ours, "data": [{"name": data, "split": "test", "n": N}]}
    return Run(Path(name), name, results, (), (), (), samples)


def answered(right: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "accuracy": right.astype(np.float32),
        "prediction": np.where(right, "a", "b"),
        "truth": np.full(len(right), "a"),
    }


def test_differences_are_paired_and_agree_with_statistics_of_one_measure() -> None:
    better = RIGHT | (np.arange(N) % 3 == 0)
    one = a_run("one", **answered(RIGHT))
    order = np.random.default_rng(1).permutation(N)  # the second run has them in another order
    columns = {key: values[order] for key, values in answered(better).items()}
    other = a_run("two", range(N), **columns)
    other.samples["id"][:] = np.array([f"q{i}" for i in order])
    (pair,) = versus([one, other])
    (found,) = pair.differences
    slow = better.astype(float) - RIGHT
    assert found.key == "accuracy" and (pair.n, pair.sizes) == (N, (N, N))
    assert found.mean == pytest.approx(slow.mean()) and found.n == N
    assert found.low < slow.mean() < found.high
    import torch

    (p,) = statistics.permutation_tests(torch.from_numpy(slow)[None])
    assert found.p == pytest.approx(p) and found.holm == found.p
    assert (pair.first_alone, pair.second_alone) == (0, int((better & ~RIGHT).sum()))
    assert verdict(found) == "better" and not pair.clustered


def test_what_the_first_lacks_is_compared_with_the_first_that_has_it() -> None:
    mass = RNG.random(N).astype(np.float32)
    runs = [
        a_run("none", **answered(RIGHT)),
        a_run("soft", **answered(RIGHT), mass=mass),
        a_run("hard", **answered(~RIGHT), mass=mass + 0.3),
    ]
    found = {
        (pair.first, pair.second): [one.key for one in pair.differences] for pair in versus(runs)
    }
    assert found == {(0, 1): ["accuracy"], (0, 2): ["accuracy"], (1, 2): ["mass"]}


def test_chances_are_corrected_for_all_lines_together() -> None:
    runs = [
        a_run(str(i), **answered(np.roll(RIGHT, i)), mass=np.roll(RIGHT, 3 * i) * 1.0)
        for i in range(3)
    ]
    lines = [one for pair in versus(runs) for one in pair.differences]
    assert len(lines) == 4
    wanted = statistics.holm([one.p for one in lines])
    assert [one.holm for one in lines] == pytest.approx(wanted)


def test_samples_of_one_image_change_their_sign_together() -> None:
    """One lucky image of 30 samples is luck; 30 lucky images are not."""
    gain = np.zeros(N, np.float32)
    gain[:30] = 1
    alone = np.array([f"i{i}" for i in range(N)])
    shared = np.array(["i0"] * 30 + [f"i{i}" for i in range(30, N)])
    for clusters, luck in ((alone, False), (shared, True)):
        pair = versus(
            [
                a_run("one", score=np.zeros(N, np.float32), cluster=clusters),
                a_run("two", score=gain, cluster=clusters),
            ]
        )[0]
        assert pair.clustered
        assert (verdict(pair.differences[0]) == "no difference shown") is luck


def test_runs_are_compared_on_what_they_share() -> None:
    one, other = a_run("one", **answered(RIGHT)), a_run("two", range(40, 100), **answered(RIGHT))
    (pair,) = versus([one, other])
    assert pair.n == 20 and pair.sizes == (N, N) and pair.differences[0].n == 20


@pytest.mark.parametrize(
    "other", [{"ids": range(100, 160)}, {"data": "cifar10"}], ids=["ids", "data"]
)
def test_runs_on_other_data_are_refused_in_a_sentence(other: dict[str, Any]) -> None:
    runs = [a_run("one", **answered(RIGHT)), a_run("two", **other, **answered(RIGHT))]
    with pytest.raises(BadInput, match=r"one was tested on scenes and two on .*share no sample"):
        versus(runs)


def test_the_same_names_with_other_answers_are_other_samples() -> None:
    one, other = a_run("one", **answered(RIGHT)), a_run("two", **answered(RIGHT))
    other.samples["truth"][:30] = "z"
    assert len(shared_rows(one, other)) == 30


def test_runs_without_numbers_are_left_out() -> None:
    empty = Run(Path("x"), "x", {}, (), (), ())
    assert versus([]) == [] and versus([empty, a_run("one", **answered(RIGHT))]) == []
    nothing = a_run("n", accuracy=np.full(N, np.nan, np.float32))
    assert versus([nothing, a_run("one", **answered(RIGHT))])[0].differences == ()
