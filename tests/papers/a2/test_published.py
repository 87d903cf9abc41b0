"""Published numbers per row, read off the tables by hand."""

import pytest

from overt.papers.a2.published import figures


@pytest.mark.parametrize(
    ("fuse", "critical", "cider", "bleu"),
    [
        ("none", False, 1.200, 0.372),
        ("max", False, 1.228, 0.377),
        ("moving-average", False, 1.223, 0.376),
        ("decay", False, 1.242, 0.379),
        ("gate", False, 1.250, 0.382),
        ("gate", True, 1.339, 0.398),
    ],
)
def test_coco_has_the_numbers_of_tables_1_and_3(fuse, critical, cider, bleu):
    found = figures("coco_captions", fuse, critical)
    assert found["cider_d"].value == pytest.approx(cider)
    assert found["bleu_4"].value == pytest.approx(bleu)
    assert found["cider_d"].unit == "score" and found["bleu_4"].unit == "share"


def test_flickr8k_has_the_numbers_of_show_attend_and_tell():
    found = figures("flickr8k", "none", critical=False)
    assert found["bleu_4"].value == pytest.approx(0.195)
    assert found["meteor"].value == pytest.approx(0.1893)
    assert "Show, Attend and Tell" in found["bleu_4"].source


def test_unpublished_rows_have_no_number():
    assert not figures("flickr8k", "gate", critical=False)
    assert not figures("coco_captions", "decay", critical=True)
    assert not figures("scenes", "gate", critical=False)
