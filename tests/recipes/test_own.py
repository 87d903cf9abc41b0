"""Networks of ours, asked as people ask: the answers, the maps, and what removing does."""

from pathlib import Path

import numpy as np
import pytest
import torch

from overt.errors import BadInput
from overt.models import (
    VQA,
    AskSizes,
    AttentiveCNN,
    MeanPool,
    ShowAskAttend,
    Sizes,
    SoftAttention,
    TextClassifier,
    TrainedEye,
    vgg_attention,
)
from overt.recipes import own
from overt.recipes.asking import Given
from overt.recipes.looking import look, view
from overt.recipes.opening import Subject, open_model
from overt.recipes.seeing import Wish
from overt.recipes.spoken import Spoken, beside
from overt.show.panel import grids, positions, texts

WORDS = tuple("what colour is the small red ball ?".split())
QUESTION = "What colour is the ball?"
PHOTO = np.random.default_rng(1).integers(0, 256, (48, 72, 3), dtype=np.uint8)


def vqa(attend=None) -> VQA:
    torch.manual_seed(0)
    sizes = Sizes(5 + len(WORDS), 3, cell=8, word=6, question=8, hidden=8)
    return VQA(sizes, attend or SoftAttention(sizes.seen, 8, 8, 2)).eval()


def subject(model, words: bool = True, pixels: bool = True) -> Subject:
    known = Spoken(
        type(model).__name__,
        ("red", "green", "blue"),
        WORDS if words else None,
        (32, 32) if pixels else None,
    )
    return Subject("net", model, spoken=known)


def test_a_saved_network_answers_as_it_did(tmp_path: Path):
    one = subject(vqa())
    one.model.save_pretrained(tmp_path / "model", beside(one.spoken))
    again = open_model(tmp_path / "model")
    seen = own.see(one, Given(QUESTION, PHOTO))
    chances = seen.output.prediction.softmax(-1)[0]
    given = Given(QUESTION, PHOTO)
    found, _ = own.answers(again, own.see(again, given).output, given)
    assert [name for name, _ in found] == [
        one.spoken.answers[at] for at in chances.argsort(descending=True).tolist()
    ]
    assert sum(chance for _, chance in found) == pytest.approx(1, abs=1e-6)


def test_what_is_seen_is_what_the_network_attends_to():
    one = subject(vqa())
    shown = view(one, Given(QUESTION, PHOTO))
    direct = own.see(one, Given(QUESTION, PHOTO)).output
    assert [panel.title for panel in shown.panels] == ["on the picture", "in the words"]
    for panel, attention in zip(shown.panels, direct.attention, strict=True):
        assert panel.attention.weights.equal(attention.weights)
    [span] = texts(shown.panels[1].attention.keys)
    assert span.geometry.tokens(0)[:2] == ["What", "colour"]
    assert any(note.startswith("It answers ") for note in shown.notes)


def test_words_it_never_read_are_named():
    shown = view(subject(vqa()), Given("What colour is the zeppelin?", PHOTO))
    assert "It does not know zeppelin." in shown.notes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Given(QUESTION), "wants a picture"),
        (Given(None, PHOTO), "wants a text"),
        (Given("  ...  ".replace(".", " "), PHOTO), "no words"),
    ],
)
def test_what_is_missing_is_asked_for(given: Given, said: str):
    with pytest.raises(BadInput, match=said):
        view(subject(vqa()), given)


def test_what_it_cannot_take_is_refused():
    reader = subject(TextClassifier(5 + len(WORDS), 3, width=0.05), pixels=False)
    with pytest.raises(BadInput, match="takes no picture"):
        view(reader, Given(QUESTION, PHOTO))
    with pytest.raises(BadInput, match="no map 'rollout'; it has raw, gradient, search"):
        view(reader, Given(QUESTION), Wish(way="rollout"))


