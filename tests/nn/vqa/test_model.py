"""`VQA`: attention variants, equations, masks, padding, configs."""

import math
from dataclasses import replace

import pytest
import torch

from overt.attention import grid
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.nn.hard_attention.attention import HardAttention
from overt.nn.vqa.model import (
    VQA,
    MeanPooling,
    QuestionOnly,
    SoftAttention,
    VQASizes,
    attention_from_config,
)
from overt.testing import check_model, toy_batch

SIZES = VQASizes(vocabulary=10, answers=3, cell=6, word=5, question=7, hidden=8, dropout=0.2)


def soft(join=torch.mul, glimpses=2) -> SoftAttention:
    return SoftAttention(SIZES.seen, SIZES.question, hidden=4, glimpses=glimpses, join=join)


ATTENTIONS = {
    "blind": QuestionOnly,
    "mean": MeanPooling,
    "product": soft,
    "sum": lambda: soft(torch.add),
    "one glimpse": lambda: soft(glimpses=1),
    "hard": lambda: HardAttention(SIZES.seen, SIZES.question),
}


def make(look: str) -> VQA:
    torch.manual_seed(0)
    return VQA(SIZES, ATTENTIONS[look]())


@pytest.mark.parametrize("look", ATTENTIONS)
def test_every_attention_passes_check_model(look):
    # a question-only model does not use its backbone
    unreached = ("backbone", "normalize") if look == "blind" else ()
    check_model(lambda: make(look), toy_batch(), unreached)


def slow_soft_attention(attend, cells, question):
    """Compute softmax(w relu(V x * Q q)) and the weighted sums of one sample without torch."""

    def linear(layer, x):
        rows = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        return [sum(w * v for w, v in zip(row, x, strict=True)) + bias for row, bias in rows]

    join = {torch.mul: lambda a, b: a * b, torch.add: lambda a, b: a + b}[attend.join]
    asked = linear(attend.of_question, question.tolist())
    scores = []
    for cell in cells.tolist():
        joint = zip(linear(attend.of_cell, cell), asked, strict=True)
        scores.append(linear(attend.score, [max(0.0, join(x, q)) for x, q in joint]))
    weights, seen = [], []
    for glimpse in range(attend.glimpses):
        raised = [math.exp(score[glimpse]) for score in scores]
        weights.append([one / sum(raised) for one in raised])
        pairs = [*zip(weights[-1], cells.tolist(), strict=True)]
        seen += [sum(w * cell[d] for w, cell in pairs) for d in range(cells.shape[1])]
    return weights, seen


@pytest.mark.parametrize("join", [torch.mul, torch.add])
@pytest.mark.parametrize("glimpses", [1, 3])
def test_soft_attention_follows_its_equation(generator, join, glimpses):
    attend = soft(join, glimpses).double()
    cells = torch.randn(2, 6, SIZES.seen, dtype=torch.float64, generator=generator)
    question = torch.randn(2, SIZES.question, dtype=torch.float64, generator=generator)
    seen, attention = attend(cells, question, grid(2, 3))
    assert attention.weights.shape == (2, 1, glimpses, 1, 6)
    for b in range(2):
        weights, expected = slow_soft_attention(attend, cells[b], question[b])
        torch.testing.assert_close(seen[b].tolist(), expected, rtol=1e-9, atol=1e-12)
        found = attention.weights[b, 0, :, 0].tolist()
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-12)


def test_mean_pooling_equals_uniform_attention(generator):
    cells = torch.randn(2, 6, SIZES.seen, generator=generator)
    question = torch.randn(2, SIZES.question, generator=generator)
    attend = soft(glimpses=1)
    torch.nn.init.zeros_(attend.score.weight)
    even, _ = attend(cells, question, grid(2, 3))
    mean, attention = MeanPooling()(cells, question, grid(2, 3))
    torch.testing.assert_close(even, mean)
    assert attention is None


def test_question_only_model_does_not_run_the_backbone():
    net, batch = make("blind").eval(), toy_batch()
    seen = []
    net.backbone.register_forward_hook(lambda *call: seen.append(call))
    dark = replace(batch, images=torch.zeros_like(batch.images))
    assert torch.equal(net(batch).prediction, net(dark).prediction)
    assert seen == []
    net.train()
    net(batch).prediction.sum().backward()
    assert all(p.grad is None for p in net.backbone.parameters())


@pytest.mark.parametrize("look", [look for look in ATTENTIONS if look != "blind"])
def test_other_models_depend_on_the_image(look):
    net, batch = make(look).eval(), toy_batch()
    dark = replace(batch, images=torch.zeros_like(batch.images))
    assert not torch.equal(net(batch).prediction, net(dark).prediction)
    features = net.encode(batch)
    without = net.decide(features, {"image": torch.zeros(len(batch), 16)}).prediction
    assert not torch.equal(without, net.decide(features).prediction)


def test_soft_mask_acts_after_the_normalisation():
    """Before the normalisation a positive mask would cancel."""
    net, batch = make("product").double().eval(), toy_batch()
    pixels = net.backbone(batch.images).flatten(2).transpose(1, 2)
    # ReLU cells may be all zero, where epsilon matters: use the others
    alive = pixels.var(dim=-1) > 1e-2
    assert alive.float().mean() > 0.5
    half = torch.full(pixels.shape[:2], 0.5, dtype=torch.float64)
    before = net.normalize(pixels * half[..., None])[alive]
    torch.testing.assert_close(before, net.normalize(pixels)[alive], rtol=0.01, atol=0.01)
    features = net.encode(batch)
    mask = torch.full((len(batch), 16), 0.5)
    masked = net.decide(features, {"image": mask})
    assert (masked.prediction - net.decide(features).prediction).abs().max() > 1e-3
    by_hand = replace(features, cells=replace(features.cells, values=features.cells.values * 0.5))
    torch.testing.assert_close(masked.prediction, net.decide(by_hand).prediction)


