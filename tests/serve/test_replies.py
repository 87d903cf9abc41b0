import base64
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.errors import BadInput
from overt.recipes import own
from overt.recipes.opening import open_model
from overt.serve.questions import Question
from overt.serve.replies import code, picture, reply
from overt.serve.shelf import Shelf, offer
from tests.recipes import foreign
from tests.serve.conftest import PHOTO, encoded


@pytest.fixture(scope="module")
def shelf(demo: Path) -> Shelf:
    return Shelf(offer([str(demo)]))


def test_a_reply_is_what_the_network_says(shelf: Shelf, ask):
    asked = Question(**ask())
    found = reply(shelf.subject("soft"), "runs/soft", asked)
    seen = own.see(shelf.subject("soft"), asked.given())
    chances = seen.output.prediction[0].softmax(-1)
    assert found["answers"][0]["chance"] == pytest.approx(float(chances.max()), abs=1e-6)
    assert [one["title"] for one in found["view"]["panels"]] == ["on the picture", "in the words"]
    assert found["view"]["photos"][0].startswith("data:image/jpeg")
    assert found["seconds"] >= 0


def test_what_is_removed_changes_the_answer_and_is_told_to_the_page(shelf: Shelf, ask):
    subject = shelf.subject("soft")
    whole = reply(subject, "soft", Question(**ask()))
    left = reply(subject, "soft", Question(**ask(unsaid=[(5, 11)], without=[(0, 0, 1, 0.5)])))
    assert left["answers"] != whole["answers"]
    assert left["view"]["removed"] == {
        "without": [(0, 0, 1, 0.5)], "unsaid": [(5, 11)], "origin": None,
    }  # fmt: skip


def test_a_picture_is_a_picture(shelf: Shelf, ask):
    made = picture(shelf.subject("soft"), Question(**ask()))
    assert made.startswith(b"\x89PNG") and len(made) > 5000


