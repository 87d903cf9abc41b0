"""Run comparison: paired differences on shared samples, clusters and corrections."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overt.errors import UserError
from overt.metrics import statistics
from overt.viz.run_comparison import compare_runs, describe_verdict, shared_sample_rows
from overt.viz.run_reader import Run

N = 60
RNG = np.random.default_rng(0)
RIGHT = RNG.random(N) < 0.4


def make_run(name: str, ids: range = range(N), data: str = "scenes", **columns: np.ndarray) -> Run:
    """A run with these columns per sample; `truth` is a, predictions are a or b."""
    ours = {
        key: {"value": float(values[0]), "direction": "higher", "n": len(values)}
        for key, values in columns.items()
        if values.dtype.kind == "f"
    }
    samples = {"id": np.array([f"q{i}" for i in ids]), **columns}
    results: dict[str, Any] = {"ours": ours, "data": [{"name": data, "split": "test", "n": N}]}
    return Run(Path(name), name, results, (), (), (), samples)


def answer_columns(right: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "accuracy": right.astype(np.float32),
        "prediction": np.where(right, "a", "b"),
        "truth": np.full(len(right), "a"),
    }


def test_paired_difference_agrees_with_confidence_interval() -> None:
    better = RIGHT | (np.arange(N) % 3 == 0)
    one = make_run("one", **answer_columns(RIGHT))
    # the second run has the samples in another order
    order = np.random.default_rng(1).permutation(N)
    columns = {key: values[order] for key, values in answer_columns(better).items()}
    other = make_run("two", range(N), **columns)
    other.samples["id"][:] = np.array([f"q{i}" for i in order])
    (pair,) = compare_runs([one, other])
    (found,) = pair.differences
    slow = better.astype(float) - RIGHT
    assert found.key == "accuracy" and (pair.n, pair.sizes) == (N, (N, N))
    assert found.mean == pytest.approx(slow.mean()) and found.n == N
    assert found.low < slow.mean() < found.high
    import torch

    p = statistics.confidence_interval(torch.from_numpy(slow)).p
    assert found.p == pytest.approx(p) and found.holm == found.p
    assert (pair.first_only, pair.second_only) == (0, int((better & ~RIGHT).sum()))
    assert describe_verdict(found) == "better" and not pair.clustered


def test_metric_missing_in_the_first_run_is_compared_with_the_next() -> None:
    mass = RNG.random(N).astype(np.float32)
    runs = [
        make_run("none", **answer_columns(RIGHT)),
        make_run("soft", **answer_columns(RIGHT), mass=mass),
        make_run("hard", **answer_columns(~RIGHT), mass=mass + 0.3),
    ]
    found = {
        (pair.first, pair.second): [one.key for one in pair.differences]
        for pair in compare_runs(runs)
    }
    assert found == {(0, 1): ["accuracy"], (0, 2): ["accuracy"], (1, 2): ["mass"]}


def test_p_values_are_corrected_over_all_comparisons() -> None:
    runs = [
        make_run(str(i), **answer_columns(np.roll(RIGHT, i)), mass=np.roll(RIGHT, 3 * i) * 1.0)
        for i in range(3)
    ]
    lines = [one for pair in compare_runs(runs) for one in pair.differences]
    assert len(lines) == 4
    expected = statistics.holm([one.p for one in lines])
    assert [one.holm for one in lines] == pytest.approx(expected)


def test_samples_of_one_image_are_one_cluster() -> None:
    """A gain on one image of 30 samples is not significant; on 30 images it is."""
    gain = np.zeros(N, np.float32)
    gain[:30] = 1
    alone = np.array([f"i{i}" for i in range(N)])
    shared = np.array(["i0"] * 30 + [f"i{i}" for i in range(30, N)])
    for clusters, insignificant in ((alone, False), (shared, True)):
        pair = compare_runs(
            [
                make_run("one", score=np.zeros(N, np.float32), cluster=clusters),
                make_run("two", score=gain, cluster=clusters),
            ]
        )[0]
        assert pair.clustered
        assert (describe_verdict(pair.differences[0]) == "no difference shown") is insignificant


def test_runs_are_compared_on_shared_samples() -> None:
    one, other = (
        make_run("one", **answer_columns(RIGHT)),
        make_run("two", range(40, 100), **answer_columns(RIGHT)),
    )
    (pair,) = compare_runs([one, other])
    assert pair.n == 20 and pair.sizes == (N, N) and pair.differences[0].n == 20


@pytest.mark.parametrize(
    "other", [{"ids": range(100, 160)}, {"data": "cifar10"}], ids=["ids", "data"]
)
def test_runs_on_different_data_raise(other: dict[str, Any]) -> None:
    runs = [
        make_run("one", **answer_columns(RIGHT)),
        make_run("two", **other, **answer_columns(RIGHT)),
    ]
    with pytest.raises(UserError, match=r"one .*scenes.* two "):
        compare_runs(runs)


def test_samples_with_different_truth_are_not_shared() -> None:
    one, other = make_run("one", **answer_columns(RIGHT)), make_run("two", **answer_columns(RIGHT))
    other.samples["truth"][:30] = "z"
    assert len(shared_sample_rows(one, other)) == 30


def test_runs_without_values_are_left_out() -> None:
    empty = Run(Path("x"), "x", {}, (), (), ())
    assert (
        compare_runs([]) == []
        and compare_runs([empty, make_run("one", **answer_columns(RIGHT))]) == []
    )
    nothing = make_run("n", accuracy=np.full(N, np.nan, np.float32))
    assert compare_runs([nothing, make_run("one", **answer_columns(RIGHT))])[0].differences == ()


def test_different_metric_definitions_are_not_compared() -> None:
    one, other = (make_run(name, mass_inside=RNG.random(N), kl=RNG.random(N)) for name in "ab")
    other.results["ours"]["mass_inside"]["version"] = 2
    (pair,) = compare_runs([one, other])
    assert [found.key for found in pair.differences] == ["kl"]
    assert pair.redefined == ("mass_inside",)


def test_infinite_values_are_included() -> None:
    """A run with infinite loss on most samples is worse, whatever its finite ones."""
    bad = np.r_[np.full(45, np.inf), np.full(N - 45, 0.1)]
    one, other = make_run("one", kl=RNG.random(N) + 0.5), make_run("two", kl=bad)
    for run in (one, other):
        run.results["ours"]["kl"]["direction"] = "lower"
    (found,) = compare_runs([one, other])[0].differences
    assert (found.n, found.mean, describe_verdict(found)) == (N, np.inf, "worse")
