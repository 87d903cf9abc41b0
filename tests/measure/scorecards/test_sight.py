"""Maps by name, the truth that each is held to, and ways to remove what a map attends to."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from overt import measure
from overt.attention import POINT, AttentionMap, Kind, grid, words
from overt.data.batch import Batch
from overt.data.human import Truth
from overt.measure.scorecards.entries import Unasked
from overt.measure.scorecards.sight import (
    ACTIVATION,
    ATTENTION,
    GRADIENT,
    PERSON,
    PRIOR,
    RANDOM,
    REMOVALS,
    SHUFFLED,
    Sight,
    one_row,
    onto,
    positive,
)
from overt.models.cnn import SmallCNN
from overt.models.output import Output
from overt.models.text import TextClassifier
from overt.testing import PlantedCell, PlantedWord
from tests.measure.scorecards.toys import Pictures, Texts, small_bert, told


def seen(count: int = 6, side: int = 4, **more) -> Sight:
    source = Pictures(count, side=side)
    batch = source.batch(range(count))
    assert batch.target is not None
    return Sight(PlantedCell().eval(), batch, Truth(batch.target), **more)


def test_a_model_that_attends_has_all_maps_but_those_of_people() -> None:
    names = seen(looks={"half": told(0.5, None)}).names()
    assert names == (
        ATTENTION, "half", GRADIENT, SHUFFLED, RANDOM, "centre", "uniform",
    )  # fmt: skip


def test_a_network_that_attends_to_nothing_is_seen_by_its_cells() -> None:
    batch = Pictures(4).batch(range(4))
    sight = Sight(SmallCNN(3, width=0.1).eval(), batch)
    assert sight.names()[:2] == (ACTIVATION, GRADIENT)
    assert sight.like.keys.spans[0].shape == (2, 2) and sight.over == "image"
    with pytest.raises(Unasked, match="attends to nothing"):
        sight.map(ATTENTION)


def test_maps_alone_need_no_model() -> None:
    batch = Pictures(4).batch(range(4))
    sight = Sight(None, batch, looks={"half": told(0.5, None)})
    assert sight.names()[0] == "half" and ATTENTION not in sight.names()
    with pytest.raises(Unasked, match="no model"):
        sight.decide("mask")
    with pytest.raises(ValueError, match="there is no map 'third'"):
        sight.map("third")


def test_agreement_is_on_the_grid_of_the_truth_and_the_rest_on_that_of_the_model() -> None:
    sight = seen(side=8)
    assert len(sight.map(ATTENTION).keys) == 16 and len(sight.on_truth(ATTENTION).keys) == 64


def test_several_heads_and_layers_are_their_mean_and_the_last_map_counts() -> None:
    class Several(nn.Module):
        def forward(self, batch: Batch) -> Output:
            first = AttentionMap.from_cells(torch.eye(4)[:2], grid(2, 2))
            weights = torch.eye(4).reshape(1, 2, 2, 1, 4).expand(2, 2, 2, 1, 4)
            return Output(torch.zeros(2, 2), (first, AttentionMap(weights, grid(2, 2))))

    sight = Sight(Several(), Pictures(2).batch(range(2)))
    assert torch.equal(sight.map(ATTENTION).weights, torch.full((2, 1, 1, 1, 4), 0.25))


def test_a_model_that_looks_elsewhere_says_where() -> None:
    with pytest.raises(Unasked, match="attends to image, and not to 'text'"):
        Sight(PlantedCell(), Pictures(2).batch(range(2)), over="text").map(ATTENTION)


def test_what_is_no_output_is_refused() -> None:
    sight = Sight(lambda batch: torch.zeros(2, 2), Pictures(2).batch(range(2)))
    with pytest.raises(ValueError, match=r"overt\.adopt makes one"):
        sight.map(ATTENTION)


# --- removal


@pytest.mark.parametrize("removal", REMOVALS)
def test_every_removal_leaves_a_whole_alone_and_takes_what_decides(removal: str) -> None:
    sight = seen()
    decide = sight.decide(removal)
    keep = torch.ones(6, 16)
    with torch.no_grad():
        torch.testing.assert_close(decide(keep), sight.output.prediction)
        keep[:, 0] = 0
        near = 1e-4 if removal == "mask" else 0.2  # noise and rounding of a filling
        torch.testing.assert_close(decide(keep), sight.output.prediction, atol=near, rtol=0)
        keep[:, 5] = 0
        assert float((decide(keep) - sight.output.prediction).abs().max()) > 0.5


@pytest.mark.parametrize("removal", REMOVALS)
def test_words_are_removed_in_every_way(removal: str) -> None:
    source = Texts(6)
    sight = Sight(PlantedWord().eval(), source.batch(range(6)))
    keep = torch.ones(6, len(sight.like.keys))
    keep[torch.arange(6), source.place] = 0
    with torch.no_grad():
        there, gone = sight.decide(removal)(torch.ones_like(keep)), sight.decide(removal)(keep)
    assert bool((there[:, 1] > 0).all()) and bool((gone[:, 1] < there[:, 1]).all())


def test_bytes_stay_bytes() -> None:
    batch = Pictures(3).batch(range(3))
    assert batch.images is not None
    small = ((batch.images.clamp(-1, 1) + 1) * 127).to(torch.uint8)
    sight = Sight(PlantedCell().eval(), replace(batch, images=small))
    with torch.no_grad():
        found = sight.decide("mean")(torch.ones(3, 16))
    torch.testing.assert_close(found, sight.output.prediction)


def test_what_several_ask_is_asked_once() -> None:
    sight, asked = seen(), []
    model = sight.model
    assert isinstance(model, PlantedCell)
    decide = model.decide
    model.decide = lambda *given: asked.append(1) or decide(*given)  # type: ignore[method-assign]
    for name in (ATTENTION, RANDOM):
        sight.curve("deletion", name, "mask", (0.0, 0.5, 1.0))
        sight.curve("deletion", name, "mask", (0.0, 0.5, 1.0))
    assert len(asked) == 1 + 4  # the output, nothing removed, all removed, and a half of each map


def test_embeddings_of_a_hub_model_can_be_filled() -> None:
    model = small_bert()
    batch = Texts(4).batch(range(4))
    sight = Sight(model, batch, over="text")
    keep = torch.ones(4, len(sight.like.keys))
    with torch.no_grad():
        for removal in REMOVALS:
            whole = sight.decide(removal)(keep)
            torch.testing.assert_close(whole, sight.output.prediction, atol=1e-5, rtol=0)
            less = keep.clone()
            less[:, 1] = 0
            assert not torch.allclose(sight.decide(removal)(less), whole)


# --- people


def peopled(count: int = 5) -> tuple[Batch, Truth]:
    """Three people, the third of whom is not there for the first sample."""
    batch = Pictures(count).batch(range(count))
    assert batch.target is not None
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(count, 1, 1, 3, 16, generator=generator)
    mask = torch.ones(count, 3, 16, dtype=torch.bool)
    mask[0, 2] = False
    weights[0, :, :, 2] = 0
    people = AttentionMap(weights, batch.target.keys, words(3, "people"), mask, Kind.AMOUNT)
    counts = replace(people, values=(weights * 5).floor())
    uniform = measure.uniform(batch.target)
    return batch, Truth(batch.target, people, counts, replace(uniform, kind=Kind.AMOUNT), uniform)


def test_one_person_is_held_to_all_others() -> None:
    batch, truth = peopled()
    sight = Sight(PlantedCell(), batch, truth)
    assert sight.names()[-1] == PERSON and PRIOR in sight.names()
    person, held = sight.on_truth(PERSON), sight.truth(PERSON)
    assert truth.people is not None and held.fixations is not None
    for row in range(5):
        each = truth.people.weights[row, 0, 0]
        who = next(p for p in range(3) if torch.equal(each[p], person.weights[row, 0, 0, 0]))
        others = [p for p in range(3) if p != who and float(each[p].sum()) > 0]
        mean = torch.stack([each[p] / each[p].sum() for p in others]).mean(dim=0)
        torch.testing.assert_close(held.target.weights[row, 0, 0, 0], mean)
        counts = (each * 5).floor()[others].sum(dim=0)
        torch.testing.assert_close(held.fixations.weights[row, 0, 0, 0], counts)


def test_who_is_drawn_does_not_hang_on_the_batch() -> None:
    batch, truth = peopled()
    whole = Sight(PlantedCell(), batch, truth).on_truth(PERSON).weights
    for row in range(5):
        at = torch.tensor([row])
        alone = Sight(PlantedCell(), batch.select(at), truth.select(at)).on_truth(PERSON).weights
        assert torch.equal(alone[0], whole[row])


# --- maps brought together


def test_onto_keeps_words_and_drops_padding() -> None:
    wide = AttentionMap.from_cells(torch.tensor([[1.0, 2.0, 0.0]]), words(3))
    narrow = AttentionMap.from_cells(torch.ones(1, 2), words(2))
    assert torch.equal(onto(wide, narrow).weights, wide.weights[..., :2])
    with pytest.raises(ValueError, match="weight beyond the 1 words"):
        onto(wide, AttentionMap.from_cells(torch.ones(1, 1), words(1)))
    with pytest.raises(ValueError, match="cannot be laid over"):
        onto(narrow, wide)
    with pytest.raises(ValueError, match="cannot be laid over"):
        onto(wide, AttentionMap.from_cells(torch.ones(1, 4), grid(2, 2)))


def test_of_a_signed_map_the_positive_part_is_meant() -> None:
    values = torch.tensor([-1.0, 0.5]).reshape(1, 1, 1, 1, 2)
    signed = AttentionMap(values, words(2), POINT, None, Kind.SIGNED)
    assert positive(signed).weights.flatten().tolist() == [0, 0.5]
    plain = AttentionMap.from_cells(torch.ones(1, 2), words(2))
    assert positive(plain) is plain


def test_a_map_of_several_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 heads"):
        one_row(AttentionMap(torch.ones(1, 1, 2, 1, 3) / 3, words(3)))


def test_a_text_model_of_ours_has_gradient_maps() -> None:
    model = TextClassifier(12, 2, width=0.1, hops=2).eval()
    sight = Sight(model, Texts(3).batch(range(3)))
    assert GRADIENT in sight.names() and ACTIVATION not in sight.names()


def test_a_model_that_wants_tensors_is_told_how_it_gets_them() -> None:
    sight = Sight(nn.Conv2d(3, 4, 3), Pictures(2).batch(range(2)))
    with pytest.raises(
        ValueError, match=r"Conv2d cannot be called with a batch; overt.adopt\(model\)"
    ):
        sight.output  # noqa: B018  it is asked when it is read


def test_keys_are_the_cells_of_a_picture_and_the_words_of_a_text() -> None:
    assert Sight(PlantedCell(), Pictures(3).batch(range(3))).key_counts.tolist() == [16.0] * 3
    texts = Texts(5).batch(range(5))
    assert texts.token_mask is not None
    counted = Sight(PlantedWord(), texts).key_counts
    assert counted.tolist() == texts.token_mask.sum(dim=1).tolist() and len(set(counted)) > 1
    blind = AttentionMap.from_cells(torch.full((1, 4), torch.nan), words(4))
    one = Texts(1).batch([0])
    assert bool(Sight(None, one, looks={"blind": lambda batch: blind}).key_counts.isnan().all())
