from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from overt.attention import AttentionMap, grid, words
from overt.capture.resting import resting
from overt.data.batch import Batch
from overt.geometry import TextGeometry
from overt.models.answering.vqa import VQA, Sizes, SoftAttention
from overt.models.cnn import Cells
from overt.supervise.surrogate.look import (
    asking,
    every_one,
    last_layer,
    mean,
    of_answers,
    of_label,
    of_truth,
    rows_of,
)
from tests.supervise.surrogate.toys import Planted, Toys

BATCH = Toys().batch(range(6))


# --- scores


def test_the_score_is_the_log_probability_of_the_label(generator):
    logits = torch.randn(4, 3, generator=generator)
    labels = torch.tensor([2, 0, 1, 1])
    batch = Batch(("a", "b", "c", "d"), labels=labels)
    slow = [float(row.exp()[at] / row.exp().sum()) for row, at in zip(logits, labels, strict=True)]
    torch.testing.assert_close(of_label(logits, batch).exp(), torch.tensor(slow))
    assert torch.equal(of_truth(logits, batch), of_label(logits, batch))


def test_scores_tell_apart_what_has_rounded_to_zero():
    batch = Batch(("a", "b"), labels=torch.tensor([0, 0]))
    score = of_label(torch.tensor([[-300.0, 0.0], [-200.0, 0.0]]), batch)
    assert score[1] > score[0] and score.exp()[0] == score.exp()[1] == 0


def test_half_precision_is_scored_in_float32():
    batch = Batch(("a",), labels=torch.tensor([0]))
    assert of_label(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), batch).dtype == torch.float32


def test_several_answers_count_by_their_soft_scores(generator):
    logits = torch.randn(3, 4, generator=generator)
    answers = torch.tensor([[0.3, 0.9, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 0]])
    batch = Batch(("a", "b", "c"), answers=answers)
    logs = logits.log_softmax(dim=-1)
    found = of_answers(logits, batch)
    torch.testing.assert_close(found[0], (0.3 * logs[0, 0] + 0.9 * logs[0, 1]) / 1.2)
    torch.testing.assert_close(found[1], logs[1, 2])
    assert found[2] == 0  # nothing is known to be right: nothing is better than the whole
    assert torch.equal(of_truth(logits, batch), found)
    impossible = of_answers(
        torch.tensor([[0.0, -torch.inf]]), Batch(("a",), answers=torch.eye(2)[:1])
    )
    assert impossible == 0


def test_no_truth_is_said():
    with pytest.raises(ValueError, match="right answers"):
        of_label(torch.zeros(1, 2), Batch(("a",)))
    with pytest.raises(ValueError, match="soft scores"):
        of_answers(torch.zeros(1, 2), Batch(("a",)))


# --- reductions


