import csv
from pathlib import Path

import pytest
import torch

from overt.data import sets, yelp
from overt.data.source import Source
from overt.data.vocabulary import Vocabulary
from overt.data.yelp import PARTS, YelpHat, consensus, marked_ranges, union, who_was_right
from overt.errors import BadInput, Damaged

TEXT = 'Great "tacos" &\n\nbeer.  Go!'


def page(text: str, marked: str) -> str:
    """The page of a person: every word a span, those in `marked` active."""
    spans = []
    for word in text.split():
        kind = ' class="active"' if word in marked.split() else ""
        spans.append(f"<span{kind}>{word.replace('&', '&amp;')}</span>")
    return " ".join([*spans, "<span></span>"])


def row(text: str, marked: str, label: int = 1, said: str = "yes") -> list[str]:
    return [str(label), text, said, page(text, marked)]


ROWS = {
    "50": [row(TEXT, 'Great "tacos"'), row(TEXT, "Great beer.", said="no"), row(TEXT, "Great", 1)],
    "100": [row("bad food here", "bad", 0, "no"), row("bad food here", "here", 0, "idk")],
    "200": [row("nice and warm", "nice"), row("cold and dark", "cold dark", 0, "")],
    "7": [row(f"review {n} is fine", "fine") for n in range(6)],
}


def write(root: Path, rows: dict[str, list[list[str]]] = ROWS) -> Path:
    folder = root / yelp.FOLDER
    folder.mkdir(exist_ok=True)
    for part, name in PARTS.items():
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([yelp.COLUMNS, *rows[part]])
    return folder


def small(root: Path, split: str = "all", **options) -> YelpHat:
    return YelpHat(root, split, **{"reviews": 10, "test": 2, "validation": 3, **options})


def test_batches_by_hand(tmp_path):
    write(tmp_path)
    found = small(tmp_path)
    batch = found.batch([0, 1])
    assert isinstance(found, Source) and len(found) == 10
    assert batch.ids == ("yelp_hat/50/0000", "yelp_hat/100/0000")
    assert batch.text.texts == (TEXT, "bad food here")
    assert [found.classes[label] for label in batch.labels] == ["good", "bad"]
    assert batch.groups == ("50", "100")
    tokens = batch.text.tokens(0)
    assert tokens == ["Great", '"', "tacos", '"', "&", "beer", ".", "Go", "!"]
    expected = torch.tensor([3, 1, 1, 1, 0, 1, 1, 0, 0]) / 8  # thirds of people, normalised
    torch.testing.assert_close(batch.target.weights[0, 0, 0, 0], expected)
    assert batch.target.weights[1, 0, 0, 0].tolist() == [0.5, 0, 0.5] + [0] * 6
    assert batch.target.mask[1, 0].tolist() == [True] * 3 + [False] * 6
    batch.target.check()


def test_people_one_by_one(tmp_path):
    write(tmp_path)
    found = small(tmp_path).people([0, 1])
    assert found.values.shape == (2, 1, 1, 3, 9)
    assert found.values[0, 0, 0, :, 0].tolist() == [1, 1, 1]
    assert found.values[0, 0, 0, 1].tolist() == [1, 0, 0, 0, 0, 1, 1, 0, 0]
    assert found.rows.tolist() == [[True] * 3, [True, True, False]]
    assert found.values[1, 0, 0, 2].sum() == 0
    found.check()
    assert len(found.each_row()) == 6


def test_consensus_and_union(tmp_path):
    write(tmp_path)
    both = small(tmp_path, fuse=consensus).batch([0, 1, 2]).target
    assert both.weights[0, 0, 0, 0].tolist() == [1] + [0] * 8
    assert both.rows[:, 0].tolist() == [True, False, True]  # no word was marked by both
    assert both.weights[1].sum() == 0
    either = small(tmp_path, fuse=union).batch([0]).target.weights[0, 0, 0, 0]
    torch.testing.assert_close(either, torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 0]) / 6)


def test_marks_of_those_who_were_right(tmp_path):
    write(tmp_path)
    found = small(tmp_path, trust=who_was_right)
    target = found.batch([0, 1, 3]).target
    torch.testing.assert_close(
        target.weights[0, 0, 0, 0], torch.tensor([2, 1, 1, 1, 0, 0, 0, 0, 0]) / 5
    )
    assert target.weights[1, 0, 0, 0, :3].tolist() == [1, 0, 0]
    assert not target.rows[2].any()  # nobody said that this one is bad
    assert found.people([0]).rows.tolist() == [[True, True]]


