"""Networks of Learn to Pay Attention in `overt look`: maps, classes, and image size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from overt import io
from overt.cli import main
from overt.errors import UserError
from overt.inspect.collate import make_batch
from overt.inspect.inputs import ModelInput
from overt.inspect.load_model import load_model, locate_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import look, view_model
from overt.inspect.ltpa_networks import is_ltpa_config, level_maps, ltpa_classes
from overt.inspect.panels import ViewOptions
from overt.papers.ltpa.config import LtpaModel, LtpaNetwork
from overt.papers.ltpa.model import build_network
from overt.papers.ltpa.resnet import ResNet, ResNetAttention
from overt.papers.ltpa.vgg import VGG, VGGAttention, VGGGap, VGGProgressive
from overt.viz.panel import weight_row

PHOTO = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
KINDS = {
    LtpaNetwork.VGG: VGG,
    LtpaNetwork.GAP: VGGGap,
    LtpaNetwork.PAN: VGGProgressive,
    LtpaNetwork.RESNET: ResNet,
    LtpaNetwork.VGG_ATTENTION: VGGAttention,
    LtpaNetwork.RESNET_ATTENTION: ResNetAttention,
}


def load_saved(folder: Path, kind: LtpaNetwork, pool: int = 2) -> LoadedModel:
    torch.manual_seed(0)
    net: Any = build_network(LtpaModel(kind, width=0.05, blocks=1), 3, pool)
    net.save_pretrained(folder)
    return load_model(folder, "mine")


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_saved_network_loads_as_its_class(tmp_path: Path, kind: LtpaNetwork) -> None:
    loaded = load_saved(tmp_path / "net", kind)
    assert type(loaded.model) is KINDS[kind] and not loaded.model.training
    assert isinstance(loaded.model, ltpa_classes())


@pytest.mark.parametrize(
    "config", [{"model_type": "vit"}, {"sizes": {"vocabulary": 3}}, {"depth": 3}], ids=str
)
def test_configs_of_other_networks_are_rejected(config: dict[str, Any]) -> None:
    assert not is_ltpa_config(config)


def test_one_panel_per_level_and_one_of_the_last_two_joined(tmp_path: Path) -> None:
    loaded = load_saved(tmp_path / "net", LtpaNetwork.VGG_ATTENTION)
    viewed = view_model(loaded, ModelInput(photo=PHOTO))
    titles = ["level 16x16", "level 8x8", "the last two joined"]
    assert [one.title for one in viewed.panels] == titles
    with torch.no_grad():
        output = loaded.model(make_batch(loaded, ModelInput(photo=PHOTO)))
    for shown, choice, one in zip(viewed.panels, viewed.choices, output.attention, strict=False):
        np.testing.assert_allclose(weight_row(shown, choice), one.weights[0, 0, 0, 0], rtol=1e-5)
        assert np.array_equal(shown.photos["image"], PHOTO)
    assert weight_row(viewed.panels[2], viewed.choices[2]).sum() == pytest.approx(1, abs=1e-5)
    assert viewed.notes[-1].startswith("It answers class ")
    for layer in ("level 8x8", "1", "-2"):
        one = view_model(loaded, ModelInput(photo=PHOTO), ViewOptions(layer=layer))
        assert [shown.title for shown in one.panels] == ["level 8x8"]


def test_class_activations_are_those_of_the_predicted_class(tmp_path: Path) -> None:
    loaded = load_saved(tmp_path / "net", LtpaNetwork.GAP)
    batch = make_batch(loaded, ModelInput(photo=PHOTO))
    with torch.no_grad():
        found = level_maps(loaded.model, batch, loaded.model(batch))
    assert list(found) == ["class activations"]
    (shown,) = view_model(loaded, ModelInput(photo=PHOTO)).panels
    assert shown.title == "class activations"


@pytest.mark.parametrize(("pool", "side"), [(2, 32), (5, 80)])
def test_photos_get_the_training_size(tmp_path: Path, pool: int, side: int) -> None:
    loaded = load_saved(tmp_path / "net", LtpaNetwork.VGG_ATTENTION, pool)
    batch = make_batch(loaded, ModelInput(photo=PHOTO))
    assert batch.images is not None and batch.images.shape == (1, 3, side, side)
    assert batch.geometry is not None and batch.geometry.size.tolist() == [[48, 64]]


def test_a_network_without_attention_has_answers_but_no_image(tmp_path: Path) -> None:
    loaded = load_saved(tmp_path / "vgg", LtpaNetwork.VGG)
    viewed = view_model(loaded, ModelInput(photo=PHOTO))
    assert viewed.panels == () and viewed.answers
    photo = tmp_path / "photo.png"
    Image.fromarray(PHOTO).save(photo)
    with pytest.raises(UserError, match="no attention"):
        look(str(tmp_path / "vgg"), [str(photo)], tmp_path / "view.png", ViewOptions())
    look(str(tmp_path / "vgg"), [str(photo)], tmp_path / "view.html", ViewOptions())
    assert "no attention to show" in (tmp_path / "view.html").read_text()


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (ModelInput(text="a dog"), ViewOptions(), "needs.*image"),
        (ModelInput("a dog", PHOTO), ViewOptions(), "not take.*text"),
        (ModelInput(photo=PHOTO), ViewOptions(method="rollout"), "no map 'rollout'"),
        (ModelInput(photo=PHOTO), ViewOptions(layer="level 9x9"), "'level 9x9'"),
    ],
)
def test_unsupported_requests_are_rejected(
    tmp_path: Path, given: ModelInput, options: ViewOptions, message: str
) -> None:
    loaded = load_saved(tmp_path / "net", LtpaNetwork.PAN)
    with pytest.raises(UserError, match=message):
        view_model(loaded, given, options)


def test_a_run_folder_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    load_saved(run / "model", LtpaNetwork.VGG_ATTENTION)
    io.write_json(run / "results.json", {"recipe": "ltpa-cifar10", "about": "small pictures"})
    assert locate_model(str(run)) == run / "model"
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    out = tmp_path / "look.html"
    arguments = ["look", str(run), str(tmp_path / "photo.png"), "--out", str(out)]
    assert main(arguments) == 0, capsys.readouterr()
    page = out.read_text()
    assert "level 16x16" in page and "the last two joined" in page
    assert "From a run of ltpa-cifar10: small pictures." in page
