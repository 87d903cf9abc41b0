"""Captioners that are asked: the caption they would write, and the map of each word."""

import math

import numpy as np
import pytest
import torch

from overt.errors import BadInput
from overt.models import Captioner, CaptionSizes
from overt.models.captioning.captioner import CachedRegions
from overt.models.captioning.decoding import Rules, greedy
from overt.recipes.a2.data import WIDTH
from overt.recipes.a2.networks import AlignedCaptioner
from overt.recipes.a2.recipe import Align, Fuse
from overt.recipes.asking import Given
from overt.recipes.feeding import batch_of, reader_of
from overt.recipes.looking import view
from overt.recipes.opening import Subject
from overt.recipes.seeing import Wish
from overt.recipes.spoken import Sees, Spoken
from overt.recipes.telling import TITLE, describe

WORDS = tuple("a small red ball lies on the grass".split())
PHOTO = np.random.default_rng(6).integers(0, 256, (36, 36, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=["plain", "aligned"])
def subject(request: pytest.FixtureRequest) -> Subject:
    torch.manual_seed(1)
    sizes = CaptionSizes(5 + len(WORDS), width=16, layers=2, heads=2, inner=16, dropout=0.0)
    plain = Captioner(sizes, CachedRegions(WIDTH))
    net = plain if request.param == "plain" else AlignedCaptioner(plain, Align(Fuse.MAX))
    known = Spoken(type(net).__name__, (), WORDS, (32, 32), Sees.CROPS, longest=6)
    return Subject("net", net.eval(), spoken=known)


def test_what_it_writes_is_what_it_writes_by_itself(subject: Subject):
    found = view(subject, Given(None, PHOTO))
    batch = batch_of(subject, Given(None, PHOTO))
    with torch.no_grad():
        texts = greedy(subject.model, batch, Rules(longest=6))
    words = reader_of(subject.spoken).decode(texts.ids()[0])
    [(caption, chance)] = found.answers
    assert caption == " ".join(words) and 0 < chance < 1
    assert f"It writes: {caption}" in found.notes
    [panel] = found.panels
    assert panel.title == TITLE and list(panel.queries) == words
    rows = texts.attention[0].weights[:, :, :, : len(words)]
    torch.testing.assert_close(panel.attention.weights, rows, atol=1e-6, rtol=1e-5)


def test_a_caption_that_is_given_is_followed_word_by_word(subject: Subject):
    found = view(subject, Given("A red ball sparkles", PHOTO))
    [panel] = found.panels
    assert panel.queries == ("A", "red", "ball", "sparkles") and found.answers == ()
    assert any("does not know sparkles" in note for note in found.notes)
    assert any("gives this caption a chance of" in note for note in found.notes)


def test_a_part_that_is_removed_is_looked_at_no_more(subject: Subject):
    [panel] = view(subject, Given("a red ball", PHOTO, without=((0.0, 0.0, 0.25, 0.25),))).panels
    assert float(panel.attention.weights[..., 0].max()) == 0
    with pytest.raises(BadInput, match="leave one"):
        view(subject, Given("a red ball", PHOTO, without=((0.0, 0.0, 1.0, 1.0),)))


def test_gradients_are_those_of_each_word(subject: Subject):
    text = "a red ball"
    [panel] = view(subject, Given(text, PHOTO), Wish(way="gradient")).panels
    assert panel.attention.values.shape[1:3] == (1, 1) and len(panel.queries) == 3
    model = subject.model
    plain = model if isinstance(model, Captioner) else model.captioner
    memory = model.encode(batch_of(subject, Given(None, PHOTO)))
    states = memory.states.detach().clone().requires_grad_()
    ids = reader_of(subject.spoken).encode(text.split())
    tokens = torch.tensor([[3, *ids]])
    from dataclasses import replace

    if plain is model:
        logits = plain.write(replace(memory, states=states), tokens).logits
    else:
        with model.aligned():
            logits = plain.write(replace(memory, states=states), tokens).logits
    logits[0, 1].log_softmax(-1)[ids[1]].backward()  # the chance of the second word
    torch.testing.assert_close(
        panel.attention.weights[0, 0, 0, 1].float(),
        states.grad[0].norm(dim=-1),
        atol=1e-6,
        rtol=1e-4,
    )


def test_what_it_says_is_kept_to_itself_where_it_cannot_be_asked(subject: Subject):
    with pytest.raises(BadInput, match="has no map 'search'"):
        view(subject, Given(None, PHOTO), Wish(way="search"))
    told = describe(subject, Given(None, PHOTO), "raw")
    assert told.text is not None and math.isfinite(told.chance)
