"""Results tables: column order, groups and metric definitions."""

from typing import Any

import pytest

from overt.viz.results_table import ResultColumn, group_results, result_columns


def entry(value: Any, **more: Any) -> dict[str, Any]:
    return {
        "value": value,
        "unit": "share",
        "direction": "higher",
        "split": "test",
        "n": 10,
        "version": 2,
        **more,
    }


def run(seconds: float | None = None, paper: dict | None = None, **ours: Any) -> dict[str, Any]:
    measures = {name.replace("_", " "): value for name, value in ours.items()}
    return {"ours": measures, "paper": paper or {}, "seconds": seconds}


def texts(column: ResultColumn) -> list[str]:
    return [cell.text for cell in column.cells]


def test_columns_are_sorted_by_importance() -> None:
    one = run(
        12.5,
        entropy=entry(1.0),
        rank_correlation=entry(0.1),
        accuracy=entry(0.5),
        mass_inside=entry(0.4),
        pointing=entry(0.6),
    )
    one["ours"] = {"accuracy": one["ours"].pop("accuracy"), **one["ours"]}
    expected = ["Accuracy", "Pointing", "Mass inside", "Rank correlation", "Seconds", "Entropy"]
    assert [column.title for column in result_columns([one])] == expected
    assert [column.title for column in result_columns([run(1.0), one])] == expected


def test_arrows_follow_the_direction_of_the_metric() -> None:
    found = result_columns(
        [
            run(3.0, accuracy=entry(0.5), loss=entry(2.0, direction="lower")),
            run(2.0, accuracy=entry(0.7), loss=entry(1.0, direction="lower")),
            run(None, accuracy=entry(0.7)),
        ]
    )
    assert [column.title for column in found] == ["Accuracy", "Seconds", "Loss"]
    assert [column.arrow for column in found] == ["↑", "↓", "↓"]
    assert texts(found[1]) == ["3.000", "2.000", "–"]


def test_runs_with_different_task_metrics_share_the_first_column() -> None:
    found = result_columns([run(accuracy=entry(0.5)), run(CIDEr=entry(112.3, unit="points"))])
    assert found[0].title == "Task score" and len(found) == 1
    assert [cell.measure for cell in found[0].cells] == ["Accuracy", "CIDEr"]
    both = result_columns([run(accuracy=entry(0.5)), run(CIDEr=entry(1.1), accuracy=entry(0.6))])
    assert [column.title for column in both] == ["Task score", "Accuracy"]
    assert texts(both[1]) == ["0.500", "0.600"]


def test_paper_values_are_next_to_ours() -> None:
    paper = {
        "accuracy": {"value": 58.9, "unit": "%", "direction": "higher", "source": "table 2"},
        "AUC": {"value": 0.8, "source": "table 3"},
    }
    found = result_columns([run(paper=paper, accuracy=entry(61.25, unit="%", low=60, high=62))])
    cell = found[0].cells[0]
    assert (cell.text, cell.paper, cell.source) == ("61.2", "58.9", "table 2")
    assert cell.interval == "60.0 to 62.0" and found[0].unit == "%"
    assert (found[1].title, found[1].cells[0].text, found[1].cells[0].paper) == (
        "AUC",
        "–",
        "0.800",
    )


def test_equal_n_and_split_are_given_once() -> None:
    same = result_columns([run(accuracy=entry(0.5)), run(accuracy=entry(0.6)), run()])[0]
    assert (same.same_n, same.same_split) == (10, "test")
    differ = result_columns([run(accuracy=entry(0.5)), run(accuracy=entry(0.6, n=9, split="val"))])[
        0
    ]
    assert (differ.same_n, differ.same_split) == (None, "")


@pytest.mark.parametrize(
    "results",
    [{}, {"ours": None}, {"ours": {"a": 3}}, {"ours": {"a": {"value": "x"}}, "paper": []}],
)
def test_malformed_results_give_an_empty_table(results: dict[str, Any]) -> None:
    for column in result_columns([results]):
        assert texts(column) == ["–"]
    assert group_results([results]) == {}


