"""Attention on backbones of others: the contract, the pixels, the backbone left as it was."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overt import files, measure
from overt.data import Batch
from overt.errors import BadInput, Damaged
from overt.geometry import PixelGeometry
from overt.models import additive, concat, dot, indep, parametrised, uniform
from overt.models.attaching.attached import Attached, attach
from overt.models.attaching.backbones import run_backbone
from overt.models.attaching.levels import Level, Order
from overt.models.paying.attention import Additive, shape_of
from overt.supervise import Loss
from overt.testing import check_model, toy_batch
from overt.train import Limits, ParameterSet, fit
from tests.models.hosts import HOSTS, Plain, host
from tests.models.tiny import Bytes

PLAIN = ("one", "two")
# What comes after the last level, or is used in other tasks, has no part in the answer.
UNREACHED = ("classifier", "layernorm", "embeddings.mask_token", "encoder.stages.3")


def attached(name: str, **more: Any) -> Attached:
    """Attention on a tiny backbone, the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return attach(host(name), classes=3, processor=Bytes(), **more)


def plain(**more: Any) -> Attached:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return attach(Plain(), classes=3, levels=PLAIN, processor=Bytes(), **more)


def grids(net: Attached, batch: Any) -> list[tuple[int, int]]:
    return [shape_of(one.keys) for one in net(batch).attention]


# --- the contract


@pytest.mark.parametrize("name", HOSTS)
def test_it_keeps_the_contract(name: str) -> None:
    unreached = [f"backbone.{part}" for part in UNREACHED]
    check_model(lambda: attached(name), toy_batch(), unreached, tolerance=1e-4)


@pytest.mark.parametrize("name", ["resnet", "dino"])
def test_frozen_it_keeps_the_contract_too(name: str) -> None:
    check_model(lambda: attached(name).freeze(), toy_batch(), tolerance=1e-4)


@pytest.mark.parametrize("score", [parametrised, dot, uniform])
def test_it_takes_every_score_and_decision(score: Callable[[int], nn.Module]) -> None:
    net = plain(score=score, decision=indep).freeze()
    # the parametrised score does not depend on the query, which then learns nothing
    unreached = ("query", "classify.project") if score is parametrised else ()
    check_model(lambda: copy.deepcopy(net), toy_batch(), unreached, tolerance=1e-4)
    assert (net.query is None) is (score is uniform), "a query that nobody asks for"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet", [(4, 4), (2, 2), (1, 1)]),
        ("pyramid", [(8, 8), (4, 4), (2, 2)]),
        ("swin", [(8, 8), (4, 4)]),
        ("vit", [(4, 4)] * 3),
        ("last", [(8, 8), (4, 4), (2, 2)]),
    ],
)
def test_one_map_a_level_the_finest_first(name: str, expected: list[tuple[int, int]]) -> None:
    assert grids(attached(name).eval(), toy_batch()) == expected


def test_levels_by_name_in_two_lines() -> None:
    net = attach(host("convnext"), levels=("encoder.stages.1", "encoder.stages.0"), classes=10)
    output = net.eval()(pixel_values=torch.randn(2, 3, 32, 32))
    assert output.prediction.shape == (2, 10)
    assert [shape_of(one.keys) for one in output.attention] == [(4, 4), (8, 8)]


# --- what is read is what the backbone computes


@pytest.mark.parametrize("name", ["resnet", "swin", "vit", "dino", "pyramid"])
def test_cells_are_the_hidden_states_of_the_backbone(name: str) -> None:
    """Hugging Face returns them itself, when it is asked to."""
    backbone, pixels = host(name).eval(), torch.randn(2, 3, 32, 32)
    net = attach(backbone, classes=3).eval()
    if name == "pyramid":
        expected = backbone(pixel_values=pixels).feature_maps
    elif name == "swin":
        states = backbone(pixel_values=pixels, output_hidden_states=True).reshaped_hidden_states
        expected = [states[1], states[3]]
    else:
        states = backbone(pixel_values=pixels, output_hidden_states=True).hidden_states
        expected = {"resnet": states[2:5], "vit": states[1:4]}.get(name, states[1:])
    found = net.look_through(pixels)
    if name == "dino":
        expected = [expected[at] for at in (0, 1, 3)]
    for one, state in zip(found, expected, strict=True):
        if state.ndim == 3:
            assert one.token is not None and torch.equal(one.token, state[:, 0])
            state = state[:, -16:].transpose(1, 2).unflatten(2, (4, 4))
        torch.testing.assert_close(one.cells, state)


