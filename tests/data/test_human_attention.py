import json
from dataclasses import replace

import pytest
import torch

from overt import metrics
from overt.attention import AttentionMap, Kind, grid, words
from overt.data.cifar import Cifar10
from overt.data.human_attention import (
    FixationDataset,
    GroundTruth,
    HumanAttentionDataset,
    iterate_ground_truth,
    load_ground_truth,
    pool_people,
)
from overt.data.images import stretch
from overt.data.osie import DEGREE, SHOWN, Osie
from overt.data.yelp_hat import YelpHat
from overt.errors import UserError


def make_people(table: list[list[list[float]]], present: list[list[bool]]) -> AttentionMap:
    values = torch.tensor(table)[:, None, None]
    mask = torch.tensor(present)[..., None].expand(values.shape[0], *values.shape[3:])
    return AttentionMap(
        values, grid(1, 2), words(values.shape[3], name="people"), mask, Kind.AMOUNT
    )


class MarkedTexts:
    """A minimal dataset: two texts with one marked word each."""

    name, split = "marked", "all"

    def __len__(self):
        return 2

    def batch(self, indices):
        from overt.data.batch import Batch

        cells = torch.eye(2)[list(indices)]
        return Batch(
            ids=tuple(f"marked/{at}" for at in indices),
            target=AttentionMap.from_cells(cells, words(2)),
        )

    def digest(self):
        return "-"


def test_dataset_with_a_target_has_ground_truth():
    batch, truth = load_ground_truth(MarkedTexts(), [1, 0])
    assert batch.ids == ("marked/1", "marked/0") and len(truth) == 2
    assert truth.target.values[:, 0, 0, 0].tolist() == [[0, 1], [1, 0]]
    assert (truth.people, truth.fixations, truth.others, truth.prior) == (None,) * 4


def test_dataset_without_a_target_raises():
    class Bare(MarkedTexts):
        def batch(self, indices):
            return replace(super().batch(indices), target=None)

    with pytest.raises(UserError, match=r"marked all.*truth"):
        load_ground_truth(Bare(), [0])


def test_ground_truth_is_iterated_in_batches():
    found = list(iterate_ground_truth(MarkedTexts(), 1))
    assert [batch.ids for batch, _ in found] == [("marked/0",), ("marked/1",)]
    assert sum(len(truth) for _, truth in iterate_ground_truth(MarkedTexts(), 5)) == 2
    assert sum(len(truth) for _, truth in iterate_ground_truth(MarkedTexts(), 5, limit=1)) == 1
    with pytest.raises(UserError, match="1, got 0"):
        list(iterate_ground_truth(MarkedTexts(), 0))


def test_pool_people_sums_only_present_people():
    people = make_people([[[2.0, 1], [3, 9]], [[1, 0], [0, 4]]], [[True, False], [True, True]])
    together = pool_people(people).check()
    assert together.values[:, 0, 0].tolist() == [[[2, 1]], [[1, 4]]]
    assert together.kind is Kind.AMOUNT and len(together.queries) == 1
    signed = replace(people, kind=Kind.SIGNED)
    with pytest.raises(ValueError, match="cannot be summed"):
        pool_people(signed)


def test_select_selects_rows_of_every_field():
    people = make_people([[[2.0, 1], [3, 9]], [[1, 0], [0, 4]]], [[True, False], [True, True]])
    truth = GroundTruth(pool_people(people), people=people)
    one = truth.select(torch.tensor([1]))
    assert one.people.values.tolist() == people.values[[1]].tolist() and one.prior is None
    assert one.to("cpu").target.values.tolist() == [[[[[1, 4]]]]]
    with pytest.raises(ValueError, match=r"people .*1 .* 2"):
        GroundTruth(truth.target, people=one.people)


# --- fixations

FIXATIONS = {
    "a.jpg": [[[100, 110, 700], [100, 90, 500], [200, 150, 80]], [[750], [550], [300]]],
    "b.jpg": [[[400.5, 90], [300, 90], [100, 90]]],
    "c.jpg": [[[790], [10], [100]], [[10], [590], [90]]],
}


@pytest.fixture
def osie(tmp_path, write_photo):
    for name in FIXATIONS:
        write_photo(tmp_path / "osie" / "images" / name, (6, 8))
    (tmp_path / "osie" / "fixations.json").write_text(json.dumps(FIXATIONS))
    return Osie(tmp_path, size=(4, 4), resize=stretch, cells=(2, 2), photos=3)


