"""Greedy mask search: quality per probe, batch independence, errors."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from overt.targets.surrogate.greedy_search import greedy_refine
from overt.targets.surrogate.masked_inference import masked_batch
from overt.targets.surrogate.masks import GridMasks, NoMask, RemoveWords, ShiftedGridMasks
from overt.targets.surrogate.search import exhaustive_search
from tests.targets.surrogate.toys import Planted, Toys

BATCH = Toys(24).batch(range(24))


class PairwiseModel(Planted):
    """A model whose score depends on pairs of cells, not on single cells."""

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


def test_50_probes_score_at_least_as_well_as_500_random_masks():
    """The paired mean over samples, on a model without easy single steps."""
    with masked_batch(PairwiseModel(), BATCH, ["image"]) as look:
        few, many = (
            greedy_refine(look, GridMasks(500, 1)),
            exhaustive_search(look, GridMasks(500, 1)),
        )
    assert (few.probes == 50).all() and many.probes.float().mean() > 450
    assert few.best.exp().mean() >= many.best.exp().mean()
    assert few.best.mean() >= many.best.mean()


def test_found_masks_are_grid_masks():
    with masked_batch(PairwiseModel(), BATCH, ["image"]) as look:
        found = greedy_refine(look, GridMasks(500, grid=(2, 3)), probes=20)
        every = GridMasks(64, grid=(2, 3))(look)
        all_masks = every.take(torch.zeros(64, dtype=torch.long), torch.arange(64))
    for mask in found.masks["image"]:
        assert (mask == all_masks).all(dim=1).any()


def test_few_masks_are_searched_exhaustively():
    with masked_batch(PairwiseModel(), BATCH, ["image"]) as look:
        refined, searched = (
            greedy_refine(look, GridMasks(16, 2)),
            exhaustive_search(look, GridMasks(16, 2)),
        )
    assert torch.equal(refined.best, searched.best) and (refined.probes == 16).all()
    assert torch.equal(refined.masks["image"], searched.masks["image"])


def test_model_is_not_run_on_an_empty_batch():
    """A Hugging Face Transformer cannot run on an empty batch."""

    class Strict(PairwiseModel):
        def decide(self, features, mask=None):
            assert len(features.cells)
            return super().decide(features, mask)

    with masked_batch(Strict(), BATCH, ["image"]) as look:
        assert torch.equal(greedy_refine(look, NoMask("image")).best, look.base)


def test_result_does_not_depend_on_the_batch():
    model = PairwiseModel().double()  # so that near ties do not depend on the batch
    batch = replace(BATCH, features=BATCH.features.double())
    with masked_batch(model, batch, ["image", "text"]) as look:
        cells, words = (
            greedy_refine(look, GridMasks(90, 1)),
            greedy_refine(look, RemoveWords(), probes=5),
        )
        small = greedy_refine(look, GridMasks(90, 1), chunk=5)
    assert torch.equal(cells.masks["image"], small.masks["image"])
    rows = torch.tensor([7, 3])
    with masked_batch(model, batch.select(rows), ["image", "text"]) as look:
        assert torch.equal(
            greedy_refine(look, GridMasks(90, 1)).masks["image"], cells.masks["image"][rows]
        )
        again = greedy_refine(look, RemoveWords(), probes=5)
        assert torch.equal(again.masks["text"], words.masks["text"][rows])
        assert torch.equal(again.probes, words.probes[rows])


def test_number_of_model_runs_equals_the_reported_probes():
    model = PairwiseModel()
    with masked_batch(model, BATCH, ["image"]) as look:
        model.batch_sizes.clear()
        found = greedy_refine(look, GridMasks(100, 1), probes=30)
    assert sum(model.batch_sizes) - len(BATCH) == int((found.probes - 1).sum()) == 29 * len(BATCH)


def test_more_probes_are_never_worse():
    with masked_batch(PairwiseModel(), BATCH, ["image"]) as look:
        found = [
            greedy_refine(look, GridMasks(500, 1), probes=count).best for count in (1, 10, 20, 60)
        ]
    assert torch.equal(found[0], look.base)
    for before, after in pairwise(found):
        assert (after >= before).all()


def test_more_than_two_words_may_be_removed():
    model = Planted()
    with masked_batch(model, BATCH, ["text"]) as look:
        found = greedy_refine(look, RemoveWords((3,)), probes=9)
    assert (found.masks["text"][~BATCH.token_mask] == 1).all()


def test_unsupported_masks_and_zero_probes_raise():
    with masked_batch(Planted(), BATCH, ["image"]) as look:
        with pytest.raises(ValueError, match="ShiftedGridMasks.*exhaustive_search.*GridMasks"):
            greedy_refine(look, ShiftedGridMasks(20))
        with pytest.raises(ValueError, match="probes .* 0"):
            greedy_refine(look, GridMasks(20), probes=0)
