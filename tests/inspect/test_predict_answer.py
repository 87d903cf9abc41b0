"""Answers of the package's networks: saved models, panels, removals, and attribution maps."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.errors import UserError
from overt.experiments.inference_spec import InferenceSpec, spec_files
from overt.inspect import predict_answer
from overt.inspect.inputs import ModelInput
from overt.inspect.load_model import load_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import look, view_model
from overt.inspect.panels import ViewOptions
from overt.nn import (
    VQA,
    AttentiveCNN,
    CNNEncoder,
    MeanPooling,
    ShowAskAttend,
    ShowAskAttendSizes,
    SoftAttention,
    TextClassifier,
    VQASizes,
)
from overt.papers.ltpa.vgg import vgg_attention
from overt.viz.panel import grid_spans, span_positions, text_spans

WORDS = tuple("what colour is the small red ball ?".split())
QUESTION = "What colour is the ball?"
PHOTO = np.random.default_rng(1).integers(0, 256, (48, 72, 3), dtype=np.uint8)


def make_vqa(attend=None) -> VQA:
    torch.manual_seed(0)
    sizes = VQASizes(5 + len(WORDS), 3, cell=8, word=6, question=8, hidden=8)
    return VQA(sizes, attend or SoftAttention(sizes.seen, 8, 8, 2)).eval()


def make_loaded(model, words: bool = True, pixels: bool = True) -> LoadedModel:
    known = InferenceSpec(
        type(model).__name__,
        ("red", "green", "blue"),
        WORDS if words else None,
        (32, 32) if pixels else None,
    )
    return LoadedModel("net", model, spec=known)


def test_a_saved_network_gives_the_same_answers(tmp_path: Path):
    one = make_loaded(make_vqa())
    one.model.save_pretrained(tmp_path / "model", spec_files(one.spec))
    again = load_model(tmp_path / "model")
    prediction = predict_answer.run_network(one, ModelInput(QUESTION, PHOTO))
    chances = prediction.output.prediction.softmax(-1)[0]
    given = ModelInput(QUESTION, PHOTO)
    found, _ = predict_answer.top_answers(
        again, predict_answer.run_network(again, given).output, given
    )
    assert [name for name, _ in found] == [
        one.spec.answers[at] for at in chances.argsort(descending=True).tolist()
    ]
    assert sum(chance for _, chance in found) == pytest.approx(1, abs=1e-6)


def test_panels_have_the_attention_of_the_network():
    one = make_loaded(make_vqa())
    shown = view_model(one, ModelInput(QUESTION, PHOTO))
    direct = predict_answer.run_network(one, ModelInput(QUESTION, PHOTO)).output
    assert [panel.title for panel in shown.panels] == [
        "attention over the image",
        "attention over the words",
    ]
    for panel, attention in zip(shown.panels, direct.attention, strict=True):
        assert panel.attention.weights.equal(attention.weights)
    [span] = text_spans(shown.panels[1].attention.keys)
    assert span.geometry.tokens(0)[:2] == ["What", "colour"]
    assert any(note.startswith("It answers ") for note in shown.notes)


def test_unknown_words_are_noted():
    shown = view_model(make_loaded(make_vqa()), ModelInput("What colour is the zeppelin?", PHOTO))
    assert "Not in its vocabulary: zeppelin." in shown.notes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ModelInput(QUESTION), "needs.*image"),
        (ModelInput(None, PHOTO), "needs.*text"),
        (ModelInput("  ...  ".replace(".", " "), PHOTO), "no words"),
    ],
)
def test_missing_inputs_raise(given: ModelInput, message: str):
    with pytest.raises(UserError, match=message):
        view_model(make_loaded(make_vqa()), given)


def test_unsupported_inputs_and_maps_raise():
    reader = make_loaded(TextClassifier(5 + len(WORDS), 3, width=0.05), pixels=False)
    with pytest.raises(UserError, match=r"take.*image"):
        view_model(reader, ModelInput(QUESTION, PHOTO))
    with pytest.raises(UserError, match=r"'rollout'.* search"):
        view_model(reader, ModelInput(QUESTION), ViewOptions(method="rollout"))


def test_removed_words_are_masked_in_the_text_only():
    one = make_loaded(make_vqa())
    start = QUESTION.index("ball")
    prediction = predict_answer.run_network(
        one, ModelInput(QUESTION, PHOTO, removed_ranges=((start, start + 4),))
    )
    assert (
        prediction.mask["text"].tolist() == [[1, 1, 1, 1, 0, 1]] and "image" not in prediction.mask
    )
    wanted = one.model.decide(prediction.features, {"text": prediction.mask["text"]})
    assert prediction.output.prediction.equal(wanted.prediction)


def test_a_box_removes_the_cells_under_it():
    one = make_loaded(make_vqa())
    prediction = predict_answer.run_network(
        one, ModelInput(QUESTION, PHOTO, removed_boxes=((0.0, 0.0, 1.0, 0.5),))
    )
    span = prediction.output.attention[0].keys.find("image")
    rows, columns = span.shape
    keep = prediction.mask["image"].reshape(rows, columns)
    assert keep[: rows // 2].sum() == 0 and keep[rows // 2 :].all()
    plain = predict_answer.run_network(one, ModelInput(QUESTION, PHOTO))
    assert not prediction.output.prediction.equal(plain.output.prediction)


def test_gradient_maps_equal_finite_differences_of_the_mask():
    one = make_loaded(make_vqa())
    prediction = predict_answer.run_network(one, ModelInput(QUESTION, PHOTO))
    found = predict_answer.gradient_maps(one.model, prediction)[
        "the picture, by gradient"
    ].weights.flatten()
    answer = int(prediction.output.prediction.argmax())
    step = 1e-3
    cell = int(found.argmax())
    count = len(found)
    scores = []
    for sign in (1, -1):
        mask = torch.ones(1, count)
        mask[0, cell] += sign * step
        scores.append(one.model.decide(prediction.features, {"image": mask}).prediction[0, answer])
    slow = ((scores[0] - scores[1]) / (2 * step)).detach()
    assert float(found[cell]) == pytest.approx(float(slow), rel=0.05)
    assert (found >= 0).all()


def test_a_search_does_not_lower_the_probability_or_change_weights():
    one = make_loaded(make_vqa())
    prediction = predict_answer.run_network(one, ModelInput(QUESTION, PHOTO))
    before = [p.detach().clone() for p in one.model.parameters()]
    found, notes = predict_answer.search_maps(one.model, prediction)
    assert set(found) == {"the picture, by search", "the words, by search"}
    assert all("raises the answer from" in note for note in notes)
    assert all(a.equal(b) for a, b in zip(before, one.model.parameters(), strict=True))


def test_a_network_without_attention_has_answers_and_gradients():
    one = make_loaded(make_vqa(MeanPooling()))
    shown = view_model(one, ModelInput(QUESTION, PHOTO))
    assert [panel.title for panel in shown.panels] == ["attention over the words"] and shown.answers
    slope = view_model(one, ModelInput(QUESTION, PHOTO), ViewOptions(method="gradient"))
    assert "the picture, by gradient" in [panel.title for panel in slope.panels]


@pytest.mark.parametrize("way", predict_answer.MAPS)
def test_each_kind_of_network_has_each_map(way: str):
    torch.manual_seed(0)
    size = 5 + len(WORDS)
    eye = CNNEncoder([4, 4], [2, 2])
    asker = ShowAskAttend(ShowAskAttendSizes(size, 3, word=4, question=4, hidden=4, joint=4), eye)
    both, text, photo = ModelInput(QUESTION, PHOTO), ModelInput(QUESTION), ModelInput(None, PHOTO)
    for one, given in (
        (make_loaded(asker.eval()), both),
        (make_loaded(TextClassifier(size, 3, width=0.05).eval(), pixels=False), text),
        (make_loaded(AttentiveCNN(3, [4, 4, 4, 4], 4).eval(), words=False), photo),
        (make_loaded(vgg_attention(3, width=0.05).eval(), words=False), photo),
    ):
        shown = view_model(one, given, ViewOptions(method=way))
        assert shown.panels and shown.answers
        for panel in shown.panels:
            assert panel.attention.weights.isfinite().all()
            for span in grid_spans(panel.attention.keys):
                assert len(span_positions(span)) == np.prod(span.shape)


def test_a_view_of_a_run_is_written(tmp_path: Path):
    from PIL import Image

    one = make_loaded(make_vqa())
    one.model.save_pretrained(tmp_path / "model", spec_files(one.spec))
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    out = tmp_path / "view.html"
    shown = look(
        str(tmp_path / "model"), [str(tmp_path / "photo.png"), QUESTION], out, ViewOptions()
    )
    assert out.stat().st_size > 10_000 and len(shown.panels) == 2


def test_an_unknown_network_raises_with_its_name(tmp_path):
    value = {"format": "overt spoken 1", "network": "GPT-9", "answers": []}
    (tmp_path / "spoken.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match="GPT-9"):
        predict_answer.load_network(tmp_path, "mine")