def test_shared_image_is_encoded_once():
    net, batch = make("product").eval(), toy_batch(5)
    seen = []
    net.backbone.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    together = net(batch)
    assert seen == [len(batch.images)] == [4]
    apart = replace(
        batch,
        images=batch.images[batch.image_of],
        geometry=batch.geometry[batch.image_of],
        image_of=None,
    )
    separate = net(apart)
    assert seen == [4, 5]
    torch.testing.assert_close(separate.prediction, together.prediction)
    for one, two in zip(separate.attention, together.attention, strict=True):
        torch.testing.assert_close(one.weights, two.weights)
    image = together.attention_to("image").keys.find("image")
    assert len(image.geometry) == 5


@pytest.mark.parametrize(
    ("size", "shape"), [((32, 32), (4, 4)), ((1, 1), (1, 1)), ((17, 40), (3, 5)), ((8, 64), (1, 8))]
)
@pytest.mark.parametrize("look", ATTENTIONS)
def test_any_image_size_works(size, shape, look):
    batch = toy_batch(3)
    images = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    batch = replace(batch, images=images, geometry=PixelGeometry.identity(2, size))
    output = make(look).eval()(batch)
    assert output.prediction.isfinite().all()
    if look not in ("blind", "mean"):
        assert output.attention_to("image").keys.find("image").shape == shape


def test_prediction_does_not_depend_on_padding():
    net, batch = make("product").eval(), toy_batch(6)
    whole = net(batch)
    for at in range(6):
        length = int(batch.token_mask[at].sum())
        alone = replace(
            batch.select(torch.tensor([at])),
            tokens=batch.tokens[at : at + 1, :length],
            token_mask=batch.token_mask[at : at + 1, :length],
            text=None,
        )
        found = net(alone).prediction[0]
        torch.testing.assert_close(found, whole.prediction[at], rtol=1e-5, atol=1e-6)


def test_question_without_words_ignores_its_tokens():
    net, batch = make("product").eval(), toy_batch()
    present = batch.token_mask.clone()
    present[0] = False
    silent = replace(batch, token_mask=present)
    junk = replace(silent, tokens=(batch.tokens + 3) % 10)
    one, two = net(silent), net(junk)
    assert torch.equal(one.prediction[0], two.prediction[0])
    assert not one.attention_to("text").weights[0].any()
    assert one.prediction.isfinite().all()
    one.prediction.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_question_is_the_last_state_plus_the_attended_states():
    """Compare with a GRU cell run word by word and the attention over words."""
    net, batch = make("mean").double().eval(), toy_batch()
    features = net.encode(batch)
    cell = torch.nn.GRUCell(SIZES.word, SIZES.question).double()
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(net.read, f"{name}_l0"))
    weights = net(batch).attention_to("text").weights[:, 0, 0, 0]
    for b in range(len(batch)):
        state, states = torch.zeros(1, SIZES.question).double(), []
        for word in features.words.values[b, : int(batch.token_mask[b].sum())]:
            state = cell(word[None], state)
            states.append(state[0])
        question = states[-1] + sum(w * s for w, s in zip(weights[b], states, strict=False))
        seen = features.cells.values[b].mean(dim=0)
        expected = net.decision(torch.cat([seen, question]))
        torch.testing.assert_close(net(batch).prediction[b], expected)


def test_bfloat16_model_has_float32_attention():
    net = make("product").to(torch.bfloat16).eval()
    output = net(toy_batch())
    assert output.prediction.dtype == torch.bfloat16
    assert {one.weights.dtype for one in output.attention} == {torch.float32}


def test_attention_is_rebuilt_from_its_config_and_an_unknown_kind_raises():
    for look in ATTENTIONS.values():
        attend = look()
        assert attention_from_config(attend.config()).config() == attend.config()
    with pytest.raises(UserError, match=r"'sharp'.*soft.*hard"):
        attention_from_config({"kind": "sharp"})
    with pytest.raises(UserError, match=r"torch\.mul.*torch\.add"):
        soft(join=torch.maximum).config()


def test_changing_a_returned_config_does_not_change_the_model():
    net = make("mean")
    net.config()["sizes"]["cell"] = 1000
    assert net.sizes.cell == SIZES.cell == 6


def test_batch_without_images_or_tokens_raises():
    for gone in ({"images": None, "geometry": None, "image_of": None}, {"tokens": None}):
        with pytest.raises(ValueError, match="images and tokens"):
            make("mean")(replace(toy_batch(), **gone))


def test_pooled_features_concatenate_cells_and_words():
    net, batch = make("mean").eval(), toy_batch()
    features = net.encode(batch)
    found = features.pooled()
    assert found.shape == (4, SIZES.seen + SIZES.word)
    torch.testing.assert_close(found[:, : SIZES.seen], features.cells.values.mean(dim=1))
    there = int(batch.token_mask[1].sum())
    torch.testing.assert_close(found[1, SIZES.seen :], features.words.values[1, :there].mean(dim=0))