def test_removed_words_are_masked_and_padding_of_nothing_else():
    one = subject(vqa())
    start = QUESTION.index("ball")
    seen = own.see(one, Given(QUESTION, PHOTO, unsaid=((start, start + 4),)))
    assert seen.mask["text"].tolist() == [[1, 1, 1, 1, 0, 1]] and "image" not in seen.mask
    wanted = one.model.decide(seen.features, {"text": seen.mask["text"]})
    assert seen.output.prediction.equal(wanted.prediction)


def test_a_box_removes_the_cells_under_it():
    one = subject(vqa())
    seen = own.see(one, Given(QUESTION, PHOTO, without=((0.0, 0.0, 1.0, 0.5),)))
    span = seen.output.attention[0].keys.find("image")
    rows, columns = span.shape
    keep = seen.mask["image"].reshape(rows, columns)
    assert keep[: rows // 2].sum() == 0 and keep[rows // 2 :].all()
    plain = own.see(one, Given(QUESTION, PHOTO))
    assert not seen.output.prediction.equal(plain.output.prediction)


def test_gradients_are_those_of_the_mask():
    one = subject(vqa())
    seen = own.see(one, Given(QUESTION, PHOTO))
    found = own.slopes(one.model, seen)["the picture, by gradient"].weights.flatten()
    answer = int(seen.output.prediction.argmax())
    step = 1e-3
    cell = int(found.argmax())
    count = len(found)
    scores = []
    for sign in (1, -1):
        mask = torch.ones(1, count)
        mask[0, cell] += sign * step
        scores.append(one.model.decide(seen.features, {"image": mask}).prediction[0, answer])
    slow = ((scores[0] - scores[1]) / (2 * step)).detach()
    assert float(found[cell]) == pytest.approx(float(slow), rel=0.05)
    assert (found >= 0).all()


def test_a_search_never_ends_below_where_it_began():
    one = subject(vqa())
    seen = own.see(one, Given(QUESTION, PHOTO))
    before = [p.detach().clone() for p in one.model.parameters()]
    found, notes = own.searched(one.model, seen)
    assert set(found) == {"the picture, by search", "the words, by search"}
    assert all("raises the answer from" in note for note in notes)
    assert all(a.equal(b) for a, b in zip(before, one.model.parameters(), strict=True))


def test_a_network_that_does_not_attend_still_answers_and_has_gradients():
    one = subject(vqa(MeanPool()))
    shown = view(one, Given(QUESTION, PHOTO))
    assert [panel.title for panel in shown.panels] == ["in the words"] and shown.answers
    slope = view(one, Given(QUESTION, PHOTO), Wish(way="gradient"))
    assert "the picture, by gradient" in [panel.title for panel in slope.panels]


@pytest.mark.parametrize("way", own.MAPS)
def test_every_kind_of_network_has_every_map(way: str):
    torch.manual_seed(0)
    size = 5 + len(WORDS)
    eye = TrainedEye([4, 4], [2, 2])
    asker = ShowAskAttend(AskSizes(size, 3, word=4, question=4, hidden=4, joint=4), eye)
    both, text, photo = Given(QUESTION, PHOTO), Given(QUESTION), Given(None, PHOTO)
    for one, given in (
        (subject(asker.eval()), both),
        (subject(TextClassifier(size, 3, width=0.05).eval(), pixels=False), text),
        (subject(AttentiveCNN(3, [4, 4, 4, 4], 4).eval(), words=False), photo),
        (subject(vgg_attention(3, width=0.05).eval(), words=False), photo),
    ):
        shown = view(one, given, Wish(way=way))
        assert shown.panels and shown.answers
        for panel in shown.panels:
            assert panel.attention.weights.isfinite().all()
            for span in grids(panel.attention.keys):
                assert len(positions(span)) == np.prod(span.shape)


def test_a_view_of_a_run_is_written(tmp_path: Path):
    from PIL import Image

    one = subject(vqa())
    one.model.save_pretrained(tmp_path / "model", beside(one.spoken))
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    out = tmp_path / "view.html"
    shown = look(str(tmp_path / "model"), [str(tmp_path / "photo.png"), QUESTION], out, Wish())
    assert out.stat().st_size > 10_000 and len(shown.panels) == 2
