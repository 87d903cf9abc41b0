"""`overt look` at a folder of attached attention: what is drawn is what the model gives."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ViTImageProcessor

from overt.cli import main
from overt.errors import BadInput, Damaged
from overt.models.attaching.attached import Attached, attach
from overt.recipes import checkup
from overt.recipes.asking import Given
from overt.recipes.attached import open_attached, view_attached
from overt.recipes.looking import look, view
from overt.recipes.opening import Subject, is_model, open_model
from overt.recipes.seeing import Wish
from overt.show.panel import cells, geometry, grids, row
from tests.models.hosts import Plain, host
from tests.models.tiny import Bytes
from tests.recipes import foreign

PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    net = attach(host("convnext"), classes=4, processor=processor)
    net.save_pretrained(tmp_path_factory.mktemp("attached") / "net")
    return tmp_path_factory.getbasetemp() / "attached0" / "net"


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return open_model(folder)


def test_the_folder_is_a_model_and_opens_as_one(folder: Path, subject: Subject) -> None:
    assert is_model(str(folder))
    assert isinstance(subject.model, Attached) and not subject.model.training
    assert subject.image_processor is not None and subject.name == str(folder)


def test_a_panel_a_level_with_the_weights_of_the_model(subject: Subject) -> None:
    viewed = view(subject, Given(photo=PHOTO))
    pixels = subject.image_processor(images=PHOTO, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = subject.model(pixel_values=pixels)
    assert [one.title for one in viewed.panels] == [
        f"encoder.stages.{at}: attached attention" for at in range(3)
    ]
    for shown, choice, one in zip(viewed.panels, viewed.choices, output.attention, strict=True):
        np.testing.assert_allclose(row(shown, choice), one.weights[0, 0, 0, 0], rtol=1e-6)
        (span,) = grids(shown.attention.keys)
        assert cells(span, row(shown, choice)).shape == span.shape
        assert np.array_equal(shown.photos["image"], PHOTO)
        place = geometry(span)
        assert place is not None and place.size.tolist() == [[60, 90]]
    best = int(output.prediction.argmax())
    assert viewed.notes[-1].startswith(f"It answers class {best} (")
    assert "(Attached) looks" in viewed.title


def test_the_boxes_of_the_cells_are_of_the_photo(subject: Subject) -> None:
    panels, _, _, _ = view_attached(subject, Given(photo=PHOTO), Wish())
    (span,) = grids(panels[1].attention.keys)
    place = geometry(span)
    assert place is not None
    assert place.cells((4, 4))[0, 5].tolist() == pytest.approx([22.5, 15, 45, 30])


@pytest.mark.parametrize("layer", ["1", "-2", "encoder.stages.1"])
def test_one_level_alone(subject: Subject, layer: str) -> None:
    panels, _, _, _ = view_attached(subject, Given(photo=PHOTO), Wish(layer=layer))
    assert [one.layers for one in panels] == [("encoder.stages.1",)]


@pytest.mark.parametrize(
    ("given", "wish", "said"),
    [
        (Given("a dog"), Wish(), "does not read; give it a picture"),
        (Given("a dog", PHOTO), Wish(), "does not read; give it a picture"),
        (Given(photo=PHOTO), Wish(way="rollout"), "has no map 'rollout'"),
        (Given(photo=PHOTO), Wish(layer="9"), "no layer '9'; its levels are 0 to 2, or by name"),
        (Given(photo=PHOTO), Wish(head=3), "has heads 0 to 0, not 3"),
    ],
)
def test_what_it_cannot_show_is_said(subject: Subject, given: Given, wish: Wish, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        view(subject, given, wish)


def test_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    photo = foreign.photo(tmp_path / "photo.png")
    for out in ("look.html", "look.png"):
        assert main(["look", str(folder), str(photo), "--out", str(tmp_path / out)]) == 0
        assert (tmp_path / out).stat().st_size > 1000
    assert "encoder.stages.2" in (tmp_path / "look.html").read_text()


def test_a_model_without_a_processor_stretches_the_photo(tmp_path: Path) -> None:
    net = attach(host("vit"), classes=3, processor=Bytes())
    net.save_pretrained(tmp_path / "net")
    subject = open_attached(tmp_path / "net", "net")
    assert subject.transform is not None
    panels, _, _, _ = view_attached(subject, Given(photo=PHOTO), Wish())
    (span,) = grids(panels[0].attention.keys)
    place = geometry(span)
    assert place is not None
    assert place.cells((4, 4))[0, 5].tolist() == pytest.approx([22.5, 15, 45, 30], abs=1e-3)


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    attach(host("vit"), classes=3).save_pretrained(tmp_path / "bare")
    with pytest.raises(BadInput, match="nothing in the folder says how"):
        open_model(tmp_path / "bare")
    attach(Plain(), classes=3, levels=("two",)).save_pretrained(tmp_path / "own")
    with pytest.raises(BadInput, match="only you can build"):
        open_model(tmp_path / "own")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(json.dumps({**config, "classes": 5}))
    with pytest.raises(Damaged):
        open_model(tmp_path / "bare")


def test_the_doctor_sends_it_to_look(folder: Path) -> None:
    with pytest.raises(BadInput, match="needs no watching: `overt look` it"):
        checkup.model(str(folder))


def test_look_writes_a_view(folder: Path, tmp_path: Path) -> None:
    photo = foreign.photo(tmp_path / "photo.png")
    viewed = look(str(folder), [str(photo)], tmp_path / "view.svg", Wish(layer="0"))
    assert len(viewed.panels) == 1 and (tmp_path / "view.svg").exists()
