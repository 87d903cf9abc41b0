import numpy as np
import pytest
import torch

from overt.data.shapes import (
    ANSWERS,
    COLOURS,
    KINDS,
    NAMES,
    PLAIN,
    RELATION_OF,
    RELATIONAL,
    TERNARY,
    render,
)
from overt.data.sortclevr import SortOfClevr
from overt.data.source import Source
from overt.data.vocabulary import UNKNOWN, Vocabulary
from overt.errors import BadInput

ALL = (PLAIN, RELATIONAL, TERNARY)
CENTRES = [[46, 38], [57, 12], [64, 28], [62, 69], [34, 13], [52, 46]]
TEXTS = (
    "is the gray object at the top?",
    "what shape is the object closest to the yellow object?",
    "is any object in line between the blue object and the red object?",
)
DIGEST = "253949b1a4847c4a"


@pytest.fixture(scope="module")
def small() -> SortOfClevr:
    return SortOfClevr("val", seed=3, count=60, relations=ALL)


def test_no_question_is_asked_twice_of_a_picture(small):
    for relation, first in ((PLAIN, 0), (RELATIONAL, 10), (TERNARY, 20)):
        texts = [small.texts(range(30 * s + first, 30 * s + first + 10)) for s in range(20)]
        assert all(len(set(ten)) == 10 for ten in texts)
        kinds = small.questions.kinds[:, first : first + 10]
        assert {RELATION_OF[KINDS[kind]] for kind in kinds.flatten()} == {relation}
    pairs = small.questions.first != small.questions.second
    assert pairs[:, 20:].all() and (small.questions.second[:, :20] == -1).all()
    assert set(small.questions.first[:, 20:].flatten()) == set(range(6))  # yellow is asked about


def test_a_batch_by_hand():
    found = SortOfClevr("test", seed=2, count=3)
    batch = found.batch([25, 7, 20])
    assert batch.ids == tuple(
        f"sortclevr/2/test/{at}" for at in ("000001/05", "000000/07", "000001/00")
    )
    assert batch.images.shape == (2, 3, 75, 75) and batch.images.dtype == torch.uint8
    assert batch.image_of.tolist() == [1, 0, 1]
    assert torch.equal(batch.images, torch.from_numpy(render(found.things.at(np.arange(2)))))
    assert batch.text.texts == found.texts([25, 7, 20])
    assert batch.boxes.shape == (3, 6, 4)
    for row, scene in enumerate((1, 0, 1)):
        for number, colour in enumerate(COLOURS.values()):  # the centre of a box has its colour
            x0, y0, x1, y1 = batch.boxes[row, number].long().tolist()
            assert (x1 - x0, y1 - y0) == (11, 11)
            if number == 5:  # nothing lies over the last
                pixel = batch.images[batch.image_of[row], :, (y0 + y1) // 2, (x0 + x1) // 2]
                assert tuple(pixel.tolist()) == colour
        assert torch.equal(
            batch.boxes[row, :, 0], torch.from_numpy(found.things.centres[scene, :, 1] - 5).float()
        )
    assert isinstance(found, Source)


def test_the_target_is_the_share_of_cells_that_show_what_decides():
    found = SortOfClevr("test", seed=2, count=6, relations=[PLAIN])
    batch = found.batch(range(60))
    weights = batch.target.weights[:, 0, 0, 0]
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(60))
    for row in range(60):
        scene, place_ = divmod(row, 10)
        y, x = found.things.centres[scene, found.questions.first[scene, place_]]
        shares = torch.zeros(75, 75)
        shares[y - 5 : y + 6, x - 5 : x + 6] = 1
        cells = shares.reshape(5, 15, 5, 15).sum((1, 3)).flatten()
        torch.testing.assert_close(weights[row], cells / cells.sum())


