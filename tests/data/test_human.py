import json
from dataclasses import replace

import pytest
import torch

from overt import measure
from overt.attention import AttentionMap, Kind, grid, words
from overt.data.cifar import Cifar10
from overt.data.human import Fixated, Peopled, Truth, pooled, truth_of, truths
from overt.data.images import stretch
from overt.data.osie import DEGREE, SHOWN, Osie
from overt.data.yelp import YelpHat
from overt.errors import BadInput


def people_of(table: list[list[list[float]]], seen: list[list[bool]]) -> AttentionMap:
    values = torch.tensor(table)[:, None, None]
    mask = torch.tensor(seen)[..., None].expand(values.shape[0], *values.shape[3:])
    return AttentionMap(
        values, grid(1, 2), words(values.shape[3], name="people"), mask, Kind.AMOUNT
    )


class Marked:
    """A data set of our own: two texts with one mark each."""

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


def test_a_source_with_a_target_is_enough():
    batch, truth = truth_of(Marked(), [1, 0])
    assert batch.ids == ("marked/1", "marked/0") and len(truth) == 2
    assert truth.target.values[:, 0, 0, 0].tolist() == [[0, 1], [1, 0]]
    assert (truth.people, truth.fixations, truth.others, truth.prior) == (None,) * 4


def test_a_source_without_a_target_says_what_to_take():
    class Bare(Marked):
        def batch(self, indices):
            return replace(super().batch(indices), target=None)

    with pytest.raises(BadInput, match="marked all says nothing of where attention should be"):
        truth_of(Bare(), [0])


def test_samples_come_a_few_at_a_time():
    found = list(truths(Marked(), 1))
    assert [batch.ids for batch, _ in found] == [("marked/0",), ("marked/1",)]
    assert sum(len(truth) for _, truth in truths(Marked(), 5)) == 2
    assert sum(len(truth) for _, truth in truths(Marked(), 5, limit=1)) == 1
    with pytest.raises(BadInput, match="nothing in it"):
        list(truths(Marked(), 0))


def test_people_are_added_up_and_absent_ones_are_not():
    people = people_of([[[2.0, 1], [3, 9]], [[1, 0], [0, 4]]], [[True, False], [True, True]])
    together = pooled(people).check()
    assert together.values[:, 0, 0].tolist() == [[[2, 1]], [[1, 4]]]
    assert together.kind is Kind.AMOUNT and len(together.queries) == 1
    signed = replace(people, kind=Kind.SIGNED)
    with pytest.raises(ValueError, match="no amounts"):
        pooled(signed)


def test_rows_are_selected_in_all_that_is_known():
    people = people_of([[[2.0, 1], [3, 9]], [[1, 0], [0, 4]]], [[True, False], [True, True]])
    truth = Truth(pooled(people), people=people)
    one = truth.select(torch.tensor([1]))
    assert one.people.values.tolist() == people.values[[1]].tolist() and one.prior is None
    assert one.to("cpu").target.values.tolist() == [[[[[1, 4]]]]]
    with pytest.raises(ValueError, match="people of 1 samples and 2 keys beside a target of 2"):
        Truth(truth.target, people=one.people)


# --- fixations

LOOKS = {
    "a.jpg": [[[100, 110, 700], [100, 90, 500], [200, 150, 80]], [[750], [550], [300]]],
    "b.jpg": [[[400.5, 90], [300, 90], [100, 90]]],
    "c.jpg": [[[790], [10], [100]], [[10], [590], [90]]],
}


@pytest.fixture
def osie(tmp_path, write_photo):
    for name in LOOKS:
        write_photo(tmp_path / "osie" / "images" / name, (6, 8))
    (tmp_path / "osie" / "fixations.json").write_text(json.dumps(LOOKS))
    return Osie(tmp_path, size=(4, 4), how=stretch, cells=(2, 2), photos=3)


