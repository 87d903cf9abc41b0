"""Published numbers of self-supervision, by dataset, row and span."""

import pytest

from overt.papers.ssa.published import TABLE_1, TABLE_2, TABLE_3, TABLE_4, figures


@pytest.mark.parametrize(
    ("data", "row", "value"),
    [("trec6", "none", 0.8120), ("trec6", "mmd", 0.8480), ("cifar10", "adversarial", 0.7112)],
)
def test_tables_1_and_2_have_the_printed_numbers(data: str, row: str, value: float) -> None:
    (figure,) = figures(data, row, "image").values()
    assert figure.value == pytest.approx(value) and figure.higher_is_better
    assert f"Table {1 if data == 'trec6' else 2}, {row}" in figure.source


def test_tables_3_and_4_have_numbers_per_side() -> None:
    found = figures("vqa_hat", "adversarial", "both")
    assert found["vqa_accuracy"].value == pytest.approx(0.6192)
    assert (found["rank_correlation"].value, found["emd"].value) == (0.15, 0.352)
    assert not found["emd"].higher_is_better
    none = [figures("vqa_hat", "none", side) for side in ("image", "question")]
    assert none[0] == none[1] and none[0]["vqa_accuracy"].value == pytest.approx(0.5808)


def test_unpublished_rows_have_no_number() -> None:
    for data, row in (("trec6", "kl"), ("trec6", ""), ("easyvqa", "mse"), ("vqa_hat", "emd")):
        assert not figures(data, row, "image")


def test_the_paper_ranks_the_losses_equally_in_all_tables() -> None:
    order = ["coral", "mse", "mmd", "adversarial"]
    for table in (TABLE_1, TABLE_2):
        assert sorted(table, key=table.__getitem__) == ["none", *order]
    for side in ("question", "image"):
        assert sorted(order, key=lambda loss: TABLE_4[side, loss]) == order
        assert sorted(order, key=lambda loss: TABLE_3[side, loss][0]) == order