def test_a_network_that_attends_to_nothing_has_no_picture(tmp_path: Path, ask):
    from overt.models import VQA, Blind, Sizes
    from overt.recipes.opening import Subject
    from overt.recipes.spoken import Spoken

    class Mute(VQA):
        def decide(self, features, mask=None):
            from overt.models import Output

            return Output(super().decide(features, mask).prediction)

    net = Mute(Sizes(20, 3, cell=4, word=4, question=4, hidden=4), Blind()).eval()
    subject = Subject("mute", net, spoken=Spoken("VQA", ("a", "b", "c"), ("what",), (32, 32)))
    found = reply(subject, "mute", Question(**ask()))
    assert found["answers"] and found["view"]["panels"] == []
    with pytest.raises(BadInput, match="attends to nothing"):
        picture(subject, Question(**ask()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"map": "gradient"},
        {"map": "search"},
        {"head": 1},
        {"unsaid": [(5, 11)], "without": [(0, 0, 1, 0.5)]},
        {"text": 'what\'s "the" ball.png'},
        {"model": "hard"},
        {"model": "boxes", "text": "the red ball\nwhat colour", "query": "red", "map": "rollout"},
        {"model": "boxes", "boxes": [(0, 0, 0.5, 1), (0.5, 0, 1, 1)]},
        {"model": "captioner", "text": None},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_the_code_that_is_shown_shows_the_same(
    demo: Path, kinds: Path, tmp_path: Path, ask, monkeypatch, changes: dict
):
    asked = Question(**ask(**changes))
    run = (demo if asked.model == "soft" else kinds) / asked.model
    lines = code(str(run), asked)
    assert len(lines.splitlines()) == 5
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    (tmp_path / "shown.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    seen = runpy.run_path("shown.py")["seen"]
    assert "overt look" in (tmp_path / "view.html").read_text()
    found = reply(open_model(run / "model"), asked.model, asked)
    assert len(seen.panels) == len(found["view"]["panels"]) > 0
    for shown, panel, choice in zip(
        found["view"]["panels"], seen.panels, seen.choices, strict=True
    ):
        sent = np.frombuffer(base64.b64decode(shown["weights"]), "<f2")
        made = panel.attention.weights[0].numpy().clip(0, 65504).astype("<f2")
        assert shown["title"] == panel.title and (sent == made.flatten()).all()
        start = shown["start"]
        assert (start["layer"], start["head"], start["query"]) == (
            *(choice.layer, choice.head, choice.query),
        )
    assert [one["name"] for one in found["answers"]] == [name for name, _ in seen.answers]


def test_hard_maps_and_boxes_are_told_to_the_page(kinds: Path, ask):
    shelf = Shelf(offer([str(kinds)]))
    [hard] = reply(shelf.subject("hard"), "x", Question(**ask(model="hard")))["view"]["panels"]
    assert hard["hard"] and "5 of 8 x 8 cells are kept" in hard["about"]
    [boxes] = reply(shelf.subject("boxes"), "x", Question(**ask(model="boxes")))["view"]["panels"]
    [block] = boxes["keys"]["blocks"]
    assert block["kind"] == "boxes" and len(block["boxes"]) == 16 and not boxes["hard"]
    assert block["boxes"][1] == [0.25, 0, 0.5, 0.25] and block["size"] == [60, 40]
    asked = Question(**ask(model="captioner", text=None))
    told = reply(shelf.subject("captioner"), "x", asked)
    [panel] = told["view"]["panels"]
    said = [piece for piece, at in panel["queries"]["blocks"][0]["parts"] if at >= 0]
    assert " ".join(said) == told["answers"][0]["name"]


@pytest.mark.parametrize("model", ["hard", "boxes", "captioner"])
def test_a_picture_of_every_kind_can_be_had(kinds: Path, ask, model: str):
    shelf = Shelf(offer([str(kinds)]))
    asked = Question(**ask(model=model, text=None if model == "captioner" else "the red ball"))
    assert picture(shelf.subject(model), asked).startswith(b"\x89PNG")


def test_a_long_text_is_answered_by_one_query(tmp_path: Path, monkeypatch):
    from overt.serve import questions

    monkeypatch.setattr(questions, "MOST_WEIGHTS", 200)
    folder = foreign.Shelf(tmp_path)["gpt2"]
    shelf = Shelf(offer([str(folder)]))
    text = "the small red ball lies on the grassland"
    [name] = shelf.names
    found = reply(shelf.subject(name), name, Question(model=name, text=text, query="ball"))
    [panel] = found["view"]["panels"]
    assert len(panel["queries"]["names"]) == 1 and "one query" in panel["about"]


@pytest.mark.parametrize(
    ("kind", "text", "sees", "panels", "answer"),
    [
        ("bert", True, False, 1, None),
        ("gpt2", True, False, 1, "next: “"),
        ("vit", False, True, 1, "ring"),
        ("clip", True, True, 2, None),
        ("blip", True, True, 5, "is"),
    ],
)
def test_models_of_other_people_are_asked_alike(tmp_path: Path, kind, text, sees, panels, answer):
    shelf = Shelf(offer([str(foreign.Shelf(tmp_path)[kind])]))
    [name] = shelf.names
    given = {"text": "what is this"} if text else {}
    given |= {"picture": encoded()} if sees else {}
    found = reply(shelf.subject(name), name, Question(model=name, **given))
    assert len(found["view"]["panels"]) == panels
    if answer is None:
        assert found["answers"] == []
    else:
        assert found["answers"][0]["name"].startswith(answer)


def test_captions_for_a_picture_are_answers(tmp_path: Path):
    shelf = Shelf(offer([str(foreign.Shelf(tmp_path)["clip"])]))
    [name] = shelf.names
    asked = Question(model=name, text="a red ball\nthe small dog", picture=encoded())
    found = reply(shelf.subject(name), name, asked)
    assert {one["name"] for one in found["answers"]} == {"a red ball", "the small dog"}
    assert sum(one["chance"] for one in found["answers"]) == pytest.approx(1, abs=1e-5)
    best = found["answers"][0]["name"]
    assert f"It answers {best}" in " ".join(found["notes"])
    [[start, end, begin, stop]] = found["view"]["removed"]["origin"]
    assert asked.text[begin:stop] == best and (start, end) == (0, len(best))
    alone = Question(model=name, text="a red ball", picture=encoded())
    found = reply(shelf.subject(name), name, alone)
    assert found["answers"] == [] and "alike by" in " ".join(found["notes"])


def test_words_and_parts_are_covered_for_a_model_of_other_people(tmp_path: Path):
    folder = foreign.Shelf(tmp_path)["bert"]
    shelf = Shelf(offer([str(folder)]))
    [name] = shelf.names
    text = "the small red ball"
    asked = Question(model=name, text=text, unsaid=[(10, 13)])
    found = reply(shelf.subject(name), name, asked)
    assert any("[MASK]" in note or "gone" in note for note in found["notes"])
