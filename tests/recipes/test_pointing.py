"""Words and boxes: a network of two captions, asked with one of them or with both."""

import numpy as np
import pytest
import torch

from overt.errors import BadInput
from overt.recipes import own
from overt.recipes.asking import Given
from overt.recipes.looking import view
from overt.recipes.opening import Subject
from overt.recipes.pointing import ALONE, TITLE
from overt.recipes.seeing import Wish
from overt.recipes.spoken import Sees, Spoken
from tests.recipes.vgp import small

PHOTO = np.random.default_rng(4).integers(0, 256, (40, 40, 3), dtype=np.uint8)
ONE, TWO = "a red circle", "a red circle\na blue square"


@pytest.fixture(scope="module")
def subject() -> Subject:
    words = small.drawn(1).vocabulary.words
    known = Spoken("VLBert", ("both", "first", "second"), words, (32, 32), Sees.BOXES)
    return Subject("net", small.net().eval(), spoken=known)


def test_the_rows_of_words_over_boxes_are_those_of_the_network(subject: Subject):
    [panel] = view(subject, Given(TWO, PHOTO)).panels
    output = own.see(subject, Given(TWO, PHOTO)).output
    block = output.seen.block("text", "regions").normalize()
    rows = output.features.words[0]
    assert panel.title == TITLE and panel.queries == ("a", "red", "circle", "a", "blue", "square")
    torch.testing.assert_close(panel.attention.weights, block.weights[:, :, :, rows])
    assert panel.keys[:2] == ("box 0", "box 1")


def test_two_captions_are_answered_and_one_is_not(subject: Subject):
    both = view(subject, Given(TWO, PHOTO))
    chances = own.see(subject, Given(TWO, PHOTO)).output.prediction[0].softmax(-1)
    names = dict(both.answers)
    assert set(names) == {"both", "first", "second"}
    assert names["second"] == pytest.approx(float(chances[2]), abs=1e-6)
    alone = view(subject, Given(ONE, PHOTO))
    assert alone.answers == () and ALONE in alone.notes


def test_rollout_goes_through_all_layers(subject: Subject):
    from overt.capture.derived import rolling

    [panel] = view(subject, Given(TWO, PHOTO), Wish(way="rollout")).panels
    output = own.see(subject, Given(TWO, PHOTO)).output
    whole = rolling.rollout(output.seen).between("text", "regions").weights
    torch.testing.assert_close(panel.attention.weights, whole[:, :, :, output.features.words[0]])


def test_gradients_explain_the_answer_to_two_captions(subject: Subject):
    found = view(subject, Given(TWO, PHOTO), Wish(way="gradient"))
    text, boxes = found.panels
    assert text.keys == ("a", "red", "circle", "a", "blue", "square") and len(boxes.keys) == 16
    seen = own.see(subject, Given(TWO, PHOTO))
    answer = int(seen.output.prediction[0].argmax())
    mask = torch.ones(1, 16, requires_grad=True)
    kept = {"text": torch.ones(1, seen.batch.tokens.shape[1]), "regions": mask}
    subject.model.decide(seen.features, kept).prediction[0, answer].backward()
    torch.testing.assert_close(boxes.attention.weights.flatten(), mask.grad[0].clamp_min(0))
    with pytest.raises(BadInput, match="of one caption there is none"):
        view(subject, Given(ONE, PHOTO), Wish(way="gradient"))


def test_a_removed_box_is_looked_at_by_no_word(subject: Subject):
    gone = ((0.0, 0.0, 0.25, 0.25),)
    [panel] = view(subject, Given(TWO, PHOTO, without=gone)).panels
    weights = panel.attention.weights[0]
    assert float(weights[..., 0].max()) < 1e-6 and float(weights[..., 1].min()) > 0


def test_boxes_that_a_person_draws_take_the_place_of_tiles(subject: Subject):
    drawn = Given(ONE, PHOTO, boxes=((0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)))
    [panel] = view(subject, drawn).panels
    assert panel.keys == ("box 0", "box 1")
    with pytest.raises(BadInput, match="no map 'search'"):
        view(subject, drawn, Wish(way="search"))
