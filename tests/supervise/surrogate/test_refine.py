from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from overt.supervise.surrogate.look import asking
from overt.supervise.surrogate.masks import Grids, ShiftedGrids, Whole, WithoutWords
from overt.supervise.surrogate.refine import refine
from overt.supervise.surrogate.search import search
from tests.supervise.surrogate.toys import Planted, Toys

BATCH = Toys(24).batch(range(24))


class Rugged(Planted):
    """Every pair of cells may help or hurt: scores that no cell explains alone."""

    def __init__(self):
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.register_buffer("pairs", torch.randn(16, 16, generator=drawn))

    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        cells = features.cells * (mask or {}).get("image", 1)
        score = torch.einsum("bk,kj,bj->b", cells, self.pairs, cells) / 4
        prediction = torch.stack([torch.zeros_like(score), score], dim=1)
        return type(output)(prediction, output.attention)


def test_50_probes_reach_what_500_random_masks_reach():
    """The mean over samples, paired, on a landscape without easy steps."""
    with asking(Rugged(), BATCH, ["image"]) as look:
        few, many = refine(look, Grids(500, 1)), search(look, Grids(500, 1))
    assert (few.probes == 50).all() and many.probes.float().mean() > 450
    assert few.best.exp().mean() >= many.best.exp().mean()
    assert few.best.mean() >= many.best.mean()


def test_masks_are_of_the_same_kind():
    with asking(Rugged(), BATCH, ["image"]) as look:
        found = refine(look, Grids(500, grid=(2, 3)), probes=20)
        every = Grids(64, grid=(2, 3))(look)
        all_masks = every.take(torch.zeros(64, dtype=torch.long), torch.arange(64))
    for mask in found.masks["image"]:
        assert (mask == all_masks).all(dim=1).any()


def test_few_masks_are_all_asked():
    with asking(Rugged(), BATCH, ["image"]) as look:
        refined, searched = refine(look, Grids(16, 2)), search(look, Grids(16, 2))
    assert torch.equal(refined.best, searched.best) and (refined.probes == 16).all()
    assert torch.equal(refined.masks["image"], searched.masks["image"])


def test_nobody_is_asked_about_no_samples():
    """A Transformer of Hugging Face cannot read an empty batch."""

    class Strict(Rugged):
        def decide(self, features, mask=None):
            assert len(features.cells)
            return super().decide(features, mask)

    with asking(Strict(), BATCH, ["image"]) as look:
        assert torch.equal(refine(look, Whole("image")).best, look.base)


def test_what_is_found_does_not_depend_on_the_batch():
    model = Rugged().double()  # so that no near tie falls the other way in another batch
    batch = replace(BATCH, features=BATCH.features.double())
    with asking(model, batch, ["image", "text"]) as look:
        cells, words = refine(look, Grids(90, 1)), refine(look, WithoutWords(), probes=5)
        small = refine(look, Grids(90, 1), chunk=5)
    assert torch.equal(cells.masks["image"], small.masks["image"])
    rows = torch.tensor([7, 3])
    with asking(model, batch.select(rows), ["image", "text"]) as look:
        assert torch.equal(refine(look, Grids(90, 1)).masks["image"], cells.masks["image"][rows])
        again = refine(look, WithoutWords(), probes=5)
        assert torch.equal(again.masks["text"], words.masks["text"][rows])
        assert torch.equal(again.probes, words.probes[rows])


def test_the_model_is_asked_as_often_as_is_said():
    model = Rugged()
    with asking(model, BATCH, ["image"]) as look:
        model.asked.clear()
        found = refine(look, Grids(100, 1), probes=30)
    assert sum(model.asked) - len(BATCH) == int((found.probes - 1).sum()) == 29 * len(BATCH)


def test_more_probes_are_never_worse():
    with asking(Rugged(), BATCH, ["image"]) as look:
        found = [refine(look, Grids(500, 1), probes=count).best for count in (1, 10, 20, 60)]
    assert torch.equal(found[0], look.base)
    for before, after in pairwise(found):
        assert (after >= before).all()


def test_words_beyond_pairs_may_go():
    model = Planted()
    with asking(model, BATCH, ["text"]) as look:
        found = refine(look, WithoutWords((3,)), probes=9)
    assert (found.masks["text"][~BATCH.token_mask] == 1).all()


def test_what_cannot_be_refined_is_refused():
    with asking(Planted(), BATCH, ["image"]) as look:
        with pytest.raises(ValueError, match="bits that could be flipped"):
            refine(look, ShiftedGrids(20))
        with pytest.raises(ValueError, match="at least once"):
            refine(look, Grids(20), probes=0)
