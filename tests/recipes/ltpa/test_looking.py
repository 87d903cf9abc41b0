"""`overt look` at networks of Learn to Pay Attention: what is drawn is what the network gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from overt import files, models
from overt.cli import main
from overt.errors import BadInput
from overt.recipes.asking import Given
from overt.recipes.looking import view
from overt.recipes.ltpa.building import network
from overt.recipes.ltpa.looking import batch_of, is_own, maps_of, own_kinds
from overt.recipes.ltpa.recipe import Model, Net
from overt.recipes.opening import Subject, locate, open_model
from overt.recipes.seeing import Wish
from overt.show.panel import row

PHOTO = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
KINDS = {
    Net.VGG: models.VGG,
    Net.GAP: models.VGGGap,
    Net.PAN: models.VGGProgressive,
    Net.RESNET: models.ResNet,
    Net.VGG_ATTENTION: models.VGGAttention,
    Net.RESNET_ATTENTION: models.ResNetAttention,
}


def saved(folder: Path, kind: Net, pool: int = 2) -> Subject:
    torch.manual_seed(0)
    net: Any = network(Model(kind, width=0.05, blocks=1), 3, pool)
    net.save_pretrained(folder)
    return open_model(folder, "mine")


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_saved_network_opens_as_what_it_is(tmp_path: Path, kind: Net) -> None:
    subject = saved(tmp_path / "net", kind)
    assert type(subject.model) is KINDS[kind] and not subject.model.training
    assert isinstance(subject.model, own_kinds())


def test_other_configs_are_not_ours() -> None:
    assert not is_own({"model_type": "vit"}) and not is_own({"sizes": {"vocabulary": 3}})
    assert not is_own({"depth": 3})


def test_a_panel_a_level_and_the_last_two_joined(tmp_path: Path) -> None:
    subject = saved(tmp_path / "net", Net.VGG_ATTENTION)
    viewed = view(subject, Given(photo=PHOTO))
    titles = ["level 16x16", "level 8x8", "the last two joined"]
    assert [one.title for one in viewed.panels] == titles
    batch = batch_of(subject, PHOTO)
    with torch.no_grad():
        output = subject.model(batch)
    for shown, choice, one in zip(viewed.panels, viewed.choices, output.attention, strict=False):
        np.testing.assert_allclose(row(shown, choice), one.weights[0, 0, 0, 0], rtol=1e-5)
        assert np.array_equal(shown.photos["image"], PHOTO)
    assert row(viewed.panels[2], viewed.choices[2]).sum() == pytest.approx(1, abs=1e-5)
    assert viewed.notes[-1].startswith("It answers class ")
    one = view(subject, Given(photo=PHOTO), Wish(layer="level 8x8"))
    assert [shown.title for shown in one.panels] == ["level 8x8"]


def test_class_activations_are_shown_for_the_class_it_chose(tmp_path: Path) -> None:
    subject = saved(tmp_path / "net", Net.GAP)
    batch = batch_of(subject, PHOTO)
    with torch.no_grad():
        found = maps_of(subject.model, batch, subject.model(batch))
    assert list(found) == ["class activations"]
    (shown,) = view(subject, Given(photo=PHOTO)).panels
    assert shown.title == "class activations"


def test_photos_come_at_the_size_of_training(tmp_path: Path) -> None:
    for pool, side in ((2, 32), (5, 80)):
        subject = saved(tmp_path / str(pool), Net.VGG_ATTENTION, pool)
        batch = batch_of(subject, PHOTO)
        assert batch.images is not None and batch.images.shape == (1, 3, side, side)
        assert batch.geometry is not None and batch.geometry.size.tolist() == [[48, 64]]


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="attends to nothing"):
        view(saved(tmp_path / "vgg", Net.VGG), Given(photo=PHOTO))
    subject = saved(tmp_path / "net", Net.PAN)
    with pytest.raises(BadInput, match="does not read; give it a picture"):
        view(subject, Given(text="a dog"))
    with pytest.raises(BadInput, match="no map 'rollout'"):
        view(subject, Given(photo=PHOTO), Wish(way="rollout"))
    with pytest.raises(BadInput, match="no layer 'level 9x9'"):
        view(subject, Given(photo=PHOTO), Wish(layer="level 9x9"))


def test_a_run_is_looked_at_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    saved(run / "model", Net.VGG_ATTENTION)
    files.write_json(run / "results.json", {"recipe": "ltpa-cifar10", "about": "small pictures"})
    assert locate(str(run)) == run / "model"
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    out = tmp_path / "look.html"
    arguments = ["look", str(run), str(tmp_path / "photo.png"), "--out", str(out)]
    assert main(arguments) == 0, capsys.readouterr()
    page = out.read_text()
    assert "level 16x16" in page and "the last two joined" in page
    assert "From a run of ltpa-cifar10: small pictures." in page