def test_parts_and_splits(tmp_path):
    write(tmp_path)
    assert [len(small(tmp_path, parts=[part])) for part in PARTS] == [1, 1, 2, 6]
    ids = {s: {r.id for r in small(tmp_path, s).reviews} for s in ("train", "val", "test")}
    assert [len(one) for one in ids.values()] == [5, 3, 2]
    assert len(set.union(*ids.values())) == 10
    assert {r.id for r in small(tmp_path, "train+val").reviews} == ids["train"] | ids["val"]
    sevens = small(tmp_path, "test", parts=["7"])  # a part keeps its reviews' split
    assert {r.id for r in sevens.reviews} <= ids["test"]
    with pytest.raises(BadInput, match=r"no part '60'.*50"):
        small(tmp_path, parts=["60"])


def test_words_are_those_of_train(tmp_path):
    write(tmp_path)
    readers = [small(tmp_path, split).reader for split in ("train", "val", "test", "all")]
    assert all(reader == readers[0] for reader in readers)
    reader = Vocabulary.build([["bad"]])
    assert small(tmp_path, reader=reader).batch([1]).tokens.tolist() == [[5, 1, 1]]


def test_ranges_of_marked_words():
    html = (
        '<span class="">Great</span> <span class="active">"tacos"</span> <span >&amp;</span> '
        '<span class="active"><i class="other">be</i>er.</span> <span>Go!</span><span></span>'
    )
    assert [TEXT[a:b] for a, b in marked_ranges(TEXT, html)] == ['"tacos"', "beer."]
    script = '<span class="active"><script>Go!</script></span>'
    assert marked_ranges("Go!", script) == ((0, 3),)  # text like any other: nothing is run
    for broken, said in [
        ("<span>Great</span>", "ends before"),
        ("<span>Good</span>", "'Good' where the review has 'Great"),
        ("", "ends before"),
        ("<span", "ends before"),
    ]:
        with pytest.raises(BadInput, match=said):
            marked_ranges(TEXT, broken)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["1", "bad food here", "yes"], "row 2 is not"),
        (["2", "bad food here", "yes", ""], "row 2 is not"),
        (["1", "", "yes", ""], "row 2 is not"),
        (["0", "bad food", "yes", "<span>bad</span>"], "row 2: the page ends before"),
        (row("bad food here", "", 1), "row 2 calls a review good"),
    ],
)
def test_a_row_in_another_form_is_named(tmp_path, wrong, said):
    write(tmp_path, {**ROWS, "100": [ROWS["100"][0], wrong]})
    with pytest.raises(Damaged, match=said):
        small(tmp_path)


def test_what_is_missing_or_broken_is_named(tmp_path):
    folder = write(tmp_path)
    with pytest.raises(Damaged, match="10 reviews, not 1545"):
        YelpHat(tmp_path)
    for place in (-1, 10):
        with pytest.raises(BadInput, match=f"0 to 9, not {place}"):
            small(tmp_path).batch([place])
    for content, said in [(b"a,b\n", "does not start"), (b"\xff", "not a table of text")]:
        (folder / PARTS["7"]).write_bytes(content)
        with pytest.raises(Damaged, match=said):
            small(tmp_path)
    (folder / PARTS["7"]).unlink()
    with pytest.raises(BadInput, match=r"ham_part7\.csv is missing"):
        small(tmp_path)


def test_digest_tells_data_splits_and_ways_apart(tmp_path):
    write(tmp_path)
    kinds = [
        small(tmp_path),
        small(tmp_path, "train"),
        small(tmp_path, parts=["50"]),
        small(tmp_path, fuse=union),
        small(tmp_path, trust=who_was_right),
    ]
    found = [one.digest() for one in kinds]
    assert len(set(found)) == 5
    write(tmp_path, {**ROWS, "50": ROWS["50"][:2]})
    assert small(tmp_path).digest() != found[0]


def test_real_yelp_hat(data_root, needs):
    needs(data_root, "yelp_hat")
    whole = YelpHat(data_root)
    assert sum(len(review.people) for review in whole.reviews) == yelp.MAPS
    sizes = {part: sum(review.part == part for review in whole.reviews) for part in PARTS}
    assert sizes == {"50": 300, "100": 439, "200": 181, "7": 625}
    right = [p.said == r.label for r in whole.reviews for p in r.people]
    assert sum(right) / len(right) == pytest.approx(0.928, abs=1e-3)
    people = whole.people(range(0, 1545, 100))
    people.check()
    assert people.rows.sum() == sum(len(whole.reviews[row].people) for row in range(0, 1545, 100))
    assert sets.check(data_root, "yelp_hat") == []
