"""Responses of the server: answers, panels, removals, images, and the Python code."""

import base64
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from overt.errors import UserError
from overt.inspect import predict_answer
from overt.inspect.load_model import load_model
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.inspect.server.request_schema import InspectRequest
from overt.inspect.server.responses import build_response, python_code, view_png
from tests.experiments import foreign
from tests.inspect.server.conftest import PHOTO, encode_png


@pytest.fixture(scope="module")
def cache(demo: Path) -> ModelCache:
    return ModelCache(find_models([str(demo)]))


def test_a_response_has_the_answers_of_the_network(cache: ModelCache, ask):
    request = InspectRequest(**ask())
    found = build_response(cache.load("soft"), "runs/soft", request)
    expected = predict_answer.run_network(cache.load("soft"), request.model_input())
    chances = expected.output.prediction[0].softmax(-1)
    assert found["answers"][0]["chance"] == pytest.approx(float(chances.max()), abs=1e-6)
    assert [one["title"] for one in found["view"]["panels"]] == [
        "attention over the image",
        "attention over the words",
    ]
    assert found["view"]["photos"][0].startswith("data:image/jpeg")
    assert found["seconds"] >= 0


def test_removals_change_the_answer_and_are_in_the_response(cache: ModelCache, ask):
    loaded = cache.load("soft")
    full = build_response(loaded, "soft", InspectRequest(**ask()))
    reduced = build_response(
        loaded, "soft", InspectRequest(**ask(unsaid=[(5, 11)], without=[(0, 0, 1, 0.5)]))
    )
    assert reduced["answers"] != full["answers"]
    assert reduced["view"]["removed"] == {
        "without": [(0, 0, 1, 0.5)], "unsaid": [(5, 11)], "origin": None,
    }  # fmt: skip


def test_view_png_returns_a_png(cache: ModelCache, ask):
    png = view_png(cache.load("soft"), InspectRequest(**ask()))
    assert png.startswith(b"\x89PNG") and len(png) > 5000


def test_a_network_without_attention_has_no_image(tmp_path: Path, ask):
    from overt.experiments.inference_spec import InferenceSpec
    from overt.inspect.loaded_model import LoadedModel
    from overt.nn import VQA, QuestionOnly, VQASizes

    class NoAttentionVQA(VQA):
        def decide(self, features, mask=None):
            from overt.nn import Output

            return Output(super().decide(features, mask).prediction)

    net = NoAttentionVQA(
        VQASizes(20, 3, cell=4, word=4, question=4, hidden=4), QuestionOnly()
    ).eval()
    loaded = LoadedModel(
        "mute", net, spec=InferenceSpec("VQA", ("a", "b", "c"), ("what",), (32, 32))
    )
    found = build_response(loaded, "mute", InspectRequest(**ask()))
    assert found["answers"] and found["view"]["panels"] == []
    with pytest.raises(UserError, match="no attention"):
        view_png(loaded, InspectRequest(**ask()))


