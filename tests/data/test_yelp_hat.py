import csv
from pathlib import Path

import pytest
import torch

from overt.data import catalog, yelp_hat
from overt.data.dataset import Dataset
from overt.data.vocabulary import Vocabulary
from overt.data.yelp_hat import PARTS, YelpHat, consensus, correct_annotators, marked_ranges, union
from overt.errors import CorruptFileError, UserError

TEXT = 'Great "tacos" &\n\nbeer.  Go!'


def make_page(text: str, marked: str) -> str:
    """The annotation page of a person: one span per word, active for words in `marked`."""
    spans = []
    for word in text.split():
        kind = ' class="active"' if word in marked.split() else ""
        spans.append(f"<span{kind}>{word.replace('&', '&amp;')}</span>")
    return " ".join([*spans, "<span></span>"])


def make_row(text: str, marked: str, label: int = 1, answer: str = "yes") -> list[str]:
    return [str(label), text, answer, make_page(text, marked)]


ROWS = {
    "50": [
        make_row(TEXT, 'Great "tacos"'),
        make_row(TEXT, "Great beer.", answer="no"),
        make_row(TEXT, "Great", 1),
    ],
    "100": [make_row("bad food here", "bad", 0, "no"), make_row("bad food here", "here", 0, "idk")],
    "200": [make_row("nice and warm", "nice"), make_row("cold and dark", "cold dark", 0, "")],
    "7": [make_row(f"review {n} is fine", "fine") for n in range(6)],
}


def write_yelp_hat(root: Path, rows: dict[str, list[list[str]]] = ROWS) -> Path:
    folder = root / yelp_hat.FOLDER
    folder.mkdir(exist_ok=True)
    for part, name in PARTS.items():
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([yelp_hat.COLUMNS, *rows[part]])
    return folder


def open_yelp_hat(root: Path, split: str = "all", **options) -> YelpHat:
    return YelpHat(root, split, **{"reviews": 10, "test": 2, "validation": 3, **options})


def test_batches_match_hand_computed_values(tmp_path):
    write_yelp_hat(tmp_path)
    found = open_yelp_hat(tmp_path)
    batch = found.batch([0, 1])
    assert isinstance(found, Dataset) and len(found) == 10
    assert batch.ids == ("yelp_hat/50/0000", "yelp_hat/100/0000")
    assert batch.text.texts == (TEXT, "bad food here")
    assert [found.classes[label] for label in batch.labels] == ["good", "bad"]
    assert batch.groups == ("50", "100")
    tokens = batch.text.tokens(0)
    assert tokens == ["Great", '"', "tacos", '"', "&", "beer", ".", "Go", "!"]
    expected = torch.tensor([3, 1, 1, 1, 0, 1, 1, 0, 0]) / 8  # shares of three people, normalised
    torch.testing.assert_close(batch.target.weights[0, 0, 0, 0], expected)
    assert batch.target.weights[1, 0, 0, 0].tolist() == [0.5, 0, 0.5] + [0] * 6
    assert batch.target.mask[1, 0].tolist() == [True] * 3 + [False] * 6
    batch.target.check()


def test_people_maps_have_one_row_per_person(tmp_path):
    write_yelp_hat(tmp_path)
    found = open_yelp_hat(tmp_path).people([0, 1])
    assert found.values.shape == (2, 1, 1, 3, 9)
    assert found.values[0, 0, 0, :, 0].tolist() == [1, 1, 1]
    assert found.values[0, 0, 0, 1].tolist() == [1, 0, 0, 0, 0, 1, 1, 0, 0]
    assert found.rows.tolist() == [[True] * 3, [True, True, False]]
    assert found.values[1, 0, 0, 2].sum() == 0
    found.check()
    assert len(found.rows_as_samples()) == 6


def test_fusion_by_consensus_and_union(tmp_path):
    write_yelp_hat(tmp_path)
    both = open_yelp_hat(tmp_path, fuse=consensus).batch([0, 1, 2]).target
    assert both.weights[0, 0, 0, 0].tolist() == [1] + [0] * 8
    assert both.rows[:, 0].tolist() == [True, False, True]  # no word is marked by both
    assert both.weights[1].sum() == 0
    either = open_yelp_hat(tmp_path, fuse=union).batch([0]).target.weights[0, 0, 0, 0]
    torch.testing.assert_close(either, torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 0]) / 6)


def test_only_correct_annotators_can_be_trusted(tmp_path):
    write_yelp_hat(tmp_path)
    found = open_yelp_hat(tmp_path, trust=correct_annotators)
    target = found.batch([0, 1, 3]).target
    torch.testing.assert_close(
        target.weights[0, 0, 0, 0], torch.tensor([2, 1, 1, 1, 0, 0, 0, 0, 0]) / 5
    )
    assert target.weights[1, 0, 0, 0, :3].tolist() == [1, 0, 0]
    assert not target.rows[2].any()  # no annotator answered that this one is bad
    assert found.people([0]).rows.tolist() == [[True, True]]


