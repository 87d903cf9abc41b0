"""`Scorecard`: intervals, comparisons, text, HTML, CSV and files."""

import csv
import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt import metrics
from overt.errors import CorruptFileError, UserError
from overt.metrics.scorecard.catalog import select_metrics
from overt.metrics.scorecard.result import MODEL, Scorecard, format_interval, mean_over_runs
from overt.metrics.statistics import (
    Interval,
    benjamini_hochberg,
    effect_size,
    probability_of_superiority,
)

NAMES = ("spearman", "deletion_area@mask", "entropy", "accuracy")


def make_scorecard(
    seed: int = 0, count: int = 40, lift: float = 0.2, name: str = "ours"
) -> Scorecard:
    """Return a scorecard of two maps and four metrics; the first map is better by `lift`."""
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
        ("attention", "random"), tuple(e.about() for e in select_metrics(NAMES)), ids,
        tuple(f"image {at // 2}" for at in range(count)), numbers,
        {"nss": "there are no fixations"}, {"spearman": 0.5},
    )  # fmt: skip


def test_records_are_the_lines_of_the_csv_and_of_a_data_frame() -> None:
    card = make_scorecard()
    lines = list(csv.DictReader(io.StringIO(card.to_csv())))
    records = card.to_records()
    assert [(one["map"], one["measure"]) for one in records] == [
        (line["map"], line["measure"]) for line in lines
    ]
    means = [float(line["mean"]) for line in lines]
    assert [one["mean"] for one in records] == pytest.approx(means)
    assert ["difference" in one for one in records] == [one["map"] == "random" for one in records]
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    table = card.to_pandas()
    assert table.equals(pandas.DataFrame(records, columns=table.columns))
    assert list(table.columns) == list(lines[0]) and len(table) == len(records) == 7
    assert table.difference.isna().tolist() == [one["map"] != "random" for one in records]


def test_sample_records_have_every_score_of_every_sample() -> None:
    card = make_scorecard()
    records = card.to_sample_records()
    assert len(records) == 40 * 7
    for one in records[::17]:
        wanted = card.numbers[one["map"], one["measure"]][card.ids.index(one["id"])]
        assert one["value"] == wanted or (math.isnan(one["value"]) and np.isnan(wanted))
        assert one["cluster"] == f"image {card.ids.index(one['id']) // 2}"
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    means = pandas.DataFrame(records).groupby(["map", "measure"]).value.mean()
    found = card.intervals["attention", "spearman"].mean
    assert means["attention", "spearman"] == pytest.approx(found)


def test_a_data_frame_without_pandas_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        make_scorecard().to_pandas()


def test_means_and_intervals_are_over_images() -> None:
    card = make_scorecard()
    found = card.intervals["attention", "spearman"]
    values = torch.from_numpy(card.values("spearman"))
    assert found.count == 39 and found.mean == pytest.approx(float(values.nanmean()))
    wanted = metrics.confidence_interval(values, clusters=card.clusters)
    assert (found.low, found.high) == (wanted.low, wanted.high)
    assert card.intervals[MODEL, "accuracy"].count == 40
    assert card.values("accuracy").sum() == card.values("accuracy", "random").sum()


def test_the_judged_map_is_compared_with_a_control_on_every_map_metric() -> None:
    card = make_scorecard()
    gaps = {one.key: one for one in card.against("random")}
    assert set(gaps) == set(NAMES[:3])
    gap = gaps["spearman"]
    ours, theirs = (torch.from_numpy(card.numbers[m, "spearman"]) for m in card.maps)
    assert gap.mean == pytest.approx(float((ours - theirs).nanmean())) and gap.n == 39
    assert gap.effect == pytest.approx(effect_size(ours - theirs))
    assert gap.superiority == pytest.approx(probability_of_superiority(ours - theirs))
    chances = [gaps[key].p for key in NAMES[:3]]
    assert [gaps[key].holm for key in NAMES[:3]] == list(metrics.holm(chances))
    assert [gaps[key].fdr for key in NAMES[:3]] == list(benjamini_hochberg(chances))
    assert [gaps[key].verdict for key in NAMES[:3]] == ["better", "better", ""]
    with pytest.raises(ValueError, match="unknown map 'cat'"):
        card.against("cat")