def test_fixations_are_counted_on_the_photo_and_on_others(osie):
    assert isinstance(osie, HumanAttentionDataset) and isinstance(osie, FixationDataset)
    _, truth = load_ground_truth(osie, [0, 1, 2])
    assert truth.fixations.values[0, 0, 0].tolist() == [[2, 0, 0, 1], [0, 0, 0, 1]]
    assert pool_people(truth.fixations).values[:, 0, 0, 0].tolist() == [
        [2, 0, 0, 2],
        [1, 0, 0, 1],
        [0, 1, 1, 0],
    ]
    # fixations of the other photos on the cells of this one
    assert truth.others.values[:, 0, 0, 0].tolist() == [
        [1, 1, 1, 1],
        [2, 1, 1, 2],
        [3, 0, 0, 3],
    ]


def test_prior_is_the_fixation_density_of_other_photos(osie):
    _, truth = load_ground_truth(osie, [0, 1, 2])
    truth.prior.check()
    cells = [(y, x) for y in (0, 300) for x in (0, 400)]
    for row, name in enumerate(FIXATIONS):
        expected = []
        for top, left in cells:
            total = 0.0
            for other, people in FIXATIONS.items():
                for xs, ys, _ in people if other != name else []:
                    for x, y in zip(xs, ys, strict=True):
                        total += interval_mass(x, left, left + 400) * interval_mass(
                            y, top, top + 300
                        )
            expected.append(total)
        expected = torch.tensor(expected) / sum(expected)
        torch.testing.assert_close(
            truth.prior.values[row, 0, 0, 0], expected.float(), atol=1e-5, rtol=1e-5
        )


def interval_mass(at: float, low: float, high: float) -> float:
    """The mass of a Gaussian between two lines of the screen."""
    from statistics import NormalDist

    gaussian = NormalDist(at, DEGREE)
    return gaussian.cdf(high) - gaussian.cdf(low)


def test_ground_truth_does_not_depend_on_the_batch(osie):
    _, together = load_ground_truth(osie, [0, 1, 2])
    for place in range(3):
        _, alone = load_ground_truth(osie, [place])
        for name in ("target", "others", "prior"):
            found, expected = getattr(alone, name), getattr(together, name)
            torch.testing.assert_close(found.values[0], expected.values[place])


def test_single_photo_has_empty_others_and_prior(tmp_path, write_photo):
    write_photo(tmp_path / "osie" / "images" / "a.jpg", (6, 8))
    table = {"a.jpg": FIXATIONS["a.jpg"]}
    (tmp_path / "osie" / "fixations.json").write_text(json.dumps(table))
    alone = Osie(tmp_path, size=(4, 4), cells=(2, 2), photos=1)
    assert not alone.others([0]).values.any() and not alone.prior([0]).values.any()


def test_empty_selection_has_empty_ground_truth(osie):
    assert len(osie.prior([])) == len(osie.counts([])) == 0


# --- real files


@pytest.mark.long
def test_center_prior_explains_real_fixations(data_root, needs):
    """The prior of 699 photos has information gain over a uniform map; NSS agrees."""
    source = Osie(needs(data_root, "osie"), resize=stretch)
    _, truth = load_ground_truth(source, range(6))
    counts = pool_people(truth.fixations)
    assert int(pool_people(source.counts([0])).values.sum()) == sum(
        len(person.points) for person in source.fixations([0])[0]
    )
    even = metrics.uniform_map(truth.target)
    assert metrics.mean(metrics.information_gain(truth.prior, counts, even)) > 0.3
    assert metrics.mean(metrics.nss(truth.prior, counts)) > 0.5
    shuffled = metrics.mean(metrics.auc_shuffled(truth.prior, counts, truth.others))
    assert shuffled < metrics.mean(metrics.auc_judd(truth.prior, counts))
    assert SHOWN == (600, 800)


def test_yelp_reviews_have_people_and_no_fixations(data_root, needs):
    source = YelpHat(needs(data_root, "yelp_hat"))
    _, truth = load_ground_truth(source, range(4))
    assert truth.people is not None and truth.fixations is None
    fused = pool_people(truth.people).normalize()
    torch.testing.assert_close(fused.values, truth.target.values)


def test_images_without_ground_truth_raise(data_root, needs):
    with pytest.raises(UserError, match="cifar10"):
        load_ground_truth(Cifar10(needs(data_root, "cifar10"), "test"), [0])
