"""`overt look` at a model with attached attention: its maps equal those of the model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ViTImageProcessor

from overt.cli import main
from overt.errors import CorruptFileError, UserError
from overt.inspect import model_check
from overt.inspect.attached_view import load_attached, view_attached
from overt.inspect.inputs import ModelInput
from overt.inspect.load_model import is_model, load_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import look, view_model
from overt.inspect.panels import ViewOptions
from overt.nn.backbone_attention.attached_model import AttachedAttention, attach
from overt.viz.panel import grid_spans, grid_weights, pixel_geometry, weight_row
from tests.experiments import foreign
from tests.nn.hosts import Plain, host
from tests.nn.tiny import TinyProcessor

PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    net = attach(host("convnext"), classes=4, processor=processor)
    net.save_pretrained(tmp_path_factory.mktemp("attached") / "net")
    return tmp_path_factory.getbasetemp() / "attached0" / "net"


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


def test_the_folder_is_a_model_and_loads_as_one(folder: Path, loaded: LoadedModel) -> None:
    assert is_model(str(folder))
    assert isinstance(loaded.model, AttachedAttention) and not loaded.model.training
    assert loaded.image_processor is not None and loaded.name == str(folder)


def test_panels_have_the_weights_of_the_model(loaded: LoadedModel) -> None:
    viewed = view_model(loaded, ModelInput(photo=PHOTO))
    pixels = loaded.image_processor(images=PHOTO, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = loaded.model(pixel_values=pixels)
    assert [one.title for one in viewed.panels] == [
        f"encoder.stages.{at}: attached attention" for at in range(3)
    ]
    for shown, choice, one in zip(viewed.panels, viewed.choices, output.attention, strict=True):
        np.testing.assert_allclose(weight_row(shown, choice), one.weights[0, 0, 0, 0], rtol=1e-6)
        (span,) = grid_spans(shown.attention.keys)
        assert grid_weights(span, weight_row(shown, choice)).shape == span.shape
        assert np.array_equal(shown.photos["image"], PHOTO)
        place = pixel_geometry(span)
        assert place is not None and place.size.tolist() == [[60, 90]]
    best = int(output.prediction.argmax())
    assert viewed.notes[-1].startswith(f"It answers class {best} (")
    assert "(AttachedAttention) looks" in viewed.title


def test_cells_are_boxes_of_the_photo(loaded: LoadedModel) -> None:
    panels, _, _, _ = view_attached(loaded, ModelInput(photo=PHOTO), ViewOptions())
    (span,) = grid_spans(panels[1].attention.keys)
    place = pixel_geometry(span)
    assert place is not None
    assert place.cells((4, 4))[0, 5].tolist() == pytest.approx([22.5, 15, 45, 30])


@pytest.mark.parametrize("layer", ["1", "-2", "encoder.stages.1"])
def test_a_level_is_selected_by_number_or_name(loaded: LoadedModel, layer: str) -> None:
    panels, _, _, _ = view_attached(loaded, ModelInput(photo=PHOTO), ViewOptions(layer=layer))
    assert [one.title for one in panels] == ["encoder.stages.1: attached attention"]
    assert panels[0].about == "Level 1 of 3, 4 x 4 cells."


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (ModelInput("a dog"), ViewOptions(), "images, not text"),
        (ModelInput("a dog", PHOTO), ViewOptions(), "images, not text"),
        (ModelInput(photo=PHOTO), ViewOptions(method="rollout"), "no map 'rollout'"),
        (ModelInput(photo=PHOTO), ViewOptions(layer="9"), "'9'.* 0 to 2"),
        (ModelInput(photo=PHOTO), ViewOptions(head=3), "heads 0 to 0, got 3"),
    ],
)
def test_unsupported_requests_are_rejected(
    loaded: LoadedModel, given: ModelInput, options: ViewOptions, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        view_model(loaded, given, options)


def test_look_works_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    photo = foreign.photo(tmp_path / "photo.png")
    for out in ("look.html", "look.png"):
        assert main(["look", str(folder), str(photo), "--out", str(tmp_path / out)]) == 0
        assert (tmp_path / out).stat().st_size > 1000
    assert "encoder.stages.2" in (tmp_path / "look.html").read_text()


def test_a_model_without_a_processor_stretches_the_photo(tmp_path: Path) -> None:
    net = attach(host("vit"), classes=3, processor=TinyProcessor())
    net.save_pretrained(tmp_path / "net")
    loaded = load_attached(tmp_path / "net", "net")
    assert loaded.transform is not None
    panels, _, _, _ = view_attached(loaded, ModelInput(photo=PHOTO), ViewOptions())
    (span,) = grid_spans(panels[0].attention.keys)
    place = pixel_geometry(span)
    assert place is not None
    assert place.cells((4, 4))[0, 5].tolist() == pytest.approx([22.5, 15, 45, 30], abs=1e-3)


def test_folders_that_cannot_be_loaded_are_rejected(tmp_path: Path) -> None:
    attach(host("vit"), classes=3).save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="image preprocessing"):
        load_model(tmp_path / "bare")
    attach(Plain(), classes=3, levels=("two",)).save_pretrained(tmp_path / "own")
    with pytest.raises(UserError, match="from_pretrained"):
        load_model(tmp_path / "own")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps({**config, "classes": 5}))
    with pytest.raises(CorruptFileError):
        load_model(tmp_path / "bare")


def test_doctor_refers_to_look(folder: Path) -> None:
    with pytest.raises(UserError, match="needs no capture"):
        model_check.check_model(str(folder))


def test_look_writes_a_view(folder: Path, tmp_path: Path) -> None:
    photo = foreign.photo(tmp_path / "photo.png")
    viewed = look(str(folder), [str(photo)], tmp_path / "view.svg", ViewOptions(layer="0"))
    assert len(viewed.panels) == 1 and (tmp_path / "view.svg").exists()