def test_concentration_is_not_compared_for_different_key_counts() -> None:
    one, two = make_scorecard(1, name="fine"), make_scorecard(2, name="coarse")
    keys = [gap.key for gap in one.compare(two)]
    assert "entropy" in keys and one.not_compared(two) == ""  # no key counts
    fine, coarse = (
        replace(card, key_counts=np.full(40, count, dtype=np.float32))
        for card, count in ((one, 64), (two, 16))
    )
    assert [gap.key for gap in fine.compare(coarse)] == [key for key in keys if key != "entropy"]
    assert fine.not_compared(coarse) == (
        "not compared: entropy (they depend on the number of keys, which for 's0' is 64 in fine "
        "and 16 in coarse)"
    )
    assert "entropy" not in mean_over_runs([fine], [coarse]) and "entropy" in mean_over_runs([fine])
    alike = replace(two, key_counts=np.array([np.nan, *[64] * 39], dtype=np.float32))
    assert fine.compare(alike) == one.compare(two) and fine.not_compared(alike) == ""


def test_key_counts_are_saved(tmp_path: Path) -> None:
    counted = replace(make_scorecard(), key_counts=np.arange(40, dtype=np.float32))
    counted.save(tmp_path)
    assert np.array_equal(Scorecard.load(tmp_path).key_counts, counted.key_counts)
    replace(counted, key_counts=np.ones(3, dtype=np.float32)).save(tmp_path)
    with pytest.raises(CorruptFileError, match=r"'key_count' .* 40\b"):
        Scorecard.load(tmp_path)


def test_models_are_compared_on_the_same_samples_in_any_order() -> None:
    one, two = make_scorecard(1, name="one"), make_scorecard(2, lift=0.0, name="two")
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
    with pytest.raises(UserError, match=r"samples.*'s30'"):
        one.compare(make_scorecard(2, count=30))


def test_means_over_runs_use_runs_and_samples() -> None:
    ours, theirs = (
        [make_scorecard(s) for s in range(3)],
        [make_scorecard(s, lift=0.0) for s in range(3, 6)],
    )
    stacked = torch.stack([torch.from_numpy(one.values("spearman")) for one in ours])
    found = mean_over_runs(ours)
    assert found["spearman"] == metrics.two_level_interval(stacked, clusters=ours[0].clusters)
    apart = mean_over_runs(ours, theirs)
    assert apart["spearman"].low > 0.1 and apart["deletion_area@mask"].high < -0.1
    with pytest.raises(ValueError, match="1 scorecard"):
        mean_over_runs([])


def test_to_dict_is_json_without_times() -> None:
    found = make_scorecard().to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    by_key = {one["key"]: one for one in found["measures"]}
    assert by_key["spearman"]["direction"] == "higher" and by_key["spearman"]["cannot_say"]
    assert set(by_key["spearman"]["values"]) == {"attention", "random"}
    assert set(by_key["accuracy"]["values"]) == {MODEL}
    assert found["against"]["random"]["spearman"]["holm"] < 0.05
    assert found["n"] == 40 and found["clusters"] == 20 and "seconds" not in json.dumps(found)


def test_str_shows_table_verdicts_and_skipped_metrics() -> None:
    text = str(make_scorecard())
    assert text.startswith("ours on toys test, 40 samples, seed 0\nmeasure")
    line = next(one for one in text.splitlines() if one.startswith("spearman"))
    assert "↑" in line and " 39 " in line and "[" in line
    assert "attention beats random on 2 of 2 metrics." in text
    assert text.endswith("not computed: nss (there are no fixations)")


