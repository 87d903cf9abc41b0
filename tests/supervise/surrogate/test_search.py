from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overt.data.batch import Batch
from overt.supervise.surrogate.look import Look, asking, every_one
from overt.supervise.surrogate.masks import Grids, OnlyWords, ShiftedGrids, Whole, WithoutWords
from overt.supervise.surrogate.refine import refine
from overt.supervise.surrogate.search import (
    apart,
    best_of,
    few_samples,
    in_turn,
    rounds,
    search,
    without_whole,
)
from tests.supervise.surrogate.toys import Planted, PlantedMany, Toys

BATCH = Toys().batch(range(8))
ALL = [
    Grids(40, 1),
    Grids(16, 2),
    ShiftedGrids(30, 2),
    WithoutWords(),
    WithoutWords((1, 2)),
    OnlyWords(),
]


def slow_search(model, batch: Batch, masks):
    """One sample and one mask at a time; all maps and scores kept, the argmax at the end."""
    model.eval()
    with asking(model, batch, [masks.name]) as look:
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
        maps.append(outputs[top].looking_at(masks.name).weights.mean(dim=(1, 2))[0, 0])
    return torch.stack(best).detach(), chosen, maps


@pytest.mark.parametrize("masks", ALL, ids=lambda masks: type(masks).__name__)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_search_agrees_with_the_naive_loop(masks, chunk):
    model = Planted()
    best, chosen, maps = slow_search(model, BATCH, masks)
    with asking(model, BATCH, [masks.name]) as look:
        found = search(look, masks, chunk)
    torch.testing.assert_close(found.best.exp(), best)
    for row, (mask, one) in enumerate(zip(chosen, maps, strict=True)):
        assert torch.equal(found.masks[masks.name][row, : len(mask)], mask)
        weights = found.maps[masks.name].weights[row, 0, 0, 0]
        torch.testing.assert_close(weights[: len(one)], one.detach())


@pytest.mark.parametrize("masks", ALL, ids=lambda masks: type(masks).__name__)
@pytest.mark.parametrize("find", [search, partial(refine, probes=12)], ids=["search", "refine"])
def test_t_ssa_1_the_best_score_is_never_below_that_of_the_whole(masks, find):
    if isinstance(masks, ShiftedGrids) and isinstance(find, partial):
        pytest.skip("shifted grids have no bits to flip")
    with asking(Planted(), BATCH, [masks.name]) as look:
        found = find(look, masks)
        assert (found.best >= found.base).all()
        assert torch.equal(found.base, look.base)
        again = look(torch.arange(len(look)), found.masks).score
    torch.testing.assert_close(again, found.best)


@pytest.mark.parametrize("masks", ALL, ids=lambda masks: type(masks).__name__)
def test_t_ssa_4_rows_sum_to_one_and_padding_has_nothing(masks):
    with asking(Planted(), BATCH, [masks.name]) as look:
        found = search(look, masks).maps[masks.name]
    found.check()
    torch.testing.assert_close(found.weights.sum(dim=-1), torch.ones(len(BATCH), 1, 1, 1))
    if masks.name == "text":
        assert (found.weights[:, 0, 0, 0][~BATCH.token_mask] == 0).all()


@pytest.mark.parametrize("find", [search, refine])
def test_t_ssa_5_the_planted_cell_is_kept_and_the_distractor_goes(find):
    model = Planted(good=5, bad=10)
    with asking(model, BATCH, ["image"]) as look:
        found = find(look, Grids(2000, grid=(4, 4)))
    assert (found.masks["image"][:, 5] > 0.9).all()
    assert (found.masks["image"][:, 10] < 0.1).all()
    assert (found.best > found.base).all()
    lost = found.maps["image"].weights[:, 0, 0, 0, 10]
    assert (lost <= found.maps["image"].weights[:, 0, 0, 0, 5]).all()