def test_the_class_token_asks_and_else_the_mean_of_the_cells() -> None:
    for name in ("vit", "resnet"):
        net = attached(name).eval()
        images = torch.randn(2, 3, 32, 32)
        last = net.look_through(images)[-1]
        whole = last.cells.mean(dim=(2, 3)) if name == "resnet" else last.token
        query = net.encode({"pixel_values": images}).query
        assert net.query is not None and whole is not None
        torch.testing.assert_close(query, net.query.linear(net.query.norm(whole)))


def test_samples_that_share_an_image_share_its_cells() -> None:
    net, batch = attached("vit").eval(), toy_batch()
    features = net.encode(batch)
    assert batch.image_of is not None and batch.image_of.tolist() == [0, 1, 2, 2]
    for one in features.cells:
        assert len(one.values) == 4 and torch.equal(one.values[2], one.values[3])


def test_bytes_are_as_the_processor_wants_them() -> None:
    net, batch = plain().eval(), toy_batch()
    mean, spread = (torch.tensor(one)[:, None, None] for one in (Bytes.image_mean, Bytes.image_std))
    numbers = replace(batch, images=(batch.images / 255 - mean) / spread)
    torch.testing.assert_close(net(batch).prediction, net(numbers).prediction)
    with pytest.raises(ValueError, match="are bytes, and nothing says how"):
        attach(Plain(), classes=3, levels=PLAIN)(batch)


def test_a_backbone_in_sixteen_bits() -> None:
    net = attach(Plain().bfloat16(), classes=3, levels=PLAIN).eval()
    output = net(pixel_values=torch.randn(2, 3, 32, 32))
    assert output.prediction.dtype is torch.float32 and output.prediction.isfinite().all()


def test_a_function_that_runs_it() -> None:
    def twice(backbone: nn.Module, pixels: torch.Tensor) -> Any:
        return backbone(2 * pixels)

    net, pixels = plain(run=twice).eval(), torch.randn(2, 3, 32, 32)
    other = plain().eval()
    expected = other(pixel_values=2 * pixels).prediction
    assert torch.equal(net(pixel_values=pixels).prediction, expected)


def test_what_the_next_module_changes_in_place_is_read_as_it_then_is() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 1))
    net = attach(backbone, classes=3, levels=("0", "2"))
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.equal(net.look_through(pixels)[0].cells, backbone[:2](pixels))
    net(pixel_values=pixels).prediction.sum().backward()
    assert backbone[0].weight.grad is not None


@pytest.mark.parametrize("batch", [torch.zeros(2, 3, 8, 8), {"images": 3}, Batch(("a",))])
def test_a_batch_without_images_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="images"):
        plain()(batch)


def test_no_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="a level at least"):
        attach(Plain(), classes=3, levels=())


# --- back to the pixels


@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 56), (48, 32)])
@pytest.mark.parametrize("name", ["resnet", "convnext", "swin", "vit", "dino", "last"])
def test_any_size_at_test_time(name: str, height: int, width: int) -> None:
    if name == "last" and (height % 16 or width % 16):
        height, width = 48, 64  # it merges two by two, without padding
    net = attached(name).eval()
    batch = Batch(
        ("a", "b"),
        images=torch.randn(2, 3, height, width),
        geometry=PixelGeometry.identity(2, (height, width)),
    )
    for level, one in zip(net.levels, net(batch).attention, strict=True):
        rows, columns = shape_of(one.keys)
        assert one.values.shape == (2, 1, 1, 1, rows * columns)
        span = one.keys.find("image")
        assert isinstance(span.geometry, PixelGeometry) and level.stride is not None
        boxes = span.geometry.cells(span.shape)[0].reshape(rows, columns, 4)
        for row in range(rows):
            for column in range(columns):
                (down, across) = level.stride
                x0, y0 = column * across, row * down
                wanted = [x0, y0, min(x0 + across, width), min(y0 + down, height)]
                assert boxes[row, column].tolist() == wanted


def test_photos_and_a_processor_lead_back_to_the_photo() -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    net = attach(host("vit"), classes=3, processor=processor).eval()
    photos = [torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8).numpy() for _ in range(2)]
    inputs = dict(processor(images=photos, return_tensors="pt"))
    one = net({**inputs, "images": photos}).attention[0]
    geometry = one.keys.find("image").geometry
    assert isinstance(geometry, PixelGeometry)
    assert geometry.cells((4, 4))[1, 5].tolist() == pytest.approx([24, 16, 48, 32])
    assert net(inputs).attention[0].keys.find("image").geometry is None
    with pytest.raises(ValueError, match="without the processor"):
        attach(host("vit"), classes=3)({**inputs, "images": photos})