def test_fixations_are_known_one_by_one_and_elsewhere(osie):
    assert isinstance(osie, Peopled) and isinstance(osie, Fixated)
    _, truth = truth_of(osie, [0, 1, 2])
    assert truth.fixations.values[0, 0, 0].tolist() == [[2, 0, 0, 1], [0, 0, 0, 1]]
    assert pooled(truth.fixations).values[:, 0, 0, 0].tolist() == [
        [2, 0, 0, 2],
        [1, 0, 0, 1],
        [0, 1, 1, 0],
    ]
    # those on other photos, on the cells of this one
    assert truth.others.values[:, 0, 0, 0].tolist() == [
        [1, 1, 1, 1],
        [2, 1, 1, 2],
        [3, 0, 0, 3],
    ]


def test_the_prior_is_the_density_of_all_other_photos(osie):
    _, truth = truth_of(osie, [0, 1, 2])
    truth.prior.check()
    cells = [(y, x) for y in (0, 300) for x in (0, 400)]
    for row, name in enumerate(LOOKS):
        wanted = []
        for top, left in cells:
            total = 0.0
            for other, people in LOOKS.items():
                for xs, ys, _ in people if other != name else []:
                    for x, y in zip(xs, ys, strict=True):
                        total += share(x, left, left + 400) * share(y, top, top + 300)
            wanted.append(total)
        wanted = torch.tensor(wanted) / sum(wanted)
        torch.testing.assert_close(
            truth.prior.values[row, 0, 0, 0], wanted.float(), atol=1e-5, rtol=1e-5
        )


def share(at: float, low: float, high: float) -> float:
    """The mass of a bell between two lines of the screen."""
    from statistics import NormalDist

    bell = NormalDist(at, DEGREE)
    return bell.cdf(high) - bell.cdf(low)


def test_nothing_depends_on_the_batch(osie):
    _, whole = truth_of(osie, [0, 1, 2])
    for place in range(3):
        _, alone = truth_of(osie, [place])
        for name in ("target", "others", "prior"):
            ours, theirs = getattr(alone, name), getattr(whole, name)
            torch.testing.assert_close(ours.values[0], theirs.values[place])


def test_a_photo_with_no_others_has_none(tmp_path, write_photo):
    write_photo(tmp_path / "osie" / "images" / "a.jpg", (6, 8))
    table = {"a.jpg": LOOKS["a.jpg"]}
    (tmp_path / "osie" / "fixations.json").write_text(json.dumps(table))
    alone = Osie(tmp_path, size=(4, 4), cells=(2, 2), photos=1)
    assert not alone.others([0]).values.any() and not alone.prior([0]).values.any()


def test_no_samples_are_a_truth_too(osie):
    assert len(osie.prior([])) == len(osie.counts([])) == 0


# --- real files


def test_people_look_at_the_middle(data_root, needs):
    """The prior of 699 photos is worth bits over an even spread, and NSS agrees."""
    source = Osie(needs(data_root, "osie"), how=stretch)
    _, truth = truth_of(source, range(6))
    counts = pooled(truth.fixations)
    assert int(pooled(source.counts([0])).values.sum()) == sum(
        len(person.points) for person in source.fixations([0])[0]
    )
    even = measure.uniform(truth.target)
    assert measure.mean(measure.information_gain(truth.prior, counts, even)) > 0.3
    assert measure.mean(measure.nss(truth.prior, counts)) > 0.5
    own = measure.mean(measure.auc_shuffled(truth.prior, counts, truth.others))
    assert own < measure.mean(measure.auc_judd(truth.prior, counts))
    assert SHOWN == (600, 800)


def test_reviews_have_people(data_root, needs):
    source = YelpHat(needs(data_root, "yelp_hat"))
    _, truth = truth_of(source, range(4))
    assert truth.people is not None and truth.fixations is None
    fused = pooled(truth.people).normalize()
    torch.testing.assert_close(fused.values, truth.target.values)


def test_pictures_without_a_truth_are_refused(data_root, needs):
    with pytest.raises(BadInput, match="cifar10"):
        truth_of(Cifar10(needs(data_root, "cifar10"), "test"), [0])
