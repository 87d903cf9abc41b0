import numpy as np
import pytest
import torch

from overt.data.dataset import Dataset
from overt.data.sort_of_clevr import SortOfClevr
from overt.data.sort_of_clevr_world import (
    ANSWERS,
    COLOURS,
    KINDS,
    NAMES,
    NON_RELATIONAL,
    RELATION_OF,
    RELATIONAL,
    TERNARY,
    render,
)
from overt.data.vocabulary import UNKNOWN, Vocabulary
from overt.errors import UserError

ALL = (NON_RELATIONAL, RELATIONAL, TERNARY)
CENTRES = [[46, 38], [57, 12], [64, 28], [62, 69], [34, 13], [52, 46]]
TEXTS = (
    "is the gray object at the top?",
    "what shape is the object closest to the yellow object?",
    "is any object in line between the blue object and the red object?",
)
DIGEST = "253949b1a4847c4a"


@pytest.fixture(scope="module")
def dataset() -> SortOfClevr:
    return SortOfClevr("val", seed=3, count=60, relations=ALL)


def test_questions_of_one_image_are_distinct(dataset):
    for relation, first in ((NON_RELATIONAL, 0), (RELATIONAL, 10), (TERNARY, 20)):
        texts = [dataset.texts(range(30 * s + first, 30 * s + first + 10)) for s in range(20)]
        assert all(len(set(ten)) == 10 for ten in texts)
        kinds = dataset.questions.kinds[:, first : first + 10]
        assert {RELATION_OF[KINDS[kind]] for kind in kinds.flatten()} == {relation}
    pairs = dataset.questions.first != dataset.questions.second
    assert pairs[:, 20:].all() and (dataset.questions.second[:, :20] == -1).all()
    # questions are also about yellow
    assert set(dataset.questions.first[:, 20:].flatten()) == set(range(6))


def test_batches_match_the_generated_scenes():
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
            if number == 5:  # no object covers the last one
                pixel = batch.images[batch.image_of[row], :, (y0 + y1) // 2, (x0 + x1) // 2]
                assert tuple(pixel.tolist()) == colour
        assert torch.equal(
            batch.boxes[row, :, 0], torch.from_numpy(found.things.centres[scene, :, 1] - 5).float()
        )
    assert isinstance(found, Dataset)


def test_target_is_the_cell_share_of_the_deciding_object():
    found = SortOfClevr("test", seed=2, count=6, relations=[NON_RELATIONAL])
    batch = found.batch(range(60))
    weights = batch.target.weights[:, 0, 0, 0]
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(60))
    for row in range(60):
        scene, number = divmod(row, 10)
        y, x = found.things.centres[scene, found.questions.first[scene, number]]
        shares = torch.zeros(75, 75)
        shares[y - 5 : y + 6, x - 5 : x + 6] = 1
        cells = shares.reshape(5, 15, 5, 15).sum((1, 3)).flatten()
        torch.testing.assert_close(weights[row], cells / cells.sum())


def test_question_vectors_match_the_texts(dataset):
    indices = range(120)
    vectors = dataset.vectors(indices)
    assert vectors.shape == (120, 18)
    subtypes = {kind: number % 3 for number, kind in enumerate(KINDS)}
    for text, vector, kind in zip(
        dataset.texts(indices), vectors.tolist(), dataset.questions.kinds.flatten(), strict=False
    ):
        colours = sorted(NAMES[place % 6] for place in range(12) if vector[place])
        assert colours == sorted(word for word in text.replace("?", "").split() if word in NAMES)
        assert text.index(NAMES[vector.index(1)]) == min(text.index(name) for name in colours)
        relation = (NON_RELATIONAL, RELATIONAL, TERNARY)[vector[12:15].index(1)]
        assert relation == RELATION_OF[KINDS[kind]]
        assert vector[15:].index(1) == subtypes[KINDS[kind]] and sum(vector) == 3 + (
            relation == TERNARY
        )
    plain = SortOfClevr("test", count=2).vectors(range(40))
    assert plain.shape == (40, 11) and (plain.sum(dim=1) == 3).all()
    assert plain[:20, 6].sum() == 10 and plain[:20, 7].sum() == 10


def test_vocabulary_is_complete_and_can_be_replaced(dataset):
    assert not (dataset.batch(range(300)).tokens == UNKNOWN).any()
    reader = Vocabulary.build([["red"]])
    assert int(SortOfClevr("test", count=1, reader=reader).batch([0]).tokens.max()) <= reader.size


def test_groups_are_relations_or_kinds():
    batch = SortOfClevr("test", count=2).batch(range(40))
    assert set(batch.groups) == {NON_RELATIONAL, RELATIONAL}
    assert set(SortOfClevr("test", count=2, group=str).batch(range(40)).groups) == set(KINDS[:6])


def test_image_depends_only_on_seed_split_and_number():
    more_images = SortOfClevr("val", seed=5, count=300)
    fewer = SortOfClevr("val", seed=5, count=40)
    assert np.array_equal(more_images.things.centres[:40], fewer.things.centres)
    assert np.array_equal(more_images.questions.answers[:40], fewer.questions.answers)
    more = SortOfClevr("val", seed=5, count=40, relations=ALL)
    assert np.array_equal(more.questions.first[:, :20], fewer.questions.first)
    for other in (SortOfClevr("val", seed=6, count=40), SortOfClevr("test", seed=5, count=40)):
        assert not np.array_equal(other.things.centres, fewer.things.centres)


def test_seed_gives_the_recorded_dataset():
    """Recorded with the first version; if this changes, the dataset is another one."""
    found = SortOfClevr("test", seed=1, count=2, relations=ALL)
    assert found.things.centres[0].tolist() == CENTRES
    assert found.texts([0, 10, 20]) == TEXTS
    assert found.digest()[:16] == DIGEST


def test_digest_depends_on_split_seed_count_and_relations():
    kinds = [
        SortOfClevr("val", 1, 2),
        SortOfClevr("test", 1, 2),
        SortOfClevr("val", 2, 2),
        SortOfClevr("val", 1, 3),
        SortOfClevr("val", 1, 2, [NON_RELATIONAL]),
        SortOfClevr("val", 1, 2, ALL),
    ]
    assert len({one.digest() for one in kinds}) == len(kinds)
    assert kinds[0].digest() == SortOfClevr("val", 1, 2).digest()


def test_official_sizes_and_answer_balance():
    """The shares that the page about data gives."""
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
    ("options", "message"),
    [
        ({"split": "train+val"}, "train, val.*test"),
        ({"split": "dev"}, "split 'dev'"),
        ({"count": 0}, "got 0 and 1"),
        ({"seed": -1}, "got 9800 and -1"),
        ({"relations": []}, "each once"),
        ({"relations": ["spatial"]}, "each once"),
        ({"relations": [NON_RELATIONAL, NON_RELATIONAL]}, "each once"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        SortOfClevr(**options)


def test_out_of_range_index_raises():
    found = SortOfClevr("test", count=1)
    for number in (-1, 20):
        with pytest.raises(UserError, match=rf"20 \w+: {number} is out"):
            found.batch([number])
