"""Grounding of words in boxes: a two-caption network with one caption or both."""

import numpy as np
import pytest
import torch

from overt.errors import UserError
from overt.experiments.inference_spec import ImageInput, InferenceSpec
from overt.inspect import predict_answer
from overt.inspect.inputs import ModelInput
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import view_model
from overt.inspect.panels import ViewOptions
from overt.inspect.predict_grounding import SINGLE_CAPTION_NOTE, TITLE
from tests.papers.vgp import small

PHOTO = np.random.default_rng(4).integers(0, 256, (40, 40, 3), dtype=np.uint8)
ONE, TWO = "a red circle", "a red circle\na blue square"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    words = small.drawn(1).vocabulary.words
    known = InferenceSpec("VLBert", ("both", "first", "second"), words, (32, 32), ImageInput.BOXES)
    return LoadedModel("net", small.net().eval(), spec=known)


def test_word_to_box_maps_equal_those_of_the_network(loaded: LoadedModel):
    [panel] = view_model(loaded, ModelInput(TWO, PHOTO)).panels
    output = predict_answer.run_network(loaded, ModelInput(TWO, PHOTO)).output
    block = output.trace.block("text", "regions").normalize()
    rows = output.features.words[0]
    assert panel.title == TITLE and panel.queries == ("a", "red", "circle", "a", "blue", "square")
    torch.testing.assert_close(panel.attention.weights, block.weights[:, :, :, rows])
    assert panel.keys[:2] == ("box 0", "box 1")


def test_two_captions_have_answers_and_one_has_none(loaded: LoadedModel):
    both = view_model(loaded, ModelInput(TWO, PHOTO))
    chances = (
        predict_answer.run_network(loaded, ModelInput(TWO, PHOTO)).output.prediction[0].softmax(-1)
    )
    names = dict(both.answers)
    assert set(names) == {"both", "first", "second"}
    assert names["second"] == pytest.approx(float(chances[2]), abs=1e-6)
    alone = view_model(loaded, ModelInput(ONE, PHOTO))
    assert alone.answers == () and SINGLE_CAPTION_NOTE in alone.notes


def test_rollout_uses_all_layers(loaded: LoadedModel):
    from overt.attribution import attention_rollout

    [panel] = view_model(loaded, ModelInput(TWO, PHOTO), ViewOptions(method="rollout")).panels
    output = predict_answer.run_network(loaded, ModelInput(TWO, PHOTO)).output
    full = attention_rollout.rollout(output.trace).between("text", "regions").weights
    torch.testing.assert_close(panel.attention.weights, full[:, :, :, output.features.words[0]])


def test_gradients_are_those_of_the_answer_to_two_captions(loaded: LoadedModel):
    found = view_model(loaded, ModelInput(TWO, PHOTO), ViewOptions(method="gradient"))
    text, boxes = found.panels
    assert text.keys == ("a", "red", "circle", "a", "blue", "square") and len(boxes.keys) == 16
    prediction = predict_answer.run_network(loaded, ModelInput(TWO, PHOTO))
    answer = int(prediction.output.prediction[0].argmax())
    mask = torch.ones(1, 16, requires_grad=True)
    kept = {"text": torch.ones(1, prediction.batch.tokens.shape[1]), "regions": mask}
    loaded.model.decide(prediction.features, kept).prediction[0, answer].backward()
    torch.testing.assert_close(boxes.attention.weights.flatten(), mask.grad[0].clamp_min(0))
    with pytest.raises(UserError, match=r"caption.*none"):
        view_model(loaded, ModelInput(ONE, PHOTO), ViewOptions(method="gradient"))


def test_a_removed_box_has_no_attention(loaded: LoadedModel):
    gone = ((0.0, 0.0, 0.25, 0.25),)
    [panel] = view_model(loaded, ModelInput(TWO, PHOTO, removed_boxes=gone)).panels
    weights = panel.attention.weights[0]
    assert float(weights[..., 0].max()) < 1e-6 and float(weights[..., 1].min()) > 0


def test_given_boxes_replace_the_tiles(loaded: LoadedModel):
    drawn = ModelInput(ONE, PHOTO, boxes=((0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)))
    [panel] = view_model(loaded, drawn).panels
    assert panel.keys == ("box 0", "box 1")
    with pytest.raises(UserError, match="no map 'search'"):
        view_model(loaded, drawn, ViewOptions(method="search"))