@pytest.mark.long
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
def test_the_python_code_gives_the_same_view(
    demo: Path, kinds: Path, tmp_path: Path, ask, monkeypatch, changes: dict
):
    request = InspectRequest(**ask(**changes))
    run = (demo if request.model == "soft" else kinds) / request.model
    lines = python_code(str(run), request)
    assert len(lines.splitlines()) == 5
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    (tmp_path / "shown.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    view = runpy.run_path("shown.py")["view"]
    assert "overt look" in (tmp_path / "view.html").read_text()
    found = build_response(load_model(run / "model"), request.model, request)
    assert len(view.panels) == len(found["view"]["panels"]) > 0
    for shown, panel, choice in zip(
        found["view"]["panels"], view.panels, view.choices, strict=True
    ):
        sent = np.frombuffer(base64.b64decode(shown["weights"]), "<f2")
        made = panel.attention.weights[0].numpy().clip(0, 65504).astype("<f2")
        assert shown["title"] == panel.title and (sent == made.flatten()).all()
        start = shown["start"]
        assert (start["layer"], start["head"], start["query"]) == (
            *(choice.layer, choice.head, choice.query),
        )
    assert [one["name"] for one in found["answers"]] == [name for name, _ in view.answers]


def test_responses_mark_hard_maps_and_boxes(kinds: Path, ask):
    cache = ModelCache(find_models([str(kinds)]))
    [hard] = build_response(cache.load("hard"), "x", InspectRequest(**ask(model="hard")))["view"][
        "panels"
    ]
    assert hard["hard"] and "5 of 8 x 8 cells are kept" in hard["about"]
    [boxes] = build_response(cache.load("boxes"), "x", InspectRequest(**ask(model="boxes")))[
        "view"
    ]["panels"]
    [block] = boxes["keys"]["blocks"]
    assert block["kind"] == "boxes" and len(block["boxes"]) == 16 and not boxes["hard"]
    assert block["boxes"][1] == [0.25, 0, 0.5, 0.25] and block["size"] == [60, 40]
    request = InspectRequest(**ask(model="captioner", text=None))
    response = build_response(cache.load("captioner"), "x", request)
    [panel] = response["view"]["panels"]
    words = [piece for piece, at in panel["queries"]["blocks"][0]["parts"] if at >= 0]
    assert " ".join(words) == response["answers"][0]["name"]


@pytest.mark.parametrize("model", ["hard", "boxes", "captioner"])
def test_view_png_works_for_each_kind_of_model(kinds: Path, ask, model: str):
    cache = ModelCache(find_models([str(kinds)]))
    request = InspectRequest(
        **ask(model=model, text=None if model == "captioner" else "the red ball")
    )
    assert view_png(cache.load(model), request).startswith(b"\x89PNG")


def test_a_long_text_is_shown_for_one_query(tmp_path: Path, monkeypatch):
    from overt.inspect.server import request_schema

    monkeypatch.setattr(request_schema, "MAX_WEIGHTS", 200)
    folder = foreign.Shelf(tmp_path)["gpt2"]
    cache = ModelCache(find_models([str(folder)]))
    text = "the small red ball lies on the grassland"
    [name] = cache.names
    found = build_response(
        cache.load(name), name, InspectRequest(model=name, text=text, query="ball")
    )
    [panel] = found["view"]["panels"]
    assert len(panel["queries"]["names"]) == 1 and "one query" in panel["about"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "text", "image", "panels", "answer"),
    [
        ("bert", True, False, 1, None),
        ("gpt2", True, False, 1, "next: “"),
        ("vit", False, True, 1, "ring"),
        ("clip", True, True, 2, None),
        ("blip", True, True, 5, "is"),
    ],
)
def test_hub_models_get_responses(tmp_path: Path, kind, text, image, panels, answer):
    cache = ModelCache(find_models([str(foreign.Shelf(tmp_path)[kind])]))
    [name] = cache.names
    given = {"text": "what is this"} if text else {}
    given |= {"picture": encode_png()} if image else {}
    found = build_response(cache.load(name), name, InspectRequest(model=name, **given))
    assert len(found["view"]["panels"]) == panels
    if answer is None:
        assert found["answers"] == []
    else:
        assert found["answers"][0]["name"].startswith(answer)


def test_captions_for_an_image_are_answers(tmp_path: Path):
    cache = ModelCache(find_models([str(foreign.Shelf(tmp_path)["clip"])]))
    [name] = cache.names
    request = InspectRequest(model=name, text="a red ball\nthe small dog", picture=encode_png())
    found = build_response(cache.load(name), name, request)
    assert {one["name"] for one in found["answers"]} == {"a red ball", "the small dog"}
    assert sum(one["chance"] for one in found["answers"]) == pytest.approx(1, abs=1e-5)
    best = found["answers"][0]["name"]
    assert f"It answers {best}" in " ".join(found["notes"])
    [[start, end, begin, stop]] = found["view"]["removed"]["origin"]
    assert request.text[begin:stop] == best and (start, end) == (0, len(best))
    alone = InspectRequest(model=name, text="a red ball", picture=encode_png())
    found = build_response(cache.load(name), name, alone)
    assert found["answers"] == [] and "Cosine similarity" in " ".join(found["notes"])


def test_removed_words_are_masked_or_deleted_for_hub_models(tmp_path: Path):
    folder = foreign.Shelf(tmp_path)["bert"]
    cache = ModelCache(find_models([str(folder)]))
    [name] = cache.names
    text = "the small red ball"
    request = InspectRequest(model=name, text=text, unsaid=[(10, 13)])
    found = build_response(cache.load(name), name, request)
    assert any("[MASK]" in note or "deleted" in note for note in found["notes"])


ODD = ("²", "--5", "-", "9" * 300, "0x1", "\x1b[31m")  # digits that are not integers, and others


@pytest.mark.long
@pytest.mark.parametrize("name", ["soft", "bert", "gpt2"])
def test_an_invalid_layer_or_query_raises_a_user_error(demo: Path, tmp_path: Path, name):
    place = demo / name if name == "soft" else foreign.Shelf(tmp_path)[name]
    cache = ModelCache(find_models([str(place)]))
    [model] = cache.names
    given = {"picture": encode_png()} if name == "soft" else {}
    for field in ("layer", "query"):
        for value in ODD:
            request = InspectRequest(
                model=model, text="what colour is the ball", **given, **{field: value}
            )
            with pytest.raises(UserError, match=r"has no|0 to"):
                build_response(cache.load(model), model, request)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "clip"])
@pytest.mark.parametrize("text", ["\x00", "\u202e", " \u200b ", "\ufeff"])
def test_a_text_without_tokens_raises_a_user_error(tmp_path: Path, name: str, text: str):
    cache = ModelCache(find_models([str(foreign.Shelf(tmp_path)[name])]))
    [model] = cache.names
    given = {"picture": encode_png()} if name == "clip" else {}
    with pytest.raises(UserError, match="no token"):
        build_response(cache.load(model), model, InspectRequest(model=model, text=text, **given))