# --- frozen, trained, given back


def test_a_frozen_backbone_keeps_weights_and_statistics_and_drops_nothing() -> None:
    net = plain(dropout=0.0).freeze().train()
    kept = {name: value.clone() for name, value in net.backbone.state_dict().items()}
    first = net.look_through(toy_batch().images)
    again = net.look_through(toy_batch().images)
    assert torch.equal(first[1].cells, again[1].cells), "dropout is off"
    assert all(module.training for module in net.modules()), "and the mode is as it was set"
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    net(toy_batch()).prediction.square().sum().backward()
    optimizer.step()
    for name, value in net.backbone.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert not any(value.requires_grad for value in net.backbone.parameters())


def test_a_gradient_still_reaches_the_pixels_of_a_frozen_backbone() -> None:
    net = plain().freeze().eval()
    pixels = torch.randn(2, 3, 32, 32, requires_grad=True)
    net(pixel_values=pixels).prediction.sum().backward()
    assert pixels.grad is not None and bool(pixels.grad.any())


def test_thawed_it_trains_what_was_trained_before() -> None:
    backbone = Plain()
    backbone.one.requires_grad_(False)
    net = attach(backbone, classes=3, levels=PLAIN).freeze().thaw()
    assert [value.requires_grad for value in backbone.parameters()] == [False] * 4 + [True] * 4
    net(pixel_values=torch.randn(4, 3, 32, 32)).prediction.sum().backward()
    assert backbone.two[0].weight.grad is not None and backbone.one[0].weight.grad is None


def test_detached_the_backbone_is_as_it_was_found() -> None:
    backbone = Plain().train()
    backbone.two.eval()
    backbone.head.requires_grad_(False)
    modes = [one.training for one in backbone.modules()]
    wanted = [one.requires_grad for one in backbone.parameters()]
    weights = {name: value.clone() for name, value in backbone.state_dict().items()}
    fields = [set(vars(one)) for one in backbone.modules()]
    net = attach(backbone, classes=3, levels=PLAIN).freeze()
    net.eval()(pixel_values=torch.randn(4, 3, 32, 32))
    assert net.detach() is backbone
    assert [one.training for one in backbone.modules()] == modes
    assert [one.requires_grad for one in backbone.parameters()] == wanted
    assert [set(vars(one)) for one in backbone.modules()] == fields
    assert not any(one._forward_hooks for one in backbone.modules())
    assert all(torch.equal(weights[key], value) for key, value in backbone.state_dict().items())


def test_gradients_are_the_same_under_activation_checkpointing() -> None:
    nets = [attached("vit", dropout=0.0).train() for _ in range(2)]
    nets[1].backbone.gradient_checkpointing_enable()  # type: ignore[operator]
    for net in nets:
        net(toy_batch()).prediction.square().sum().backward()
    for (name, one), two in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, msg=name)


class Corners:
    """Pictures with one bright cell, left or right: the class."""

    def __init__(self, count: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 60, (count, 3, 32, 32), generator=generator).byte()
        self.labels = torch.randint(0, 2, (count,), generator=generator)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            image[:, 8:16, 16 * label + 4 : 16 * label + 12] = 250

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Any) -> Batch:
        rows = torch.tensor(list(indices))
        ids = tuple(str(at) for at in indices)
        return Batch(ids, images=self.images[rows], labels=self.labels[rows])


def falling(net: Attached, data: Any, out: Path, epochs: int) -> list[float]:
    """The loss as it is logged while the attention is trained."""

    def step(model: Any, batch: Batch, progress: Any) -> dict[str, dict[str, Loss]]:
        logits = model(batch).prediction
        each = nn.functional.cross_entropy(logits, batch.labels, reduction="none")
        return {"model": {"task": Loss(each.sum(), torch.tensor(len(batch)))}}

    trained = [value for value in net.parameters() if value.requires_grad]
    sets = {"model": ParameterSet(torch.optim.AdamW(trained, lr=1e-2))}
    limits = Limits(epochs=epochs, batch=16, log_every=1)
    fit(net, data, step, sets, limits, out=out, seed=0, device="cpu")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["losses"]["task"] for line in lines]