def test_groups_have_one_bar_per_run_and_a_chance_line() -> None:
    first = {"groups": {"accuracy": {"exist": {"value": 0.6, "n": 5, "chance": 0.5}}}}
    second = {
        "groups": {
            "accuracy": {
                "exist": {"value": 0.9, "n": 5, "chance": 0.5},
                "count": {"value": 0.2, "n": 7},
                "none": {"value": None, "n": 0},
            }
        }
    }
    exist, count = group_results([first, {}, second])["Accuracy"]
    assert [(bar.run, bar.text, bar.reach) for bar in exist.bars] == [
        (0, "0.600", 0.6),
        (2, "0.900", 0.9),
    ]
    assert (exist.chance, exist.chance_text, exist.n) == (0.5, "0.500", 5)
    assert (count.name, count.chance, len(count.bars)) == ("count", None, 1)


def test_groups_in_percent_have_an_axis_to_100() -> None:
    one = {"groups": {"accuracy": {"a": {"value": 62.0, "chance": 25}, "b": {"value": 0.5}}}}
    a, b = group_results([one])["Accuracy"]
    assert a.bars[0].reach == 0.62 and a.chance == 0.25 and b.bars[0].reach == 0.005


def test_charted_metrics_have_no_column() -> None:
    names = ("accuracy", "jaccard_8x8", "jaccard_joined", "jaccard_other", "entropy")
    one = {"ours": {name: entry(0.5) for name in names}}
    titles = ["Accuracy", "Jaccard 8x8", "Jaccard joined", "Jaccard other", "Entropy"]
    assert [column.title for column in result_columns([one])] == titles
    one["groups"] = {"jaccard": {name: {"value": 0.5, "n": 1} for name in ("8x8", "joined")}}
    assert [column.title for column in result_columns([one])] == [
        "Accuracy",
        "Jaccard other",
        "Entropy",
    ]
    assert list(group_results([one])) == ["Jaccard"]
    one["paper"] = {"jaccard_joined": {"value": 0.4, "source": "figure 9"}}
    titles = [column.title for column in result_columns([one])]
    assert titles == ["Accuracy", "Jaccard joined", "Jaccard other", "Entropy"]


def test_direction_is_also_read_from_higher_is_better() -> None:
    def value(number: float, better: bool | None) -> dict[str, Any]:
        return {"value": number, "unit": "nats", "higher_is_better": better, "split": "test"}

    found = result_columns(
        [run(score=value(1.0, True), KL=value(0.2, False), entropy=value(3.0, None))]
    )
    assert [column.arrow for column in found] == ["↑", "↓", ""]


def test_spearman_is_the_rank_correlation() -> None:
    one = run(1.0, accuracy=entry(0.5), deletion=entry(0.1), Spearman=entry(0.3))
    assert [column.title for column in result_columns([one])] == [
        "Accuracy",
        "Spearman",
        "Seconds",
        "Deletion",
    ]


def test_each_metric_definition_has_its_column() -> None:
    """Values of an older definition have a separate, labelled column, even if alone."""
    old = {"ours": {"pointing": entry(0.9, version=1)}, "paper": {"pointing": {"value": 0.8}}}
    new = {"ours": {"pointing": entry(0.7)}, "paper": {}}
    found = {column.title: column for column in result_columns([old, new])}
    assert texts(found["Pointing"]) == ["–", "0.700"]
    assert texts(found["Pointing (definition 1)"]) == ["0.900", "–"]
    assert found["Pointing (definition 1)"].cells[0].paper == "0.800"
    del old["ours"]["pointing"]["version"]
    assert [column.title for column in result_columns([old])] == ["Pointing (definition 1)"]
    charted = {"groups": {"jaccard": {"8x8": {"value": 0.5}}}}
    ours = {"error": entry(0.1), "jaccard_8x8": entry(0.5, version=1)}
    drawn = result_columns([{"ours": ours, "paper": {}, **charted}])
    assert [one.title for one in drawn] == ["Error"]  # charted metrics have no column
    by_group = {"pointing": {"count": {"value": 0.5}}}
    charts = group_results([{**old, "groups": by_group}, {**new, "groups": by_group}])
    assert {name: [bar.run for bar in found[0].bars] for name, found in charts.items()} == {
        "Pointing (definition 1)": [0],
        "Pointing": [1],
    }