def test_notebook_html_is_escaped() -> None:
    html = make_scorecard(name="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert html.count("<tr>") == 5 and "Cannot show:" in html


def test_csv_has_one_line_per_map_and_metric() -> None:
    lines = list(csv.DictReader(io.StringIO(make_scorecard().to_csv())))
    assert len(lines) == 3 * 2 + 1
    assert {line["map"] for line in lines} == {"attention", "random", MODEL}
    beside = next(one for one in lines if one["map"] == "random" and one["measure"] == "spearman")
    assert float(beside["difference"]) > 0.1 and float(beside["holm"]) < 0.05


def test_an_infinite_value_makes_an_infinite_mean() -> None:
    card = make_scorecard()
    values = card.numbers["attention", "spearman"]
    values[0] = np.inf
    assert card.intervals["attention", "spearman"].mean == math.inf
    assert card.to_dict()["measures"][0]["values"]["attention"]["mean"] == "inf"
    json.dumps(card.to_dict(), allow_nan=False)
    assert "attention,inf,,,39" in card.to_csv()
    assert card.against("random")[0].n == 39 and card.against("random")[0].mean == math.inf


def test_infinite_losses_count_in_verdicts() -> None:
    """A map with infinite loss on 30 of 40 samples is worse, even if better on the other ten."""
    card = make_kl_scorecard(
        np.r_[np.full(30, np.inf), np.full(10, 0.1)], np.linspace(0.9, 1.1, 40)
    )
    (gap,) = card.against("uniform")
    assert (gap.n, gap.mean, gap.verdict) == (40, math.inf, "worse")
    assert gap.superiority == 0.75 and gap.holm < 0.05 and math.isnan(gap.effect)
    assert "attention beats uniform on 0 of 1 metrics." in str(card)
    (other,) = replace(card, maps=("uniform", "attention")).against("attention")
    assert (other.mean, other.verdict) == (-math.inf, "better")
    few = make_kl_scorecard(np.r_[np.full(3, np.inf), np.full(37, 0.1)], np.linspace(0.9, 1.1, 40))
    assert (
        few.against("uniform")[0].verdict == ""
    )  # infinite on three samples, better on the others
    both = np.r_[np.full(20, np.inf), np.linspace(0.9, 1.1, 20)]
    (tie,) = make_kl_scorecard(both, both[::-1].copy()).against("uniform")
    assert math.isnan(tie.mean) and tie.verdict == "" and tie.n == 40
    (same,) = make_kl_scorecard(both, both.copy()).against("uniform")
    assert same.mean == 0 and same.n == 40
    found = mean_over_runs([card, card], [card, card])
    assert math.isnan(found["kl"].mean) and mean_over_runs([card])["kl"].mean == math.inf


def make_kl_scorecard(ours: np.ndarray, theirs: np.ndarray) -> Scorecard:
    names = tuple(f"s{at}" for at in range(len(ours)))
    values = {"attention": ours.astype(np.float32), "uniform": theirs.astype(np.float32)}
    return Scorecard(
        "ours", {"name": "toys", "split": "test", "digest": "0", "items": len(ours)}, 0,
        ("attention", "uniform"), tuple(e.about() for e in select_metrics(["kl"])), names, names,
        {(name, "kl"): one for name, one in values.items()},
    )  # fmt: skip


def test_table_shows_n_per_map_where_they_differ() -> None:
    card = make_scorecard()
    card.numbers["random", "spearman"][:30] = np.nan
    line = next(line for line in card.table()[1] if line[0] == "spearman")
    assert line[2] == "10 to 39"
    assert line[3].endswith("(n = 39)") and line[4].endswith("(n = 10)")
    other = next(line for line in card.table()[1] if line[0] == "entropy")
    assert other[2] == "40" and "n =" not in other[3]
    assert "10 to 39" in card._repr_html_() and "(n = 10)" in card._repr_html_()


def test_comparisons_are_computed_once(monkeypatch, tmp_path: Path) -> None:
    card, other, calls = make_scorecard(), make_scorecard(1), []
    tests = metrics.statistics.holm

    def counted_tests(*given, **more):
        calls.append(1)
        return tests(*given, **more)

    monkeypatch.setattr(metrics.statistics, "holm", counted_tests)
    card.save(tmp_path)
    str(card), card.to_dict(), card.to_csv(), list(card.notes()), card.against("random")
    assert len(calls) == 1
    card.compare(other), card.compare(other)
    assert len(calls) == 2


def test_different_metric_versions_are_not_compared(tmp_path: Path) -> None:
    card = make_scorecard()
    old = replace(
        make_scorecard(1, name="theirs"),
        measures=tuple(
            {**one, "version": one["version"] + (one["key"] == "entropy")} for one in card.measures
        ),
    )
    plain = {name: value for name, value in card.measures[0].items() if name != "version"}
    assert replace(card, measures=(plain,)).version("spearman") == 1  # results without a version
    assert {one.key for one in card.compare(old)} == {"spearman", "deletion_area@mask", "accuracy"}
    message = card.not_compared(old)
    assert (
        message
        == "not compared: entropy (definition 1 in ours and 2 in theirs: evaluate both again)"
    )
    assert "entropy" not in mean_over_runs([card], [old]) and "entropy" in mean_over_runs(
        [card], [card]
    )
    card.save(tmp_path)
    assert all("version" in one for one in Scorecard.load(tmp_path).measures)


def test_str_shows_the_judged_map_and_the_metric_definitions(tmp_path: Path) -> None:
    about = {**select_metrics(["pointing_game"])[0].about()}
    numbers = {("attention", "pointing_game"): np.ones(40, dtype=np.float32)}
    card = replace(
        make_scorecard(), maps=("attention",), measures=(about,), numbers=numbers,
        judged="attention: map 2 of 3, over image 7x7",
    )  # fmt: skip
    assert "evaluated: attention: map 2 of 3, over image 7x7." in str(card)
    note = "pointing_game weight each cell by the share of it that the ground truth covers"
    assert f"{note} (definition 2)." in str(card)
    card.save(tmp_path)
    assert Scorecard.load(tmp_path).judged == card.judged
    old = replace(card, measures=({**about, "version": 1},))
    assert "pointing_game count every cell that the ground truth touches as inside" in str(old)


def test_save_and_load_are_bit_exact(tmp_path: Path) -> None:
    card = make_scorecard()
    card.save(tmp_path / "one")
    again = Scorecard.load(tmp_path / "one")
    assert again.to_dict() == card.to_dict() and str(again) == str(card)
    assert again.seconds == {"spearman": 0.5}
    again.save(tmp_path / "two")
    for name in ("scorecard.json", "scorecard.csv", "samples.npz", "clock.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_loading_something_else_than_a_scorecard_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="scorecard"):
        Scorecard.load(tmp_path)
    make_scorecard().save(tmp_path)
    (tmp_path / "scorecard.json").write_text('{"format": "another"}')
    with pytest.raises(CorruptFileError, match="not a scorecard"):
        Scorecard.load(tmp_path)
    with pytest.raises(ValueError, match="fixations"):
        make_scorecard().about("nss")


def test_intervals_are_formatted_with_few_digits() -> None:
    assert format_interval(Interval(math.nan, math.nan, math.nan, 0)) == "–"
    assert format_interval(Interval(123.456, 100.0, 150.0, 3)) == "123.5 [100.0, 150.0]"
    assert format_interval(Interval(0.25, math.nan, math.nan, 1)) == "0.250"  # one sample


def test_scorecards_and_differences_are_one_line_in_a_prompt() -> None:
    card = make_scorecard()
    assert repr(card).startswith("Scorecard(ours on ") and "40 samples" in repr(card)
    assert all(name in repr(card) for name in card.maps) and "\n" not in repr(card)
    text = repr(card.against(card.maps[1])[0])
    assert text.startswith("Difference(") and " minus " in text and "n=39" in text
    assert not re.search(r"\d\.\d{7}", text)


def test_the_title_states_items_of_several_samples() -> None:
    """`--limit 64` takes 64 items: of 64 images with four questions each, 256 samples."""
    card = make_scorecard()
    assert "40 samples, seed" in card.title
    several = replace(card, data={**card.data, "items": 10})
    assert "40 samples of 10 items, seed" in several.title