def test_the_surrogate_is_the_map_and_not_the_mask():
    model = Planted()
    with asking(model, BATCH, ["image"]) as look:
        found = search(look, Grids(50, 1))
    masked = model.eval().decide(model.encode(BATCH), found.masks).looking_at("image")
    torch.testing.assert_close(found.maps["image"].values, masked.over_heads().values)


def test_equals_keep_the_whole_input_and_then_the_first():
    class Flat(Planted):
        def decide(self, features, mask=None):
            cells = features.cells if mask is None else features.cells * mask["image"]
            return super().decide(type(features)(0 * cells, features.words, features.present))

    with asking(Flat(), BATCH, ["image"]) as look:
        for find in (search, refine):
            found = find(look, Grids(60, 1))
            assert (found.masks["image"] == 1).all() and torch.equal(found.best, found.base)


def test_the_whole_gives_the_models_own_map():
    model = Planted().eval()
    with asking(model, BATCH, ["image"]) as look:
        found = search(look, Whole())
    own = model(BATCH).looking_at("image").over_heads()
    torch.testing.assert_close(found.maps["image"].values, own.values)
    assert (found.probes == 1).all() and torch.equal(found.base, found.best)


@pytest.mark.parametrize("size", [1, 2])
def test_without_the_whole_the_words_that_do_best_alone_are_found(size):
    """Figure 6, though all words together may do better."""
    with asking(Planted(), BATCH, ["text"]) as look:
        found = without_whole(look, OnlyWords((size,)))
    for row, (tokens, there) in enumerate(zip(BATCH.tokens, BATCH.token_mask, strict=True)):
        mask, own = found.masks["text"][row][there], tokens[there]
        if len(own) >= size:
            assert mask.sum() == size and own[mask == 1].sum() == own.topk(size).values.sum()
        else:
            assert (mask == 1).all() and found.best[row] == found.base[row]
    assert size == 2 or (found.best < found.base).any()


def test_every_layer_and_hop_can_be_kept():
    with asking(Planted(), BATCH, ["image"], reduce=every_one) as look:
        assert search(look, Grids(20, 2)).maps["image"].values.shape == (len(BATCH), 1, 2, 1, 16)


def test_memory_does_not_grow_with_the_number_of_masks():
    model = Planted()
    for count in (50, 400):
        model.asked.clear()
        with asking(model, BATCH, ["image"]) as look:
            search(look, Grids(count, 1), chunk=24)
        assert max(model.asked) <= 24


def test_probes_count_every_question():
    model = Planted()
    with asking(model, BATCH, ["text"]) as look:
        model.asked.clear()
        found = search(look, WithoutWords(), chunk=1)
    n = BATCH.token_mask.sum(dim=1)
    assert found.probes.tolist() == (n * (n - 1) // 2 + 1).tolist()
    asked = sum(model.asked) - len(BATCH)  # the last look
    assert asked == int((found.probes - 1).sum())  # the first was asked when the look was made


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 30))
@settings(max_examples=60)
def test_rounds_ask_about_every_mask_once(counts, chunk):
    counted = torch.tensor(counts)
    asked = []
    for rows, numbers in rounds(counted, chunk):
        assert rows.shape == numbers.shape and 0 < rows.numel() <= chunk
        there = numbers < counted[rows]
        assert there[0].all()
        asked += list(zip(rows[there].tolist(), numbers[there].tolist(), strict=True))
    wanted = [(row, number) for row, count in enumerate(counts) for number in range(1, count)]
    assert sorted(asked) == wanted


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 300))
@settings(max_examples=60)
def test_few_samples_come_with_all_of_their_masks(counts, chunk):
    counted = torch.tensor(counts)
    asked = []
    for rows, numbers in few_samples(counted, chunk):
        assert rows.shape == numbers.shape and 0 < rows.numel() <= chunk
        assert (rows == rows[0]).all()
        if max(counts) <= chunk:
            assert numbers[0].eq(1).all() and numbers[-1].max() == counted[rows[0]].max() - 1
        there = numbers < counted[rows]
        asked += list(zip(rows[there].tolist(), numbers[there].tolist(), strict=True))
    wanted = [(row, number) for row, count in enumerate(counts) for number in range(1, count)]
    assert sorted(asked) == wanted


