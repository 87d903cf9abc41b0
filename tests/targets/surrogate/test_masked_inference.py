"""Masked inference: scores, sample selection, restored state, errors."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from overt.attention import AttentionMap, grid, words
from overt.capture.eval_mode import eval_mode_forked_rng
from overt.data.batch import Batch
from overt.geometry import TextGeometry
from overt.nn.cnn import ImageFeatures
from overt.nn.vqa.model import VQA, SoftAttention, VQASizes
from overt.targets.surrogate.masked_inference import (
    all_maps,
    answers_log_probability,
    label_log_probability,
    last_layer_map,
    masked_batch,
    mean_map,
    select_samples,
    truth_log_probability,
)
from tests.targets.surrogate.toys import Planted, Toys

BATCH = Toys().batch(range(6))


# --- scores


def test_score_is_the_log_probability_of_the_label(generator):
    logits = torch.randn(4, 3, generator=generator)
    labels = torch.tensor([2, 0, 1, 1])
    batch = Batch(("a", "b", "c", "d"), labels=labels)
    slow = [float(row.exp()[at] / row.exp().sum()) for row, at in zip(logits, labels, strict=True)]
    torch.testing.assert_close(label_log_probability(logits, batch).exp(), torch.tensor(slow))
    assert torch.equal(truth_log_probability(logits, batch), label_log_probability(logits, batch))


def test_scores_differ_where_probabilities_underflow():
    batch = Batch(("a", "b"), labels=torch.tensor([0, 0]))
    score = label_log_probability(torch.tensor([[-300.0, 0.0], [-200.0, 0.0]]), batch)
    assert score[1] > score[0] and score.exp()[0] == score.exp()[1] == 0


def test_half_precision_is_scored_in_float32():
    batch = Batch(("a",), labels=torch.tensor([0]))
    assert (
        label_log_probability(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), batch).dtype
        == torch.float32
    )


def test_soft_answers_weight_log_probabilities(generator):
    logits = torch.randn(3, 4, generator=generator)
    answers = torch.tensor([[0.3, 0.9, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 0]])
    batch = Batch(("a", "b", "c"), answers=answers)
    logs = logits.log_softmax(dim=-1)
    found = answers_log_probability(logits, batch)
    torch.testing.assert_close(found[0], (0.3 * logs[0, 0] + 0.9 * logs[0, 1]) / 1.2)
    torch.testing.assert_close(found[1], logs[1, 2])
    assert found[2] == 0  # without a correct answer no mask scores better than no mask
    assert torch.equal(truth_log_probability(logits, batch), found)
    impossible = answers_log_probability(
        torch.tensor([[0.0, -torch.inf]]), Batch(("a",), answers=torch.eye(2)[:1])
    )
    assert impossible == 0


def test_missing_labels_raise():
    with pytest.raises(ValueError, match="need labels"):
        label_log_probability(torch.zeros(1, 2), Batch(("a",)))
    with pytest.raises(ValueError, match="soft answers"):
        answers_log_probability(torch.zeros(1, 2), Batch(("a",)))


# --- reductions


def test_reductions():
    values = torch.rand(2, 3, 4, 1, 5)
    attention = AttentionMap(values, words(5)).normalize()
    both = attention.values.mean(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(mean_map(attention).values, both)
    mean_map(attention).check()
    last = attention.values[:, -1:].mean(dim=2, keepdim=True)
    torch.testing.assert_close(last_layer_map(attention).values, last)
    assert all_maps(attention) is attention


# --- selecting samples


def test_select_samples_of_nested_features():
    @dataclass(frozen=True)
    class Made:
        cells: ImageFeatures
        more: dict
        both: tuple
        text: TextGeometry
        size: int = 3
        nothing: None = None

    text = TextGeometry(("a", "b", "c"), torch.arange(6).reshape(3, 1, 2))
    cells = ImageFeatures(torch.arange(3.0)[:, None, None], grid(1, 1))
    made = Made(cells, {"x": torch.arange(3)}, (torch.arange(3), [torch.tensor(5)]), text)
    found = select_samples(made, torch.tensor([2, 0, 2]), 3)
    assert found.cells.values.flatten().tolist() == [2, 0, 2]
    assert found.more["x"].tolist() == [2, 0, 2] and found.both[0].tolist() == [2, 0, 2]
    assert found.both[1][0] == 5 and found.text.texts == ("c", "a", "c") and found.size == 3
    assert select_samples(BATCH, torch.tensor([1]), len(BATCH)).ids == BATCH.ids[1:2]
    Pair = namedtuple("Pair", "one other")
    pair = select_samples(Pair(torch.arange(3), None), torch.tensor([1]), 3)
    assert isinstance(pair, Pair) and pair.one.tolist() == [1] and pair.other is None


def test_select_samples_of_unknown_features_raises():
    with pytest.raises(ValueError, match=r"\(5.* 3 samples"):
        select_samples({"packed": torch.zeros(5)}, torch.tensor([0]), 3)
    with pytest.raises(ValueError, match=r"SimpleNamespace.*select="):
        select_samples(SimpleNamespace(), torch.tensor([0]), 3)


# --- masked batches


def test_batch_is_encoded_and_rows_are_selected_once():
    model, taken = Planted(), []

    def select(features, rows, count):
        taken.append(rows.tolist())
        return select_samples(features, rows, count)

    with masked_batch(model, BATCH, ["image"], select=select) as look:
        rows = torch.tensor([3, 1])
        for _ in range(4):
            look(rows, {"image": torch.ones(2, 16)})
    assert model.encoded == 1 and taken == [[3, 1]]


def test_masked_batch_agrees_with_the_model_on_single_samples(generator):
    model = Planted().eval()
    rows = torch.tensor([4, 0, 0])
    masks = {"image": torch.rand(3, 16, generator=generator)}
    with masked_batch(model, BATCH, ["image", "text"]) as look:
        found = look(rows, masks)
        assert len(look) == len(BATCH) and look.positions["image"].shape == (4, 4)
        assert torch.equal(look.positions["text"].present, BATCH.token_mask)
        maps = look.maps(found.answer)
    for at, row in enumerate(rows.tolist()):
        one = BATCH.select(torch.tensor([row]))
        alone = model.decide(model.encode(one), {"image": masks["image"][at : at + 1]})
        expected = alone.prediction.log_softmax(dim=-1)[0, 1]
        torch.testing.assert_close(found.score[at], expected)
        torch.testing.assert_close(
            maps["image"].values[at], mean_map(alone.attention_to("image")).values[0]
        )


@pytest.mark.parametrize("training", [True, False])
def test_model_mode_and_rng_state_are_restored(training):
    model = Planted().train(training)
    model.drop.train(not training)
    state = torch.get_rng_state()
    with masked_batch(model, BATCH, ["image"]) as look:
        assert not model.training and not model.drop.training
        found = look(torch.arange(len(BATCH)), {})
        torch.rand(3)
        assert not found.score.requires_grad and not found.answer.prediction.requires_grad
        torch.testing.assert_close(found.score, look.base)
    assert model.training is training and model.drop.training is not training
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    with pytest.raises(KeyboardInterrupt), eval_mode_forked_rng(model):
        raise KeyboardInterrupt
    assert model.training is training


def test_fixed_masks_stay_in_place():
    model = Planted()
    hidden = torch.ones(len(BATCH), 16)
    hidden[:, model.bad] = 0
    with masked_batch(model, BATCH, ["image", "text"]) as look:
        fixed = look.with_masks({"image": hidden})
        assert (fixed.base > look.base).all()
        rows = torch.tensor([2, 2])
        cut = torch.zeros(2, BATCH.tokens.shape[1])
        both = look(rows, {"image": hidden[rows], "text": cut}).score
        assert torch.equal(fixed(rows, {"text": cut}).score, both)
        assert torch.equal(look(torch.arange(len(BATCH)), {}).score, look.base)


def test_nan_score_raises_with_the_sample_id():
    model = Planted()
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    with (
        pytest.raises(ValueError, match=r"sample '0\.0'"),
        masked_batch(model, BATCH, ["image"]),
    ):
        pass


def test_score_must_be_one_number_per_sample():
    with (
        pytest.raises(ValueError, match="one number"),
        masked_batch(Planted(), BATCH, ["image"], score=lambda prediction, batch: prediction),
    ):
        pass


def test_map_over_other_spans_raises():
    def both(attention):
        keys = grid(2, 4) + words(8)
        return AttentionMap(attention.values[:, :, :1], keys)

    with (
        pytest.raises(ValueError, match="'image'.*'image'.*'text'.*'image'"),
        masked_batch(Planted(), BATCH, ["image"], reduce=both),
    ):
        pass


def test_t_ssa_10_a_mask_before_normalisation_would_cancel(generator):
    """Masks act after the cells are normalised; before, they would cancel."""
    cells = torch.randn(2, 9, 5, generator=generator)
    mask = torch.rand(2, 9, 1, generator=generator) + 0.01
    norm = torch.nn.functional.normalize
    assert (norm(mask * cells, dim=-1) - norm(cells, dim=-1)).abs().max() < 1e-6
    model = VQA(
        VQASizes(10, 3, cell=8, word=8, question=8, hidden=8), SoftAttention(10, 8, 8)
    ).eval()
    images = torch.rand(2, 3, 16, 16, generator=generator)
    batch = Batch(
        ("a", "b"), images=images, tokens=torch.ones(2, 3, dtype=torch.long),
        token_mask=torch.ones(2, 3, dtype=torch.bool), labels=torch.tensor([0, 1]),
    )  # fmt: skip
    with masked_batch(model, batch, ["image"]) as look:
        k = look.positions["image"].present.shape[1]
        half = look(torch.arange(2), {"image": torch.full((2, k), 0.5)})
        assert (half.score - look.base).abs().min() > 1e-5
