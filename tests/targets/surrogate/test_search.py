"""Exhaustive mask search: slow reference, ties, chunks, sequential and independent search."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overt.data.batch import Batch
from overt.targets.surrogate.greedy_search import greedy_refine
from overt.targets.surrogate.masked_inference import MaskedBatch, all_maps, masked_batch
from overt.targets.surrogate.masks import (
    GridMasks,
    KeepWords,
    NoMask,
    RemoveWords,
    ShiftedGridMasks,
)
from overt.targets.surrogate.search import (
    best_masks,
    exhaustive_search,
    few_sample_rounds,
    mask_rounds,
    search_independently,
    search_sequentially,
    search_without_whole,
)
from tests.targets.surrogate.toys import Planted, PlantedMany, Toys

BATCH = Toys().batch(range(8))
ALL_MASKS = [
    GridMasks(40, 1),
    GridMasks(16, 2),
    ShiftedGridMasks(30, 2),
    RemoveWords(),
    RemoveWords((1, 2)),
    KeepWords(),
]


def slow_search(model, batch: Batch, masks):
    """Search one sample and one mask at a time, keep all maps and scores, take the argmax."""
    model.eval()
    with masked_batch(model, batch, [masks.name]) as look:
        candidates = masks(look)
    best, chosen, maps = [], [], []
    for row in range(len(batch)):
        one = batch.select(torch.tensor([row]))
        numbers = torch.arange(int(candidates.counts[row]))
        tried = candidates.take(torch.full_like(numbers, row), numbers)
        tried = tried[:, : one.tokens.shape[1]] if masks.name == "text" else tried
        outputs = [model.decide(model.encode(one), {masks.name: mask[None]}) for mask in tried]
        scores = torch.stack([o.prediction.softmax(dim=-1)[0, 1] for o in outputs])
        top = int(scores.argmax())
        best.append(scores[top])
        chosen.append(tried[top])
        maps.append(outputs[top].attention_to(masks.name).weights.mean(dim=(1, 2))[0, 0])
    return torch.stack(best).detach(), chosen, maps


@pytest.mark.long
@pytest.mark.parametrize("masks", ALL_MASKS, ids=lambda masks: type(masks).__name__)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_exhaustive_search_agrees_with_the_slow_reference(masks, chunk):
    model = Planted()
    best, chosen, maps = slow_search(model, BATCH, masks)
    with masked_batch(model, BATCH, [masks.name]) as look:
        found = exhaustive_search(look, masks, chunk)
    torch.testing.assert_close(found.best.exp(), best)
    for row, (mask, one) in enumerate(zip(chosen, maps, strict=True)):
        assert torch.equal(found.masks[masks.name][row, : len(mask)], mask)
        weights = found.maps[masks.name].weights[row, 0, 0, 0]
        torch.testing.assert_close(weights[: len(one)], one.detach())


@pytest.mark.parametrize("masks", ALL_MASKS, ids=lambda masks: type(masks).__name__)
@pytest.mark.parametrize(
    "find", [exhaustive_search, partial(greedy_refine, probes=12)], ids=["search", "refine"]
)
def test_t_ssa_1_best_score_is_at_least_the_unmasked_score(masks, find):
    if isinstance(masks, ShiftedGridMasks) and isinstance(find, partial):
        pytest.skip("shifted grids have no bits")
    with masked_batch(Planted(), BATCH, [masks.name]) as look:
        found = find(look, masks)
        assert (found.best >= found.base).all()
        assert torch.equal(found.base, look.base)
        again = look(torch.arange(len(look)), found.masks).score
    torch.testing.assert_close(again, found.best)


@pytest.mark.parametrize("masks", ALL_MASKS, ids=lambda masks: type(masks).__name__)
def test_t_ssa_4_rows_sum_to_one_and_padding_has_zero_weight(masks):
    with masked_batch(Planted(), BATCH, [masks.name]) as look:
        found = exhaustive_search(look, masks).maps[masks.name]
    found.check()
    torch.testing.assert_close(found.weights.sum(dim=-1), torch.ones(len(BATCH), 1, 1, 1))
    if masks.name == "text":
        assert (found.weights[:, 0, 0, 0][~BATCH.token_mask] == 0).all()


@pytest.mark.parametrize("find", [exhaustive_search, greedy_refine])
def test_t_ssa_5_planted_cell_is_kept_and_distractor_is_removed(find):
    model = Planted(good=5, bad=10)
    with masked_batch(model, BATCH, ["image"]) as look:
        found = find(look, GridMasks(2000, grid=(4, 4)))
    assert (found.masks["image"][:, 5] > 0.9).all()
    assert (found.masks["image"][:, 10] < 0.1).all()
    assert (found.best > found.base).all()
    lost = found.maps["image"].weights[:, 0, 0, 0, 10]
    assert (lost <= found.maps["image"].weights[:, 0, 0, 0, 5]).all()


def test_surrogate_is_the_map_of_the_masked_input():
    model = Planted()
    with masked_batch(model, BATCH, ["image"]) as look:
        found = exhaustive_search(look, GridMasks(50, 1))
    masked = model.eval().decide(model.encode(BATCH), found.masks).attention_to("image")
    torch.testing.assert_close(found.maps["image"].values, masked.over_heads().values)


def test_ties_keep_the_unmasked_input():
    class ConstantModel(Planted):
        def decide(self, features, mask=None):
            cells = features.cells if mask is None else features.cells * mask["image"]
            return super().decide(type(features)(0 * cells, features.words, features.present))

    with masked_batch(ConstantModel(), BATCH, ["image"]) as look:
        for find in (exhaustive_search, greedy_refine):
            found = find(look, GridMasks(60, 1))
            assert (found.masks["image"] == 1).all() and torch.equal(found.best, found.base)


def test_no_mask_gives_the_map_of_the_model():
    model = Planted().eval()
    with masked_batch(model, BATCH, ["image"]) as look:
        found = exhaustive_search(look, NoMask())
    own = model(BATCH).attention_to("image").over_heads()
    torch.testing.assert_close(found.maps["image"].values, own.values)
    assert (found.probes == 1).all() and torch.equal(found.base, found.best)


@pytest.mark.parametrize("size", [1, 2])
def test_search_without_whole_finds_the_best_words(size):
    """Figure 6; all words together may score higher."""
    with masked_batch(Planted(), BATCH, ["text"]) as look:
        found = search_without_whole(look, KeepWords((size,)))
    for row, (tokens, there) in enumerate(zip(BATCH.tokens, BATCH.token_mask, strict=True)):
        mask, own = found.masks["text"][row][there], tokens[there]
        if len(own) >= size:
            assert mask.sum() == size and own[mask == 1].sum() == own.topk(size).values.sum()
        else:
            assert (mask == 1).all() and found.best[row] == found.base[row]
    assert size == 2 or (found.best < found.base).any()


def test_reduce_may_keep_every_layer_and_hop():
    with masked_batch(Planted(), BATCH, ["image"], reduce=all_maps) as look:
        assert exhaustive_search(look, GridMasks(20, 2)).maps["image"].values.shape == (
            len(BATCH),
            1,
            2,
            1,
            16,
        )


def test_batch_size_is_bounded_by_chunk():
    model = Planted()
    for count in (50, 400):
        model.batch_sizes.clear()
        with masked_batch(model, BATCH, ["image"]) as look:
            exhaustive_search(look, GridMasks(count, 1), chunk=24)
        assert max(model.batch_sizes) <= 24


def test_probes_count_every_forward_pass():
    model = Planted()
    with masked_batch(model, BATCH, ["text"]) as look:
        model.batch_sizes.clear()
        found = exhaustive_search(look, RemoveWords(), chunk=1)
    n = BATCH.token_mask.sum(dim=1)
    assert found.probes.tolist() == (n * (n - 1) // 2 + 1).tolist()
    asked = sum(model.batch_sizes) - len(BATCH)  # the final forward pass
    assert asked == int((found.probes - 1).sum())  # the first probe ran when `look` was made


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 30))
@settings(max_examples=60)
def test_mask_rounds_cover_every_mask_once(counts, chunk):
    counted = torch.tensor(counts)
    asked = []
    for rows, numbers in mask_rounds(counted, chunk):
        assert rows.shape == numbers.shape and 0 < rows.numel() <= chunk
        there = numbers < counted[rows]
        assert there[0].all()
        asked += list(zip(rows[there].tolist(), numbers[there].tolist(), strict=True))
    wanted = [(row, number) for row, count in enumerate(counts) for number in range(1, count)]
    assert sorted(asked) == wanted


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 300))
@settings(max_examples=60)
def test_few_sample_rounds_take_all_masks_of_a_sample_together(counts, chunk):
    counted = torch.tensor(counts)
    asked = []
    for rows, numbers in few_sample_rounds(counted, chunk):
        assert rows.shape == numbers.shape and 0 < rows.numel() <= chunk
        assert (rows == rows[0]).all()
        if max(counts) <= chunk:
            assert numbers[0].eq(1).all() and numbers[-1].max() == counted[rows[0]].max() - 1
        there = numbers < counted[rows]
        asked += list(zip(rows[there].tolist(), numbers[there].tolist(), strict=True))
    wanted = [(row, number) for row, count in enumerate(counts) for number in range(1, count)]
    assert sorted(asked) == wanted


@pytest.mark.long
@pytest.mark.parametrize("masks", ALL_MASKS, ids=lambda masks: type(masks).__name__)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_many_masks_at_once_give_the_same_result(masks, chunk):
    found = []
    for model in (Planted(), PlantedMany()):
        with masked_batch(model, BATCH, [masks.name]) as look:
            assert look.supports_many_masks == isinstance(model, PlantedMany)
            found.append(exhaustive_search(look, masks, chunk))
    one, many = found
    assert torch.equal(one.masks[masks.name], many.masks[masks.name])
    assert torch.equal(one.maps[masks.name].weights, many.maps[masks.name].weights)
    assert torch.equal(one.best, many.best) and torch.equal(one.probes, many.probes)
    assert isinstance(model, PlantedMany) and model.samples
    if chunk < 1000:  # a chunk has features of as many samples as fit with all their masks
        assert max(model.samples) <= max(1, chunk // int(one.probes.max() - 1))


@pytest.mark.parametrize("masks", [GridMasks(40, 1), RemoveWords()], ids=["grids", "words"])
@pytest.mark.parametrize("takes_many", [True, False])
def test_search_rounds_do_not_synchronize_the_gpu(masks, takes_many):
    """Meta tensors replace GPU tensors: only the end of a search reads values."""
    asked: list[tuple[int, ...]] = []

    class MetaMaskedBatch(MaskedBatch):
        def __init__(self) -> None:
            self.device, self.supports_many_masks = torch.device("meta"), takes_many

        def __len__(self) -> int:
            return len(BATCH)

        def score_masks(self, rows: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
            (one,) = given.values()
            assert one.device.type == "meta", "masks are drawn on the device"
            asked.append(tuple(one.shape[:2]))
            return torch.empty(one.shape[:2], device="meta")

    with masked_batch(Planted(), BATCH, [masks.name]) as look:
        candidates, base = masks(look), look.base
    plan = few_sample_rounds if takes_many else mask_rounds
    with pytest.raises(NotImplementedError, match="meta"):
        best_masks(MetaMaskedBatch(), candidates, candidates.counts, base, 30)
    assert asked == [tuple(rows.shape) for rows, _ in plan(candidates.counts, 30)]


@pytest.mark.parametrize(
    "masks", [[GridMasks(20, 2), RemoveWords()], [RemoveWords(), GridMasks(20, 2)]]
)
def test_many_masks_at_once_keep_fixed_masks(masks):
    found = []
    for model in (Planted(), PlantedMany()):
        with masked_batch(model, BATCH, ["image", "text"]) as look:
            found.append(search_sequentially(look, masks, exhaustive_search))
    for name, one in found[0].items():
        assert torch.equal(one.best, found[1][name].best)
        assert torch.equal(one.masks[name], found[1][name].masks[name])


def test_zero_chunk_raises():
    with pytest.raises(ValueError, match="chunk .* 0"):
        next(mask_rounds(torch.tensor([3]), 0))


# --- several inputs


def test_search_independently_leaves_the_other_input_unmasked():
    masks = [GridMasks(60, 1), RemoveWords()]
    with masked_batch(Planted(), BATCH, ["image", "text"]) as look:
        found = search_independently(look, masks, exhaustive_search)
        for one in masks:
            alone = exhaustive_search(look, one)
            assert torch.equal(found[one.name].best, alone.best)
            assert torch.equal(found[one.name].masks[one.name], alone.masks[one.name])


def test_search_sequentially_takes_both_maps_from_one_input():
    masks = [GridMasks(60, 1), RemoveWords()]
    model = Planted()
    with masked_batch(model, BATCH, ["image", "text"]) as look:
        found, first = (
            search_sequentially(look, masks, exhaustive_search),
            exhaustive_search(look, masks[0]),
        )
        both = {name: one.masks[name] for name, one in found.items()}
        again = look(torch.arange(len(look)), both)
        maps = look.maps(again.answer)
    assert torch.equal(both["image"], first.masks["image"])
    for name, one in found.items():
        torch.testing.assert_close(one.best, again.score)
        assert torch.equal(one.base, look.base) and (one.best >= first.best - 1e-6).all()
        torch.testing.assert_close(one.maps[name].weights, maps[name].weights)
        assert (one.probes > first.probes).any()