@pytest.mark.parametrize("masks", ALL, ids=lambda masks: type(masks).__name__)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_many_masks_at_once_find_what_one_at_a_time_finds(masks, chunk):
    found = []
    for model in (Planted(), PlantedMany()):
        with asking(model, BATCH, [masks.name]) as look:
            assert look.takes_many == isinstance(model, PlantedMany)
            found.append(search(look, masks, chunk))
    one, many = found
    assert torch.equal(one.masks[masks.name], many.masks[masks.name])
    assert torch.equal(one.maps[masks.name].weights, many.maps[masks.name].weights)
    assert torch.equal(one.best, many.best) and torch.equal(one.probes, many.probes)
    assert isinstance(model, PlantedMany) and model.samples
    if chunk < 1000:  # features of no more samples than have all of their masks in a chunk
        assert max(model.samples) <= max(1, chunk // int(one.probes.max() - 1))


@pytest.mark.parametrize("masks", [Grids(40, 1), WithoutWords()], ids=["grids", "words"])
@pytest.mark.parametrize("takes_many", [True, False])
def test_no_round_waits_for_a_card(masks, takes_many):
    """Tensors without values stand for those of a card: only the end of a search reads them."""
    asked: list[tuple[int, ...]] = []

    class Still(Look):
        def __init__(self) -> None:
            self.device, self.takes_many = torch.device("meta"), takes_many

        def __len__(self) -> int:
            return len(BATCH)

        def many(self, rows: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
            (one,) = given.values()
            assert one.device.type == "meta", "the card draws its masks"
            asked.append(tuple(one.shape[:2]))
            return torch.empty(one.shape[:2], device="meta")

    with asking(Planted(), BATCH, [masks.name]) as look:
        candidates, base = masks(look), look.base
    plan = few_samples if takes_many else rounds
    with pytest.raises(NotImplementedError, match="meta"):
        best_of(Still(), candidates, candidates.counts, base, 30)
    assert asked == [tuple(rows.shape) for rows, _ in plan(candidates.counts, 30)]


@pytest.mark.parametrize("masks", [[Grids(20, 2), WithoutWords()], [WithoutWords(), Grids(20, 2)]])
def test_many_masks_at_once_leave_what_was_held_in_place(masks):
    found = []
    for model in (Planted(), PlantedMany()):
        with asking(model, BATCH, ["image", "text"]) as look:
            found.append(in_turn(look, masks, search))
    for name, one in found[0].items():
        assert torch.equal(one.best, found[1][name].best)
        assert torch.equal(one.masks[name], found[1][name].masks[name])


def test_an_empty_chunk_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        next(rounds(torch.tensor([3]), 0))


# --- both


def test_apart_leaves_the_other_input_whole():
    masks = [Grids(60, 1), WithoutWords()]
    with asking(Planted(), BATCH, ["image", "text"]) as look:
        found = apart(look, masks, search)
        for one in masks:
            alone = search(look, one)
            assert torch.equal(found[one.name].best, alone.best)
            assert torch.equal(found[one.name].masks[one.name], alone.masks[one.name])


def test_in_turn_both_maps_come_from_one_input():
    masks = [Grids(60, 1), WithoutWords()]
    model = Planted()
    with asking(model, BATCH, ["image", "text"]) as look:
        found, first = in_turn(look, masks, search), search(look, masks[0])
        both = {name: one.masks[name] for name, one in found.items()}
        again = look(torch.arange(len(look)), both)
        maps = look.maps(again.answer)
    assert torch.equal(both["image"], first.masks["image"])
    for name, one in found.items():
        torch.testing.assert_close(one.best, again.score)
        assert torch.equal(one.base, look.base) and (one.best >= first.best - 1e-6).all()
        torch.testing.assert_close(one.maps[name].weights, maps[name].weights)
        assert (one.probes > first.probes).any()
