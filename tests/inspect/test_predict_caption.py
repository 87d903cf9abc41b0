"""Captioners in the inspector: the generated caption, and the map of each word."""

import math

import numpy as np
import pytest
import torch

from overt.errors import UserError
from overt.experiments.inference_spec import ImageInput, InferenceSpec
from overt.inspect.collate import make_batch, text_reader
from overt.inspect.inputs import ModelInput
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import view_model
from overt.inspect.panels import ViewOptions
from overt.inspect.predict_caption import TITLE, caption_image
from overt.nn import Captioner, CaptionerSizes
from overt.nn.captioning.captioner import CachedRegionEncoder
from overt.nn.captioning.decoding import DecodingRules, greedy
from overt.papers.a2.config import A2Align, A2Fusion
from overt.papers.a2.data import REGION_WIDTH
from overt.papers.a2.model import AlignedCaptioner

WORDS = tuple("a small red ball lies on the grass".split())
PHOTO = np.random.default_rng(6).integers(0, 256, (36, 36, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=["plain", "aligned"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    torch.manual_seed(1)
    sizes = CaptionerSizes(5 + len(WORDS), width=16, layers=2, heads=2, inner=16, dropout=0.0)
    plain = Captioner(sizes, CachedRegionEncoder(REGION_WIDTH))
    net = plain if request.param == "plain" else AlignedCaptioner(plain, A2Align(A2Fusion.MAX))
    known = InferenceSpec(type(net).__name__, (), WORDS, (32, 32), ImageInput.CROPS, longest=6)
    return LoadedModel("net", net.eval(), spec=known)


def test_the_caption_equals_greedy_decoding(loaded: LoadedModel):
    found = view_model(loaded, ModelInput(None, PHOTO))
    batch = make_batch(loaded, ModelInput(None, PHOTO))
    with torch.no_grad():
        texts = greedy(loaded.model, batch, DecodingRules(max_length=6))
    words = text_reader(loaded.spec).decode(texts.ids()[0])
    [(caption, chance)] = found.answers
    assert caption == " ".join(words) and 0 < chance < 1
    assert f"It writes: {caption}" in found.notes
    [panel] = found.panels
    assert panel.title == TITLE and list(panel.queries) == words
    rows = texts.attention[0].weights[:, :, :, : len(words)]
    torch.testing.assert_close(panel.attention.weights, rows, atol=1e-6, rtol=1e-5)


def test_a_given_caption_is_scored_word_by_word(loaded: LoadedModel):
    found = view_model(loaded, ModelInput("A red ball sparkles", PHOTO))
    [panel] = found.panels
    assert panel.queries == ("A", "red", "ball", "sparkles") and found.answers == ()
    assert any("vocabulary: sparkles" in note for note in found.notes)
    assert any("probability of this caption" in note for note in found.notes)


def test_a_removed_region_has_no_attention(loaded: LoadedModel):
    [panel] = view_model(
        loaded, ModelInput("a red ball", PHOTO, removed_boxes=((0.0, 0.0, 0.25, 0.25),))
    ).panels
    assert float(panel.attention.weights[..., 0].max()) == 0
    with pytest.raises(UserError, match="at least one"):
        view_model(loaded, ModelInput("a red ball", PHOTO, removed_boxes=((0.0, 0.0, 1.0, 1.0),)))


def test_gradients_are_computed_per_word(loaded: LoadedModel):
    text = "a red ball"
    [panel] = view_model(loaded, ModelInput(text, PHOTO), ViewOptions(method="gradient")).panels
    assert panel.attention.values.shape[1:3] == (1, 1) and len(panel.queries) == 3
    model = loaded.model
    plain = model if isinstance(model, Captioner) else model.captioner
    memory = model.encode(make_batch(loaded, ModelInput(None, PHOTO)))
    states = memory.states.detach().clone().requires_grad_()
    ids = text_reader(loaded.spec).encode(text.split())
    tokens = torch.tensor([[3, *ids]])
    from dataclasses import replace

    if plain is model:
        logits = plain.decode_captions(replace(memory, states=states), tokens).logits
    else:
        with model.aligned():
            logits = plain.decode_captions(replace(memory, states=states), tokens).logits
    logits[0, 1].log_softmax(-1)[ids[1]].backward()  # the probability of the second word
    torch.testing.assert_close(
        panel.attention.weights[0, 0, 0, 1].float(),
        states.grad[0].norm(dim=-1),
        atol=1e-6,
        rtol=1e-4,
    )


def test_an_unsupported_map_is_rejected(loaded: LoadedModel):
    with pytest.raises(UserError, match="has no map 'search'"):
        view_model(loaded, ModelInput(None, PHOTO), ViewOptions(method="search"))
    caption = caption_image(loaded, ModelInput(None, PHOTO), "attention")
    assert caption.text is not None and math.isfinite(caption.chance)