def test_vectors_say_what_the_words_say(small):
    indices = range(120)
    vectors = small.vectors(indices)
    assert vectors.shape == (120, 18)
    subtypes = {kind: number % 3 for number, kind in enumerate(KINDS)}
    for text, vector, kind in zip(
        small.texts(indices), vectors.tolist(), small.questions.kinds.flatten(), strict=False
    ):
        colours = sorted(NAMES[place % 6] for place in range(12) if vector[place])
        assert colours == sorted(word for word in text.replace("?", "").split() if word in NAMES)
        assert text.index(NAMES[vector.index(1)]) == min(text.index(name) for name in colours)
        relation = (PLAIN, RELATIONAL, TERNARY)[vector[12:15].index(1)]
        assert relation == RELATION_OF[KINDS[kind]]
        assert vector[15:].index(1) == subtypes[KINDS[kind]] and sum(vector) == 3 + (
            relation == TERNARY
        )
    plain = SortOfClevr("test", count=2).vectors(range(40))
    assert plain.shape == (40, 11) and (plain.sum(dim=1) == 3).all()
    assert plain[:20, 6].sum() == 10 and plain[:20, 7].sum() == 10


def test_all_words_are_known_and_another_reader_is_used(small):
    assert not (small.batch(range(300)).tokens == UNKNOWN).any()
    reader = Vocabulary.build([["red"]])
    assert int(SortOfClevr("test", count=1, reader=reader).batch([0]).tokens.max()) <= reader.size


def test_groups_are_relations_or_kinds():
    batch = SortOfClevr("test", count=2).batch(range(40))
    assert set(batch.groups) == {PLAIN, RELATIONAL}
    assert set(SortOfClevr("test", count=2, group=str).batch(range(40)).groups) == set(KINDS[:6])


def test_a_picture_depends_on_seed_split_and_number_alone():
    whole = SortOfClevr("val", seed=5, count=300)
    fewer = SortOfClevr("val", seed=5, count=40)
    assert np.array_equal(whole.things.centres[:40], fewer.things.centres)
    assert np.array_equal(whole.questions.answers[:40], fewer.questions.answers)
    more = SortOfClevr("val", seed=5, count=40, relations=ALL)
    assert np.array_equal(more.questions.first[:, :20], fewer.questions.first)
    for other in (SortOfClevr("val", seed=6, count=40), SortOfClevr("test", seed=5, count=40)):
        assert not np.array_equal(other.things.centres, fewer.things.centres)


def test_what_a_seed_means_never_changes():
    """Written down on the day the generator was: a change here is another data set."""
    found = SortOfClevr("test", seed=1, count=2, relations=ALL)
    assert found.things.centres[0].tolist() == CENTRES
    assert found.texts([0, 10, 20]) == TEXTS
    assert found.digest()[:16] == DIGEST


def test_digests_tell_sets_apart():
    kinds = [
        SortOfClevr("val", 1, 2),
        SortOfClevr("test", 1, 2),
        SortOfClevr("val", 2, 2),
        SortOfClevr("val", 1, 3),
        SortOfClevr("val", 1, 2, [PLAIN]),
        SortOfClevr("val", 1, 2, ALL),
    ]
    assert len({one.digest() for one in kinds}) == len(kinds)
    assert kinds[0].digest() == SortOfClevr("val", 1, 2).digest()


def test_official_sizes_and_how_even_the_answers_are():
    """The shares that the data page states."""
    found = SortOfClevr("train", seed=1)
    assert len(found) == 9_800 * 20 and found.classes == ANSWERS and len(ANSWERS) == 10
    assert len(SortOfClevr("test")) == 200 * 20
    largest = {}
    for number, kind in enumerate(KINDS[:6]):
        counts = np.bincount(found.questions.answers[found.questions.kinds == number])
        largest[kind] = counts.max() / counts.sum()
    assert all(largest[kind] < 0.52 for kind in KINDS[:5])
    assert 0.30 < largest["count"] < 0.33


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "train+val"}, "train, val and test"),
        ({"split": "dev"}, "no split 'dev'"),
        ({"count": 0}, "0 pictures"),
        ({"seed": -1}, "seed -1"),
        ({"relations": []}, "each once"),
        ({"relations": ["spatial"]}, "each once"),
        ({"relations": [PLAIN, PLAIN]}, "each once"),
    ],
)
def test_what_cannot_be_made_is_refused(options, said):
    with pytest.raises(BadInput, match=said):
        SortOfClevr(**options)


def test_places_out_of_range_are_named():
    found = SortOfClevr("test", count=1)
    for place_ in (-1, 20):
        with pytest.raises(BadInput, match=rf"0 to 19, not {place_}"):
            found.batch([place_])
