"""A scorecard as numbers, intervals, comparisons, text, a page of a notebook, and files."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt import measure
from overt.errors import BadInput, Damaged
from overt.measure.scorecards.card import MODEL, Scorecard, over_runs, written
from overt.measure.scorecards.catalogue import choose
from overt.measure.statistics import Interval

NAMES = ("spearman", "deletion_area@mask", "entropy", "accuracy")


def made(seed: int = 0, count: int = 40, lift: float = 0.2, name: str = "ours") -> Scorecard:
    """Two maps and four measures; the first map is better than the second by `lift`."""
    dice = np.random.default_rng(seed)
    ids = tuple(f"s{at}" for at in range(count))
    numbers = {}
    for map, more in (("attention", lift), ("random", 0.0)):
        for key in NAMES[:3]:
            sign = -1 if key.startswith("deletion") else 1
            values = dice.normal(sign * more, 0.1, count)
            numbers[map, key] = values.astype(np.float32)
    numbers["attention", "spearman"][3] = np.nan
    numbers[MODEL, "accuracy"] = (dice.random(count) < 0.5).astype(np.float32)
    return Scorecard(
        name, {"name": "toys", "split": "test", "digest": "0", "items": count}, 0,
        ("attention", "random"), tuple(e.about() for e in choose(NAMES)), ids,
        tuple(f"image {at // 2}" for at in range(count)), numbers,
        {"nss": "there are no fixations"}, {"spearman": 0.5},
    )  # fmt: skip


def test_means_and_intervals_are_over_images() -> None:
    card = made()
    found = card.intervals["attention", "spearman"]
    values = torch.from_numpy(card.values("spearman"))
    assert found.count == 39 and found.mean == pytest.approx(float(values.nanmean()))
    wanted = measure.bootstraps(values[None], 0, clusters=card.clusters)[0]
    assert (found.low, found.high) == (wanted.low, wanted.high)
    assert card.intervals[MODEL, "accuracy"].count == 40
    assert card.values("accuracy").sum() == card.values("accuracy", "random").sum()


def test_the_judged_map_is_held_to_a_control_by_every_measure_of_maps() -> None:
    card = made()
    gaps = {one.key: one for one in card.against("random")}
    assert set(gaps) == set(NAMES[:3])
    gap = gaps["spearman"]
    ours, theirs = (torch.from_numpy(card.numbers[m, "spearman"]) for m in card.maps)
    assert gap.mean == pytest.approx(float((ours - theirs).nanmean())) and gap.n == 39
    assert gap.effect == pytest.approx(measure.effect_size(ours - theirs))
    assert gap.superiority == pytest.approx(measure.superiority(ours - theirs))
    chances = [gaps[key].p for key in NAMES[:3]]
    assert [gaps[key].holm for key in NAMES[:3]] == list(measure.holm(chances))
    assert [gaps[key].fdr for key in NAMES[:3]] == list(measure.benjamini_hochberg(chances))
    assert [gaps[key].verdict for key in NAMES[:3]] == ["better", "better", ""]
    with pytest.raises(ValueError, match="there is no map 'cat'"):
        card.against("cat")


def test_shapes_of_maps_with_other_numbers_of_keys_are_not_compared() -> None:
    one, two = made(1, name="fine"), made(2, name="coarse")
    keys = [gap.key for gap in one.compare(two)]
    assert "entropy" in keys and one.not_compared(two) == ""  # nobody has counted
    fine, coarse = (
        replace(card, key_counts=np.full(40, count, dtype=np.float32))
        for card, count in ((one, 64), (two, 16))
    )
    assert [gap.key for gap in fine.compare(coarse)] == [key for key in keys if key != "entropy"]
    assert fine.not_compared(coarse) == (
        "not compared: entropy (they depend on the number of keys, and of 's0' fine has 64 and "
        "coarse 16)"
    )
    assert "entropy" not in over_runs([fine], [coarse]) and "entropy" in over_runs([fine])
    alike = replace(two, key_counts=np.array([np.nan, *[64] * 39], dtype=np.float32))
    assert fine.compare(alike) == one.compare(two) and fine.not_compared(alike) == ""


def test_how_many_keys_there_were_is_written_down(tmp_path: Path) -> None:
    counted = replace(made(), key_counts=np.arange(40, dtype=np.float32))
    counted.save(tmp_path)
    assert np.array_equal(Scorecard.load(tmp_path).key_counts, counted.key_counts)
    replace(counted, key_counts=np.ones(3, dtype=np.float32)).save(tmp_path)
    with pytest.raises(Damaged, match="'key_count' is not a number for each of 40 samples"):
        Scorecard.load(tmp_path)


def test_two_models_are_compared_on_the_same_samples_whatever_their_order() -> None:
    one, two = made(1, name="one"), made(2, lift=0.0, name="two")
    shuffled = np.random.default_rng(0).permutation(40)
    mixed = Scorecard(
        two.name, two.data, 0, two.maps, two.measures,
        tuple(two.ids[at] for at in shuffled), tuple(two.clusters[at] for at in shuffled),
        {pair: values[shuffled] for pair, values in two.numbers.items()},
    )  # fmt: skip
    assert one.compare(two) == one.compare(mixed)
    gap = one.compare(two)[0]
    assert (gap.first, gap.second, gap.key, gap.verdict) == ("one", "two", "spearman", "better")
    assert two.compare(one)[0].verdict == "worse"
    with pytest.raises(BadInput, match="not measured on the same samples, such as 's30'"):
        one.compare(made(2, count=30))


def test_runs_and_samples_are_both_drawn_anew() -> None:
    ours, theirs = [made(s) for s in range(3)], [made(s, lift=0.0) for s in range(3, 6)]
    stacked = torch.stack([torch.from_numpy(one.values("spearman")) for one in ours])
    found = over_runs(ours)
    assert found["spearman"] == measure.two_level(stacked, 0, clusters=ours[0].clusters)
    apart = over_runs(ours, theirs)
    assert apart["spearman"].low > 0.1 and apart["deletion_area@mask"].high < -0.1
    with pytest.raises(ValueError, match="no scorecard"):
        over_runs([])


def test_it_is_a_dictionary_without_times_that_json_takes() -> None:
    said = made().to_dict()
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    by_key = {one["key"]: one for one in said["measures"]}
    assert by_key["spearman"]["direction"] == "higher" and by_key["spearman"]["cannot_say"]
    assert set(by_key["spearman"]["values"]) == {"attention", "random"}
    assert set(by_key["accuracy"]["values"]) == {MODEL}
    assert said["against"]["random"]["spearman"]["holm"] < 0.05
    assert said["n"] == 40 and said["clusters"] == 20 and "seconds" not in json.dumps(said)


def test_it_prints_itself() -> None:
    text = str(made())
    assert text.startswith("ours on toys test, 40 samples, seed 0\nmeasure")
    line = next(one for one in text.splitlines() if one.startswith("spearman"))
    assert "↑" in line and " 39 " in line and "[" in line
    assert "attention beats random on 2 of 2 measures." in text
    assert text.endswith("not asked: nss (there are no fixations)")


def test_a_notebook_shows_it_and_nothing_in_it_is_code() -> None:
    html = made(name="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert html.count("<tr>") == 5 and "Cannot say:" in html


def test_the_table_for_others_has_a_line_for_each_map_and_measure() -> None:
    lines = list(csv.DictReader(io.StringIO(made().to_csv())))
    assert len(lines) == 3 * 2 + 1
    assert {line["map"] for line in lines} == {"attention", "random", MODEL}
    beside = next(one for one in lines if one["map"] == "random" and one["measure"] == "spearman")
    assert float(beside["difference"]) > 0.1 and float(beside["holm"]) < 0.05


def test_an_infinite_number_makes_an_infinite_mean() -> None:
    card = made()
    values = card.numbers["attention", "spearman"]
    values[0] = np.inf
    assert card.intervals["attention", "spearman"].mean == math.inf
    assert card.to_dict()["measures"][0]["values"]["attention"]["mean"] is None
    assert card.against("random")[0].n == 38


def test_what_was_saved_is_read_again_to_the_bit(tmp_path: Path) -> None:
    card = made()
    card.save(tmp_path / "one")
    again = Scorecard.load(tmp_path / "one")
    assert again.to_dict() == card.to_dict() and str(again) == str(card)
    assert again.seconds == {"spearman": 0.5}
    again.save(tmp_path / "two")
    for name in ("scorecard.json", "scorecard.csv", "samples.npz", "clock.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_what_is_no_scorecard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no scorecard"):
        Scorecard.load(tmp_path)
    made().save(tmp_path)
    (tmp_path / "scorecard.json").write_text('{"format": "another"}')
    with pytest.raises(Damaged, match="is not a scorecard"):
        Scorecard.load(tmp_path)
    with pytest.raises(ValueError, match="was not measured: there are no fixations"):
        made().about("nss")


def test_numbers_are_written_short() -> None:
    assert written(Interval(math.nan, math.nan, math.nan, 0)) == "–"
    assert written(Interval(123.456, 100.0, 150.0, 3)) == "123.5 [100.0, 150.0]"
    assert written(Interval(0.25, 0.25, 0.25, 1)) == "0.250"  # drawn from itself alone
