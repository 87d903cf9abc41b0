"""Inputs of attribution methods: pixels, features, tokens, keyword arguments; chunks; errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.attribution import (
    deep_lift,
    expected_gradients,
    input_gradient,
    input_x_gradient,
    integrated_gradients,
    kernel_shap,
    lime,
    occlusion,
    smooth_grad,
    var_grad,
)
from overt.attribution.model_inputs import vary_input
from overt.geometry import PixelGeometry, TextGeometry
from tests.attribution.networks import TARGET, Net, model_state


class Words(nn.Module):
    """Classify tokens by the mean of their embeddings, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 6), nn.Parameter(torch.randn(5, 6))
        self.hidden, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.hidden(self.embed(input_ids) + self.place).tanh() * seen[..., None]
        return self.head(self.drop(x.sum(dim=1) / seen.sum(dim=1, keepdim=True)))


TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
SEEN = (TOKENS > 0).long()
BATCH = {"input_ids": TOKENS, "attention_mask": SEEN}


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(3)


METHODS: dict[str, Any] = {
    "gradient": input_gradient,
    "input x gradient": input_x_gradient,
    "smooth": lambda *given, **more: smooth_grad(*given, drawn(), samples=3, **more),
    "variance": lambda *given, **more: var_grad(*given, drawn(), samples=3, **more),
    "ig": lambda *given, **more: integrated_gradients(*given, steps=3, **more),
    "deep lift": deep_lift,
    "occlusion": occlusion,
    "kernel shap": lambda *given, **more: kernel_shap(*given, drawn(), samples=30, cells=2, **more),
    "lime": lambda *given, **more: lime(*given, drawn(), samples=10, cells=2, **more),
}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def text() -> Words:
    torch.manual_seed(0)
    return Words()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("training", [True, False])
def test_pixels_get_a_map_and_the_model_is_unchanged(
    name: str, training: bool, net: Net, images: Tensor
) -> None:
    net.train(training).requires_grad_(not training)
    before, given = model_state(net), images.clone()
    geometry = PixelGeometry.identity(2, (6, 8))
    found = METHODS[name](net, images, TARGET, geometry=geometry).check()
    assert model_state(net) == before and torch.equal(images, given)
    assert found.keys.find("image").shape == (6, 8)
    assert found.keys.find("image").geometry is geometry
    assert found.values.any() and not found.values.requires_grad
    with torch.inference_mode():
        again = METHODS[name](net, images.clone(), TARGET)
    torch.testing.assert_close(again.values.clone(), found.values)


@pytest.mark.parametrize("name", METHODS)
def test_the_chunk_size_does_not_change_a_map(name: str, net: Net, images: Tensor) -> None:
    expected = METHODS[name](net, images, TARGET).values
    for chunk in (1, 3, 7):
        found = METHODS[name](net, images, TARGET, chunk=chunk).values
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="chunk"):
        METHODS[name](net, images, TARGET, chunk=0)


@pytest.mark.parametrize("name", METHODS)
def test_words_get_a_map_of_tokens_without_padding(name: str, text: Words) -> None:
    before = model_state(text.train())
    found = METHODS[name](text, BATCH, TARGET).check()
    assert model_state(text) == before and not text.embed._forward_hooks
    assert found.keys.find("text").shape == (5,) and found.values[..., :3].any()
    assert found.visible[:, 0].tolist() == SEEN.bool().tolist()
    # one text at a time, without padding and as a plain tensor
    if name in {"gradient", "input x gradient", "ig", "deep lift"}:
        alone = METHODS[name](text, TOKENS[:1], TARGET[:1])
        torch.testing.assert_close(alone.values, found.values[:1])


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_unchanged_after_an_error(name: str, text: Words) -> None:
    def fail(module: nn.Module, given: object) -> None:
        torch.rand(3)
        raise RuntimeError("in the middle")

    handle = text.head.register_forward_pre_hook(fail)
    before = model_state(text.train())
    with pytest.raises(RuntimeError, match="in the middle"):
        METHODS[name](text, BATCH, TARGET)
    assert model_state(text) == before
    handle.remove()


def test_word_maps_equal_those_of_the_embeddings_as_input(text: Words) -> None:
    """Vary the embeddings by a hook, and by a function of them."""
    values = text.embed(TOKENS).detach()

    def classify(x: Tensor) -> Tensor:
        return text.head(text.hidden(x + text.place).tanh().mean(dim=1))

    for name in ("gradient", "input x gradient", "ig", "deep lift", "occlusion", "kernel shap"):
        found = METHODS[name](text, TOKENS, TARGET).values
        torch.testing.assert_close(METHODS[name](classify, values, TARGET).values, found)