def test_reductions():
    values = torch.rand(2, 3, 4, 1, 5)
    attention = AttentionMap(values, words(5)).normalize()
    both = attention.values.mean(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(mean(attention).values, both)
    mean(attention).check()
    last = attention.values[:, -1:].mean(dim=2, keepdim=True)
    torch.testing.assert_close(last_layer(attention).values, last)
    assert every_one(attention) is attention


# --- rows


def test_rows_of_features_of_any_make():
    @dataclass(frozen=True)
    class Made:
        cells: Cells
        more: dict
        both: tuple
        text: TextGeometry
        size: int = 3
        nothing: None = None

    text = TextGeometry(("a", "b", "c"), torch.arange(6).reshape(3, 1, 2))
    cells = Cells(torch.arange(3.0)[:, None, None], grid(1, 1))
    made = Made(cells, {"x": torch.arange(3)}, (torch.arange(3), [torch.tensor(5)]), text)
    found = rows_of(made, torch.tensor([2, 0, 2]), 3)
    assert found.cells.values.flatten().tolist() == [2, 0, 2]
    assert found.more["x"].tolist() == [2, 0, 2] and found.both[0].tolist() == [2, 0, 2]
    assert found.both[1][0] == 5 and found.text.texts == ("c", "a", "c") and found.size == 3
    assert rows_of(BATCH, torch.tensor([1]), len(BATCH)).ids == BATCH.ids[1:2]
    Pair = namedtuple("Pair", "one other")
    pair = rows_of(Pair(torch.arange(3), None), torch.tensor([1]), 3)
    assert isinstance(pair, Pair) and pair.one.tolist() == [1] and pair.other is None


def test_rows_that_nobody_can_know_are_refused():
    with pytest.raises(ValueError, match=r"shape \(5,\) for 3 samples.*select="):
        rows_of({"packed": torch.zeros(5)}, torch.tensor([0]), 3)
    with pytest.raises(ValueError, match=r"SimpleNamespace.*select="):
        rows_of(SimpleNamespace(), torch.tensor([0]), 3)


# --- asking


def test_a_batch_is_encoded_once_and_rows_are_selected_once():
    model, taken = Planted(), []

    def select(features, rows, count):
        taken.append(rows.tolist())
        return rows_of(features, rows, count)

    with asking(model, BATCH, ["image"], select=select) as look:
        rows = torch.tensor([3, 1])
        for _ in range(4):
            look(rows, {"image": torch.ones(2, 16)})
    assert model.encoded == 1 and taken == [[3, 1]]


def test_a_look_agrees_with_the_model_asked_alone(generator):
    model = Planted().eval()
    rows = torch.tensor([4, 0, 0])
    masks = {"image": torch.rand(3, 16, generator=generator)}
    with asking(model, BATCH, ["image", "text"]) as look:
        found = look(rows, masks)
        assert len(look) == len(BATCH) and look.places["image"].shape == (4, 4)
        assert torch.equal(look.places["text"].present, BATCH.token_mask)
        maps = look.maps(found.answer)
    for at, row in enumerate(rows.tolist()):
        one = BATCH.select(torch.tensor([row]))
        alone = model.decide(model.encode(one), {"image": masks["image"][at : at + 1]})
        expected = alone.prediction.log_softmax(dim=-1)[0, 1]
        torch.testing.assert_close(found.score[at], expected)
        torch.testing.assert_close(
            maps["image"].values[at], mean(alone.looking_at("image")).values[0]
        )


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_found(training):
    model = Planted().train(training)
    model.drop.train(not training)
    state = torch.get_rng_state()
    with asking(model, BATCH, ["image"]) as look:
        assert not model.training and not model.drop.training
        found = look(torch.arange(len(BATCH)), {})
        torch.rand(3)
        assert not found.score.requires_grad and not found.answer.prediction.requires_grad
        torch.testing.assert_close(found.score, look.base)
    assert model.training is training and model.drop.training is not training
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    with pytest.raises(KeyboardInterrupt), resting(model):
        raise KeyboardInterrupt
    assert model.training is training


def test_held_masks_stay_in_place():
    model = Planted()
    hidden = torch.ones(len(BATCH), 16)
    hidden[:, model.bad] = 0
    with asking(model, BATCH, ["image", "text"]) as look:
        held = look.holding({"image": hidden})
        assert (held.base > look.base).all()
        rows = torch.tensor([2, 2])
        cut = torch.zeros(2, BATCH.tokens.shape[1])
        both = look(rows, {"image": hidden[rows], "text": cut}).score
        assert torch.equal(held(rows, {"text": cut}).score, both)
        assert torch.equal(look(torch.arange(len(BATCH)), {}).score, look.base)


def test_a_nan_names_its_sample():
    model = Planted()
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    with (
        pytest.raises(ValueError, match=r"sample '0\.0' no probability"),
        asking(model, BATCH, ["image"]),
    ):
        pass


def test_a_score_must_be_one_number_a_sample():
    with (
        pytest.raises(ValueError, match="one number"),
        asking(Planted(), BATCH, ["image"], score=lambda prediction, batch: prediction),
    ):
        pass


def test_a_map_over_more_than_the_span_is_refused():
    def both(attention):
        keys = grid(2, 4) + words(8)
        return AttentionMap(attention.values[:, :, :1], keys)

    with (
        pytest.raises(ValueError, match="takes the block"),
        asking(Planted(), BATCH, ["image"], reduce=both),
    ):
        pass


def test_t_ssa_10_a_mask_before_normalisation_would_be_lost(generator):
    """Why masks act after the cells are normalised: before, they cancel."""
    cells = torch.randn(2, 9, 5, generator=generator)
    mask = torch.rand(2, 9, 1, generator=generator) + 0.01
    norm = torch.nn.functional.normalize
    assert (norm(mask * cells, dim=-1) - norm(cells, dim=-1)).abs().max() < 1e-6
    model = VQA(Sizes(10, 3, cell=8, word=8, question=8, hidden=8), SoftAttention(10, 8, 8)).eval()
    images = torch.rand(2, 3, 16, 16, generator=generator)
    batch = Batch(
        ("a", "b"), images=images, tokens=torch.ones(2, 3, dtype=torch.long),
        token_mask=torch.ones(2, 3, dtype=torch.bool), labels=torch.tensor([0, 1]),
    )  # fmt: skip
    with asking(model, batch, ["image"]) as look:
        k = look.places["image"].present.shape[1]
        half = look(torch.arange(2), {"image": torch.full((2, k), 0.5)})
        assert (half.score - look.base).abs().min() > 1e-5