def test_parts_and_splits_select_reviews(tmp_path):
    write_yelp_hat(tmp_path)
    assert [len(open_yelp_hat(tmp_path, parts=[part])) for part in PARTS] == [1, 1, 2, 6]
    ids = {s: {r.id for r in open_yelp_hat(tmp_path, s).reviews} for s in ("train", "val", "test")}
    assert [len(one) for one in ids.values()] == [5, 3, 2]
    assert len(set.union(*ids.values())) == 10
    assert {r.id for r in open_yelp_hat(tmp_path, "train+val").reviews} == ids["train"] | ids["val"]
    sevens = open_yelp_hat(tmp_path, "test", parts=["7"])  # a part keeps the splits of its reviews
    assert {r.id for r in sevens.reviews} <= ids["test"]
    with pytest.raises(UserError, match=r"part '60'.*50"):
        open_yelp_hat(tmp_path, parts=["60"])


def test_vocabulary_comes_from_train(tmp_path):
    write_yelp_hat(tmp_path)
    readers = [open_yelp_hat(tmp_path, split).reader for split in ("train", "val", "test", "all")]
    assert all(reader == readers[0] for reader in readers)
    reader = Vocabulary.build([["bad"]])
    assert open_yelp_hat(tmp_path, reader=reader).batch([1]).tokens.tolist() == [[5, 1, 1]]


def test_marked_ranges_are_read_from_the_page():
    html = (
        '<span class="">Great</span> <span class="active">"tacos"</span> <span >&amp;</span> '
        '<span class="active"><i class="other">be</i>er.</span> <span>Go!</span><span></span>'
    )
    assert [TEXT[a:b] for a, b in marked_ranges(TEXT, html)] == ['"tacos"', "beer."]
    script = '<span class="active"><script>Go!</script></span>'
    assert marked_ranges("Go!", script) == ((0, 3),)  # treated as text; nothing runs
    for broken, message in [
        ("<span>Great</span>", "ends before"),
        ("<span>Good</span>", "'Good'.*'Great"),
        ("", "ends before"),
        ("<span", "ends before"),
    ]:
        with pytest.raises(UserError, match=message):
            marked_ranges(TEXT, broken)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["1", "bad food here", "yes"], "row 2 is not"),
        (["2", "bad food here", "yes", ""], "row 2 is not"),
        (["1", "", "yes", ""], "row 2 is not"),
        (["0", "bad food", "yes", "<span>bad</span>"], "row 2: .*ends before"),
        (make_row("bad food here", "", 1), "row 2 .*label"),
    ],
)
def test_invalid_row_raises_with_its_number(tmp_path, wrong, message):
    write_yelp_hat(tmp_path, {**ROWS, "100": [ROWS["100"][0], wrong]})
    with pytest.raises(CorruptFileError, match=message):
        open_yelp_hat(tmp_path)


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path):
    folder = write_yelp_hat(tmp_path)
    with pytest.raises(CorruptFileError, match=r"10 reviews.*1545"):
        YelpHat(tmp_path)
    for place in (-1, 10):
        with pytest.raises(UserError, match=rf"10 \w+: {place} is out"):
            open_yelp_hat(tmp_path).batch([place])
    for content, message in [(b"a,b\n", "does not start"), (b"\xff", "not a table of text")]:
        (folder / PARTS["7"]).write_bytes(content)
        with pytest.raises(CorruptFileError, match=message):
            open_yelp_hat(tmp_path)
    (folder / PARTS["7"]).unlink()
    with pytest.raises(UserError, match=r"ham_part7.*missing"):
        open_yelp_hat(tmp_path)


def test_digest_depends_on_data_split_and_fusion(tmp_path):
    write_yelp_hat(tmp_path)
    kinds = [
        open_yelp_hat(tmp_path),
        open_yelp_hat(tmp_path, "train"),
        open_yelp_hat(tmp_path, parts=["50"]),
        open_yelp_hat(tmp_path, fuse=union),
        open_yelp_hat(tmp_path, trust=correct_annotators),
    ]
    found = [one.digest() for one in kinds]
    assert len(set(found)) == 5
    write_yelp_hat(tmp_path, {**ROWS, "50": ROWS["50"][:2]})
    assert open_yelp_hat(tmp_path).digest() != found[0]


def test_digest_is_the_one_of_earlier_results(tmp_path):
    """Golden values: committed results use the earlier names `anybody` and `who_was_right`."""
    write_yelp_hat(tmp_path)
    assert open_yelp_hat(tmp_path).digest().startswith("7a3d04107cbeb5b5")
    assert open_yelp_hat(tmp_path, trust=correct_annotators).digest().startswith("a0c5a58363d2b74e")


@pytest.mark.long
def test_real_yelp_hat(data_root, needs):
    needs(data_root, "yelp_hat")
    whole = YelpHat(data_root)
    assert sum(len(review.people) for review in whole.reviews) == yelp_hat.MAPS
    sizes = {part: sum(review.part == part for review in whole.reviews) for part in PARTS}
    assert sizes == {"50": 300, "100": 439, "200": 181, "7": 625}
    right = [p.said == r.label for r in whole.reviews for p in r.people]
    assert sum(right) / len(right) == pytest.approx(0.928, abs=1e-3)
    people = whole.people(range(0, 1545, 100))
    people.check()
    assert people.rows.sum() == sum(len(whole.reviews[row].people) for row in range(0, 1545, 100))
    assert catalog.check_dataset(data_root, "yelp_hat") == []