def test_a_baseline_of_tokens_is_embedded(text: Words) -> None:
    found = integrated_gradients(text, TOKENS, 1, baseline=torch.tensor(9), steps=20)
    text.eval()
    expected = text(TOKENS)[:, 1] - text(torch.full_like(TOKENS, 9))[:, 1]
    torch.testing.assert_close(found.weights.flatten(1).sum(dim=1), expected.detach())
    other = torch.tensor([[9, 9, 9, 9, 9], [3, 3, 3, 3, 3]])
    drawn_from = expected_gradients(text, TOKENS, 1, drawn(), other, samples=400)
    expected = text(TOKENS)[:, 1] - text(other)[:, 1].mean()
    torch.testing.assert_close(drawn_from.change, expected.detach())


def test_geometry_has_to_fit_the_inputs(net: Net, text: Words, images: Tensor) -> None:
    where = TextGeometry(("", ""), torch.zeros(2, 5, 2).long())
    assert input_gradient(text, TOKENS, 1, where).keys.find("text").geometry is where
    with pytest.raises(ValueError, match="1 sample.* 2 sample"):
        input_gradient(net, images, 1, PixelGeometry.identity(1, (6, 8)))
    with pytest.raises(ValueError, match="PixelGeometry"):
        input_gradient(text, TOKENS, 1, PixelGeometry.identity(2, (6, 8)))
    with pytest.raises(ValueError, match="PixelGeometry"):
        input_gradient(net, images, 1, where)


def test_unclear_inputs_raise(net: Net, text: Words, images: Tensor) -> None:
    def run(model: Any, inputs: Any, **more: Any) -> None:
        with vary_input(model, inputs, 0, **more):
            pass

    with pytest.raises(ValueError, match="embedding="):
        run(net, {"pixel_values": images, "input_ids": TOKENS})
    with pytest.raises(ValueError, match="0 embeddings"):
        run(net, TOKENS)
    with pytest.raises(ValueError, match="2 embeddings"):
        run(nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2)), TOKENS)
    with pytest.raises(ValueError, match="module"):
        run(lambda x: x, TOKENS)
    with pytest.raises(ValueError, match=r"\(b, n, d\)"):
        run(text, TOKENS, embedding=text.head)
    with pytest.raises(ValueError, match=r"\(b, c, y, x\)"):
        run(net, torch.rand(2, 3, 4, 4, 4))
    with pytest.raises(ValueError, match=r"\(2, 3, 6, 8\)"):
        occlusion(net, images, 1, baseline=torch.zeros(3))
    with pytest.raises(ValueError, match="int64"):
        occlusion(net, images, 1, baseline=torch.tensor(3))
    twice = nn.Sequential(text.embed, nn.Flatten(), nn.Linear(30, 2))
    twice.forward = lambda x: twice[2](twice[1](twice[0](x) + twice[0](x)))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="2 times"):
        input_gradient(twice, TOKENS, 0)


def test_later_layers_do_not_run_to_embed_words(text: Words) -> None:
    calls: list[int] = []
    text.head.register_forward_hook(lambda *_: calls.append(1))
    input_gradient(text, BATCH, 1)
    assert len(calls) == 1


def test_an_empty_batch_raises(net: Net, images: Tensor) -> None:
    for method in METHODS.values():
        with pytest.raises(ValueError, match="empty batch"):
            method(net, images[:0], 1)


def test_scores_that_are_not_finite_cannot_be_fitted(net: Net, images: Tensor) -> None:
    for method in (kernel_shap, lime):
        with pytest.raises(ValueError, match="not finite"):
            method(net, images * torch.nan, 1, torch.Generator(), cells=2, samples=20)


def test_targets_without_a_gradient_raise(net: Net, images: Tensor) -> None:
    for model in (
        lambda x: x.detach().mean(dim=(2, 3)),
        lambda x: net.head.weight[:1].expand(len(x), -1),
    ):
        for method in ("gradient", "deep lift"):
            with pytest.raises(ValueError, match="no gradient"):
                METHODS[method](model, images, 1)
    with pytest.raises(ValueError, match="1 scores for 2 rows"):
        input_gradient(lambda x: x.mean(dim=(0, 2, 3))[None], images, lambda out: out[:, 0])


@pytest.mark.long
def test_hugging_face_inputs_are_keyword_arguments() -> None:
    transformers = pytest.importorskip("transformers", reason="no transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, num_labels=4, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    given = transformers.BatchEncoding(BATCH)
    found = integrated_gradients(model, given, TARGET, steps=40).check()
    logits = model(**given).logits[torch.arange(2), TARGET]
    values = model.get_input_embeddings()(TOKENS)
    empty = model(inputs_embeds=torch.zeros_like(values), attention_mask=SEEN).logits
    torch.testing.assert_close(found.change, (logits - empty[torch.arange(2), TARGET]).detach())
    assert (found.gap.abs() < 0.02 * found.change.abs() + 0.01).all()
