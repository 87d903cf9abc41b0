"""`MetricContext`: maps by name, their ground truth and removal of input parts."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from overt import metrics
from overt.attention import GLOBAL_QUERY, AttentionMap, Kind, grid, words
from overt.data.batch import Batch
from overt.data.human_attention import GroundTruth
from overt.metrics.metric import MetricUnavailableError
from overt.metrics.scorecard.metric_context import (
    ACTIVATION,
    ATTENTION,
    GRADIENT,
    PERSON,
    PRIOR,
    RANDOM,
    REMOVALS,
    SHUFFLED,
    MetricContext,
    align_keys,
    check_one_row,
    positive_part,
)
from overt.nn.cnn import SmallCNN
from overt.nn.output import Output
from overt.nn.text_classifier import TextClassifier
from overt.testing import PlantedCell, PlantedWord
from tests.metrics.scorecard.toys import Pictures, Texts, partly_true_map, small_bert


def make_context(count: int = 6, side: int = 4, **more) -> MetricContext:
    source = Pictures(count, side=side)
    batch = source.batch(range(count))
    assert batch.target is not None
    return MetricContext(PlantedCell().eval(), batch, GroundTruth(batch.target), **more)


def test_an_attention_model_has_all_maps_except_human_ones() -> None:
    names = make_context(looks={"half": partly_true_map(0.5, None)}).names()
    assert names == (
        ATTENTION, "half", GRADIENT, SHUFFLED, RANDOM, "centre", "uniform",
    )  # fmt: skip


def test_a_network_without_attention_has_activation_and_gradient_maps() -> None:
    batch = Pictures(4).batch(range(4))
    context = MetricContext(SmallCNN(3, width=0.1).eval(), batch)
    assert context.names()[:2] == (ACTIVATION, GRADIENT)
    assert context.like.keys.spans[0].shape == (2, 2) and context.over == "image"
    with pytest.raises(MetricUnavailableError, match="no attention"):
        context.map(ATTENTION)


def test_maps_without_a_model_are_accepted() -> None:
    batch = Pictures(4).batch(range(4))
    context = MetricContext(None, batch, looks={"half": partly_true_map(0.5, None)})
    assert context.names()[0] == "half" and ATTENTION not in context.names()
    with pytest.raises(MetricUnavailableError, match="no model"):
        context.decide("mask")
    with pytest.raises(ValueError, match="unknown map 'third'"):
        context.map("third")


def test_agreement_uses_the_grid_of_the_truth_and_the_rest_the_model_grid() -> None:
    context = make_context(side=8)
    assert len(context.map(ATTENTION).keys) == 16 and len(context.on_truth(ATTENTION).keys) == 64


@pytest.mark.parametrize("side", [2, 3, 4, 7])
def test_a_given_map_on_the_keys_of_the_truth_is_not_resampled(side: int) -> None:
    """Through the 4 x 4 cells of the model, a part of the mass of a 3 x 3 map would leave it."""
    batch = Pictures(3).batch(range(3))
    cells = torch.eye(side**2)[:1].repeat(3, 1)
    target = AttentionMap.from_cells(cells, grid(side, side, geometry=batch.geometry))
    looks = {"given": lambda batch: target}
    context = MetricContext(PlantedCell().eval(), batch, GroundTruth(target), looks)
    assert torch.equal(context.on_truth("given").weights, target.weights)
    assert metrics.mass_inside(context.on_truth("given"), target).tolist() == [1] * 3
    assert context.map("given").keys.spans[0].shape == (4, 4)  # where cells can be removed


def test_the_last_map_is_averaged_over_heads_and_layers() -> None:
    class Several(nn.Module):
        def forward(self, batch: Batch) -> Output:
            first = AttentionMap.from_cells(torch.eye(4)[:2], grid(2, 2))
            weights = torch.eye(4).reshape(1, 2, 2, 1, 4).expand(2, 2, 2, 1, 4)
            return Output(torch.zeros(2, 2), (first, AttentionMap(weights, grid(2, 2))))

    context = MetricContext(Several(), Pictures(2).batch(range(2)))
    assert torch.equal(context.map(ATTENTION).weights, torch.full((2, 1, 1, 1, 4), 0.25))


def test_a_model_without_attention_over_the_input_raises() -> None:
    with pytest.raises(MetricUnavailableError, match=r"image.*'text'"):
        MetricContext(PlantedCell(), Pictures(2).batch(range(2)), over="text").map(ATTENTION)


def test_a_model_that_returns_a_tensor_raises() -> None:
    context = MetricContext(lambda batch: torch.zeros(2, 2), Pictures(2).batch(range(2)))
    with pytest.raises(ValueError, match=r"overt\.wrap"):
        context.map(ATTENTION)


# --- removal


@pytest.mark.parametrize("removal", REMOVALS)
def test_every_removal_changes_the_prediction_only_by_the_deciding_cell(removal: str) -> None:
    context = make_context()
    decide = context.decide(removal)
    keep = torch.ones(6, 16)
    with torch.no_grad():
        torch.testing.assert_close(decide(keep), context.output.prediction)
        keep[:, 0] = 0
        near = 1e-4 if removal == "mask" else 0.2  # noise and rounding of the filled values
        torch.testing.assert_close(decide(keep), context.output.prediction, atol=near, rtol=0)
        keep[:, 5] = 0
        assert float((decide(keep) - context.output.prediction).abs().max()) > 0.5


@pytest.mark.parametrize("removal", REMOVALS)
def test_words_are_removed_by_every_removal(removal: str) -> None:
    source = Texts(6)
    context = MetricContext(PlantedWord().eval(), source.batch(range(6)))
    keep = torch.ones(6, len(context.like.keys))
    keep[torch.arange(6), source.place] = 0
    with torch.no_grad():
        there, gone = context.decide(removal)(torch.ones_like(keep)), context.decide(removal)(keep)
    assert bool((there[:, 1] > 0).all()) and bool((gone[:, 1] < there[:, 1]).all())


def test_byte_images_stay_bytes() -> None:
    batch = Pictures(3).batch(range(3))
    assert batch.images is not None
    small = ((batch.images.clamp(-1, 1) + 1) * 127).to(torch.uint8)
    context = MetricContext(PlantedCell().eval(), replace(batch, images=small))
    with torch.no_grad():
        found = context.decide("mean")(torch.ones(3, 16))
    torch.testing.assert_close(found, context.output.prediction)


def test_shared_curves_are_computed_once() -> None:
    context, calls = make_context(), []
    model = context.model
    assert isinstance(model, PlantedCell)
    decide = model.decide
    model.decide = lambda *given: calls.append(1) or decide(*given)  # type: ignore[method-assign]
    for name in (ATTENTION, RANDOM):
        context.curve("deletion", name, "mask", (0.0, 0.5, 1.0))
        context.curve("deletion", name, "mask", (0.0, 0.5, 1.0))
    assert len(calls) == 1 + 4  # the output, nothing removed, all removed and one half per map


def test_embeddings_of_a_transformers_model_can_be_filled() -> None:
    model = small_bert()
    batch = Texts(4).batch(range(4))
    context = MetricContext(model, batch, over="text")
    keep = torch.ones(4, len(context.like.keys))
    with torch.no_grad():
        for removal in REMOVALS:
            whole = context.decide(removal)(keep)
            torch.testing.assert_close(whole, context.output.prediction, atol=1e-5, rtol=0)
            less = keep.clone()
            less[:, 1] = 0
            assert not torch.allclose(context.decide(removal)(less), whole)


# --- people


def batch_with_people(count: int = 5) -> tuple[Batch, GroundTruth]:
    """Return maps of three people; the third one has no map of the first sample."""
    batch = Pictures(count).batch(range(count))
    assert batch.target is not None
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(count, 1, 1, 3, 16, generator=generator)
    mask = torch.ones(count, 3, 16, dtype=torch.bool)
    mask[0, 2] = False
    weights[0, :, :, 2] = 0
    people = AttentionMap(weights, batch.target.keys, words(3, "people"), mask, Kind.AMOUNT)
    counts = replace(people, values=(weights * 5).floor())
    uniform = metrics.uniform_map(batch.target)
    return batch, GroundTruth(
        batch.target, people, counts, replace(uniform, kind=Kind.AMOUNT), uniform
    )


def test_one_person_is_compared_with_all_others() -> None:
    batch, truth = batch_with_people()
    context = MetricContext(PlantedCell(), batch, truth)
    assert context.names()[-1] == PERSON and PRIOR in context.names()
    person, truth_of_person = context.on_truth(PERSON), context.truth(PERSON)
    assert truth.people is not None and truth_of_person.fixations is not None
    for row in range(5):
        each = truth.people.weights[row, 0, 0]
        who = next(p for p in range(3) if torch.equal(each[p], person.weights[row, 0, 0, 0]))
        others = [p for p in range(3) if p != who and float(each[p].sum()) > 0]
        mean = torch.stack([each[p] / each[p].sum() for p in others]).mean(dim=0)
        torch.testing.assert_close(truth_of_person.target.weights[row, 0, 0, 0], mean)
        counts = (each * 5).floor()[others].sum(dim=0)
        torch.testing.assert_close(truth_of_person.fixations.weights[row, 0, 0, 0], counts)


def test_the_drawn_person_does_not_depend_on_the_batch() -> None:
    batch, truth = batch_with_people()
    whole = MetricContext(PlantedCell(), batch, truth).on_truth(PERSON).weights
    for row in range(5):
        at = torch.tensor([row])
        alone = (
            MetricContext(PlantedCell(), batch.select(at), truth.select(at))
            .on_truth(PERSON)
            .weights
        )
        assert torch.equal(alone[0], whole[row])


# --- aligned keys


def test_align_keys_keeps_words_and_drops_padding() -> None:
    wide = AttentionMap.from_cells(torch.tensor([[1.0, 2.0, 0.0]]), words(3))
    narrow = AttentionMap.from_cells(torch.ones(1, 2), words(2))
    assert torch.equal(align_keys(wide, narrow).weights, wide.weights[..., :2])
    with pytest.raises(ValueError, match="weight beyond"):
        align_keys(wide, AttentionMap.from_cells(torch.ones(1, 1), words(1)))
    with pytest.raises(ValueError, match="same keys"):
        align_keys(narrow, wide)
    with pytest.raises(ValueError, match="same keys"):
        align_keys(wide, AttentionMap.from_cells(torch.ones(1, 4), grid(2, 2)))


def test_positive_part_of_a_signed_map_is_used() -> None:
    values = torch.tensor([-1.0, 0.5]).reshape(1, 1, 1, 1, 2)
    signed = AttentionMap(values, words(2), GLOBAL_QUERY, None, Kind.SIGNED)
    assert positive_part(signed).weights.flatten().tolist() == [0, 0.5]
    plain = AttentionMap.from_cells(torch.ones(1, 2), words(2))
    assert positive_part(plain) is plain


def test_a_map_of_several_rows_raises() -> None:
    with pytest.raises(ValueError, match="2 heads"):
        check_one_row(AttentionMap(torch.ones(1, 1, 2, 1, 3) / 3, words(3)))


def test_text_classifiers_have_gradient_maps() -> None:
    model = TextClassifier(12, 2, width=0.1, hops=2).eval()
    context = MetricContext(model, Texts(3).batch(range(3)))
    assert GRADIENT in context.names() and ACTIVATION not in context.names()


def test_a_model_that_takes_tensors_raises_and_points_to_wrap() -> None:
    context = MetricContext(nn.Conv2d(3, 4, 3), Pictures(2).batch(range(2)))
    with pytest.raises(ValueError, match=r"Conv2d.*wrap\(model"):
        context.output  # noqa: B018  computed on access


def test_key_counts_are_cells_of_images_and_words_of_texts() -> None:
    assert (
        MetricContext(PlantedCell(), Pictures(3).batch(range(3))).key_counts.tolist() == [16.0] * 3
    )
    texts = Texts(5).batch(range(5))
    assert texts.token_mask is not None
    counted = MetricContext(PlantedWord(), texts).key_counts
    assert counted.tolist() == texts.token_mask.sum(dim=1).tolist() and len(set(counted)) > 1
    blind = AttentionMap.from_cells(torch.full((1, 4), torch.nan), words(4))
    one = Texts(1).batch([0])
    assert bool(
        MetricContext(None, one, looks={"blind": lambda batch: blind}).key_counts.isnan().all()
    )