def test_the_loss_falls_on_a_frozen_random_backbone(tmp_path: Path) -> None:
    net = attached("vit").freeze()
    kept = copy.deepcopy(net.backbone.state_dict())
    losses = falling(net, Corners(), tmp_path, epochs=8)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert all(torch.equal(kept[key], one) for key, one in net.backbone.state_dict().items())


def test_the_loss_falls_on_scenes(tmp_path: Path) -> None:
    from overt.data.scenes.classify import DominantScenes

    scenes = DominantScenes("train", 0, 96, size=32)
    labels = scenes.batch(range(96)).labels
    assert labels is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        classes = int(labels.max()) + 1
        net = attach(host("convnext"), classes=classes, processor=Bytes()).freeze()
    losses = falling(net, scenes, tmp_path, epochs=12)
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])  # it is 0.80 of that


# --- taking cells away


def test_deletion_asks_the_head_alone() -> None:
    net = plain().eval()
    features = net.encode(toy_batch())
    net.backbone.forward = None  # type: ignore[method-assign, assignment]  # nobody shall ask it
    for number in (0, 1):
        look = net.decide(features).attention[number]
        found = measure.contrast(
            lambda keep: net.decide(features, {"image": keep}).prediction,
            look, None, torch.Generator().manual_seed(0),
        )  # fmt: skip
        assert found.attended.deletion.isfinite().all()
        assert float(found.attended.deletion.abs().max()) > 0


def test_surrogates_are_searched_on_the_head_alone() -> None:
    from overt.supervise.surrogate import Grids, asking, search

    net = plain().train()
    ran = []
    handle = net.backbone.register_forward_hook(lambda *_: ran.append(1))
    with asking(net, toy_batch(), ["image"]) as look:
        found = search(look, Grids(40))
    handle.remove()
    assert len(ran) == 1 and net.training
    assert found.maps["image"].values.shape == (4, 1, 1, 1, 256)
    assert (found.best >= found.base).all() and (found.best > found.base).any()


# --- on disk


@pytest.mark.parametrize("name", ["resnet", "pyramid", "swin", "dino"])
def test_it_is_read_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    net = attached(name, score=dot, decision=indep).freeze()
    net(toy_batch())  # moves the statistics of the norms
    net.eval().save_pretrained(tmp_path / "net")
    again = Attached.from_pretrained(tmp_path / "net")
    assert again.levels == net.levels and again.config() == net.config() and again.frozen
    assert torch.equal(again(toy_batch()).prediction, net(toy_batch()).prediction)


def test_the_processor_comes_along(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    attach(host("vit"), classes=3, processor=processor).save_pretrained(tmp_path / "net")
    files.verify(tmp_path / "net")
    again = Attached.from_pretrained(tmp_path / "net")
    assert list(again.processor.image_mean) == [0.1, 0.2, 0.3]
    assert again.numbers == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))


def test_a_backbone_of_your_own_is_given_again(tmp_path: Path) -> None:
    net = plain().eval()
    net.save_pretrained(tmp_path / "net")
    with pytest.raises(BadInput, match="only you can build"):
        Attached.from_pretrained(tmp_path / "net")
    again = Attached.from_pretrained(tmp_path / "net", backbone=Plain())
    assert torch.equal(again(toy_batch()).prediction, net(toy_batch()).prediction)
    with pytest.raises(Damaged, match="not a model of this kind"):
        Attached.from_pretrained(tmp_path / "net", backbone=host("resnet"))


def test_a_score_of_your_own_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="only a score of"):
        plain(score=lambda width: Additive(width, torch.relu)).save_pretrained(tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_levels_of_your_own_and_the_default_run_are_kept(tmp_path: Path) -> None:
    own = Level("two", Order.FIRST, 12)
    net = Attached(Plain(), (own,), 3, additive, concat, 0.0, run_backbone, Bytes()).eval()
    net.save_pretrained(tmp_path / "net")
    assert Attached.from_pretrained(tmp_path / "net", Plain()).levels == (own,)


def test_what_cannot_be_attached_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"attach takes a torch.nn.Module, .* type str"):
        attach("resnet18", classes=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"levels is a list, also of one: levels=\['0'\]"):
        attach(Plain(), classes=3, levels="0")
    with pytest.raises(ValueError, match="0 classes leave nothing to answer"):
        attach(Plain(), classes=0)
