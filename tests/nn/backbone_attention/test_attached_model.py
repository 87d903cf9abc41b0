"""Attention on third-party backbones: contract, pixel geometry, freezing, detaching, saving."""

import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overt import io, metrics
from overt.data import Batch
from overt.errors import CorruptFileError, UserError
from overt.geometry import PixelGeometry
from overt.losses import Loss
from overt.nn import (
    additive_score,
    average_levels,
    concat_levels,
    dot_score,
    parametrised_score,
    uniform_score,
)
from overt.nn.backbone_attention.attached_model import AttachedAttention, attach
from overt.nn.backbone_attention.backbones import run_backbone
from overt.nn.backbone_attention.feature_levels import AxisOrder, FeatureLevel
from overt.nn.cnn import ConvBackbone
from overt.nn.image_backbones.efficientnet import EfficientNetLite
from overt.nn.learned_attention.attention import AdditiveCompatibility, grid_shape
from overt.testing import check_model, toy_batch
from overt.train import FitConfig, ParameterSet, fit
from tests.nn.hosts import HOSTS, Plain, host
from tests.nn.tiny import TinyProcessor

PLAIN = ("one", "two")
# Parameters after the last level, or used by other tasks only, do not reach the prediction.
UNREACHED = ("classifier", "layernorm", "embeddings.mask_token", "encoder.stages.3")


def make_attached(name: str, **more: Any) -> AttachedAttention:
    """Attach attention to a tiny backbone, with the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return attach(host(name), classes=3, processor=TinyProcessor(), **more)


def make_plain(**more: Any) -> AttachedAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return attach(Plain(), classes=3, levels=PLAIN, processor=TinyProcessor(), **more)


def grids(net: AttachedAttention, batch: Any) -> list[tuple[int, int]]:
    return [grid_shape(one.keys) for one in net(batch).attention]


# --- the contract


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTS)
def test_attached_attention_passes_check_model(name: str) -> None:
    unreached = [f"backbone.{part}" for part in UNREACHED]
    check_model(lambda: make_attached(name), toy_batch(), unreached, tolerance=1e-4)


@pytest.mark.parametrize("name", ["resnet", "dino"])
def test_frozen_attached_attention_passes_check_model(name: str) -> None:
    check_model(lambda: make_attached(name).freeze(), toy_batch(), tolerance=1e-4)


@pytest.mark.parametrize("score", [parametrised_score, dot_score, uniform_score])
def test_every_score_and_decision_passes_check_model(score: Callable[[int], nn.Module]) -> None:
    net = make_plain(score=score, decision=average_levels).freeze()
    # the parametrised score does not depend on the query, which then learns nothing
    unreached = ("query", "classify.project") if score is parametrised_score else ()
    check_model(lambda: copy.deepcopy(net), toy_batch(), unreached, tolerance=1e-4)
    assert (net.query is None) is (score is uniform_score), "an unused query"


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
def test_each_level_gives_one_map_finest_first(name: str, expected: list[tuple[int, int]]) -> None:
    assert grids(make_attached(name).eval(), toy_batch()) == expected


def test_levels_can_be_given_by_name() -> None:
    net = attach(host("convnext"), levels=("encoder.stages.1", "encoder.stages.0"), classes=10)
    output = net.eval()(pixel_values=torch.randn(2, 3, 32, 32))
    assert output.prediction.shape == (2, 10)
    assert [grid_shape(one.keys) for one in output.attention] == [(4, 4), (8, 8)]


# --- features of the backbone


@pytest.mark.parametrize("name", ["resnet", "swin", "vit", "dino", "pyramid"])
def test_cells_equal_the_hidden_states_of_the_backbone(name: str) -> None:
    """Hugging Face returns them with `output_hidden_states=True`."""
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
    found = net.backbone_features(pixels)
    if name == "dino":
        expected = [expected[at] for at in (0, 1, 3)]
    for one, state in zip(found, expected, strict=True):
        if state.ndim == 3:
            assert one.token is not None and torch.equal(one.token, state[:, 0])
            state = state[:, -16:].transpose(1, 2).unflatten(2, (4, 4))
        torch.testing.assert_close(one.cells, state)


def test_query_is_the_class_token_or_else_the_mean_of_the_cells() -> None:
    for name in ("vit", "resnet"):
        net = make_attached(name).eval()
        images = torch.randn(2, 3, 32, 32)
        last = net.backbone_features(images)[-1]
        whole = last.cells.mean(dim=(2, 3)) if name == "resnet" else last.token
        query = net.encode({"pixel_values": images}).query
        assert net.query is not None and whole is not None
        torch.testing.assert_close(query, net.query.linear(net.query.norm(whole)))


def test_samples_of_one_image_share_its_cells() -> None:
    net, batch = make_attached("vit").eval(), toy_batch()
    features = net.encode(batch)
    assert batch.image_of is not None and batch.image_of.tolist() == [0, 1, 2, 2]
    for one in features.cells:
        assert len(one.values) == 4 and torch.equal(one.values[2], one.values[3])


def test_uint8_images_are_normalized_as_the_processor_does() -> None:
    net, batch = make_plain().eval(), toy_batch()
    mean, spread = (
        torch.tensor(one)[:, None, None]
        for one in (TinyProcessor.image_mean, TinyProcessor.image_std)
    )
    numbers = replace(batch, images=(batch.images / 255 - mean) / spread)
    torch.testing.assert_close(net(batch).prediction, net(numbers).prediction)
    with pytest.raises(ValueError, match=r"uint8.*processor="):
        attach(Plain(), classes=3, levels=PLAIN)(batch)


def test_keywords_beside_a_batch_are_refused() -> None:
    net, images = make_plain().eval(), torch.rand(1, 3, 8, 8)
    geometry = PixelGeometry.identity(1, (16, 16)).resize((8, 8))
    for more in ({"geometry": geometry}, {"nonsense": 3}):
        with pytest.raises(TypeError, match=next(iter(more))):
            net(images, **more)
    output = net(Batch(("cat",), images=images, geometry=geometry))
    assert all(one.keys.find("image").geometry is not None for one in output.attention)


def test_bfloat16_backbone_gives_finite_float32_predictions() -> None:
    net = attach(Plain().bfloat16(), classes=3, levels=PLAIN).eval()
    output = net(pixel_values=torch.randn(2, 3, 32, 32))
    assert output.prediction.dtype is torch.float32 and output.prediction.isfinite().all()


def test_custom_run_function_calls_the_backbone() -> None:
    def twice(backbone: nn.Module, pixels: torch.Tensor) -> Any:
        return backbone(2 * pixels)

    net, pixels = make_plain(run=twice).eval(), torch.randn(2, 3, 32, 32)
    other = make_plain().eval()
    expected = other(pixel_values=2 * pixels).prediction
    assert torch.equal(net(pixel_values=pixels).prediction, expected)


def test_features_include_in_place_changes_of_the_next_module() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 1))
    net = attach(backbone, classes=3, levels=("0", "2"))
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.equal(net.backbone_features(pixels)[0].cells, backbone[:2](pixels))
    net(pixel_values=pixels).prediction.sum().backward()
    assert backbone[0].weight.grad is not None


def test_a_tensor_of_images_is_a_batch_without_geometry() -> None:
    net, images = make_plain().eval(), torch.rand(2, 3, 8, 8)
    output, expected = net(images), net(Batch(("a", "b"), images=images))
    torch.testing.assert_close(output.prediction, expected.prediction)
    for ours, theirs in zip(output.attention, expected.attention, strict=True):
        torch.testing.assert_close(ours.weights, theirs.weights)
        assert ours.keys.find("image").geometry is None


@pytest.mark.parametrize(
    "batch", [torch.zeros(2, 1, 8, 8), torch.zeros(3, 8, 8), {"images": 3}, Batch(("a",)), None]
)
def test_batch_without_images_raises(batch: Any) -> None:
    with pytest.raises(ValueError, match="images"):
        make_plain()(batch)


def test_empty_levels_raise() -> None:
    with pytest.raises(ValueError, match="least one level"):
        attach(Plain(), classes=3, levels=())


# --- pixel geometry


@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 56), (48, 32)])
@pytest.mark.parametrize("name", ["resnet", "convnext", "swin", "vit", "dino", "last"])
def test_maps_of_any_image_size_have_pixel_boxes(name: str, height: int, width: int) -> None:
    if name == "last" and (height % 16 or width % 16):
        height, width = 48, 64  # its stages merge 2 x 2 cells without padding
    net = make_attached(name).eval()
    batch = Batch(
        ("a", "b"),
        images=torch.randn(2, 3, height, width),
        geometry=PixelGeometry.identity(2, (height, width)),
    )
    for level, one in zip(net.levels, net(batch).attention, strict=True):
        rows, columns = grid_shape(one.keys)
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


def test_maps_have_the_geometry_of_the_photo_given_to_the_processor() -> None:
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
    with pytest.raises(ValueError, match="processor"):
        attach(host("vit"), classes=3)({**inputs, "images": photos})


# --- freezing, training, detaching


def test_frozen_backbone_keeps_weights_and_statistics_without_dropout() -> None:
    net = make_plain(dropout=0.0).freeze().train()
    kept = {name: value.clone() for name, value in net.backbone.state_dict().items()}
    first = net.backbone_features(toy_batch().images)
    again = net.backbone_features(toy_batch().images)
    assert torch.equal(first[1].cells, again[1].cells), "dropout is off"
    assert all(module.training for module in net.modules()), "the training mode is unchanged"
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    net(toy_batch()).prediction.square().sum().backward()
    optimizer.step()
    for name, value in net.backbone.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert not any(value.requires_grad for value in net.backbone.parameters())


def test_gradient_reaches_the_pixels_of_a_frozen_backbone() -> None:
    net = make_plain().freeze().eval()
    pixels = torch.randn(2, 3, 32, 32, requires_grad=True)
    net(pixel_values=pixels).prediction.sum().backward()
    assert pixels.grad is not None and bool(pixels.grad.any())


def test_unfreeze_restores_requires_grad_of_each_parameter() -> None:
    backbone = Plain()
    backbone.one.requires_grad_(False)
    net = attach(backbone, classes=3, levels=PLAIN).freeze().unfreeze()
    assert [value.requires_grad for value in backbone.parameters()] == [False] * 4 + [True] * 4
    net(pixel_values=torch.randn(4, 3, 32, 32)).prediction.sum().backward()
    assert backbone.two[0].weight.grad is not None and backbone.one[0].weight.grad is None


def test_detach_restores_the_backbone() -> None:
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
    nets = [make_attached("vit", dropout=0.0).train() for _ in range(2)]
    nets[1].backbone.gradient_checkpointing_enable()  # type: ignore[operator]
    for net in nets:
        net(toy_batch()).prediction.square().sum().backward()
    for (name, one), two in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, msg=name)


class BrightCellImages:
    """Images with one bright cell on the left or the right; the side is the class."""

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


def train_losses(net: AttachedAttention, data: Any, out: Path, epochs: int) -> list[float]:
    """Train the attention and return the logged losses."""

    def step(model: Any, batch: Batch, progress: Any) -> dict[str, dict[str, Loss]]:
        logits = model(batch).prediction
        each = nn.functional.cross_entropy(logits, batch.labels, reduction="none")
        return {"model": {"task": Loss(each.sum(), torch.tensor(len(batch)))}}

    trained = [value for value in net.parameters() if value.requires_grad]
    sets = {"model": ParameterSet(torch.optim.AdamW(trained, lr=1e-2))}
    limits = FitConfig(epochs=epochs, batch=16, log_every=1)
    fit(net, data, step, sets, limits, out=out, seed=0, device="cpu")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["losses"]["task"] for line in lines]


def test_loss_decreases_on_a_frozen_random_backbone(tmp_path: Path) -> None:
    net = make_attached("vit").freeze()
    kept = copy.deepcopy(net.backbone.state_dict())
    losses = train_losses(net, BrightCellImages(), tmp_path, epochs=8)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert all(torch.equal(kept[key], one) for key, one in net.backbone.state_dict().items())


@pytest.mark.long
def test_loss_decreases_on_scenes(tmp_path: Path) -> None:
    from overt.data.scenes.classification import DominantScenes

    scenes = DominantScenes("train", 0, 96, size=32)
    labels = scenes.batch(range(96)).labels
    assert labels is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        classes = int(labels.max()) + 1
        net = attach(host("convnext"), classes=classes, processor=TinyProcessor()).freeze()
    losses = train_losses(net, scenes, tmp_path, epochs=12)
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])  # the ratio is 0.80


# --- removing cells


def test_deletion_runs_the_head_only() -> None:
    net = make_plain().eval()
    features = net.encode(toy_batch())
    net.backbone.forward = None  # type: ignore[method-assign, assignment]  # must not be called
    for number in (0, 1):
        look = net.decide(features).attention[number]
        found = metrics.contrast_removal(
            lambda keep: net.decide(features, {"image": keep}).prediction,
            look, None, torch.Generator().manual_seed(0),
        )  # fmt: skip
        assert found.attended.deletion.isfinite().all()
        assert float(found.attended.deletion.abs().max()) > 0


def test_surrogate_search_runs_the_backbone_once() -> None:
    from overt.targets.surrogate import GridMasks, exhaustive_search, masked_batch

    net = make_plain().train()
    ran = []
    handle = net.backbone.register_forward_hook(lambda *_: ran.append(1))
    with masked_batch(net, toy_batch(), ["image"]) as look:
        found = exhaustive_search(look, GridMasks(40))
    handle.remove()
    assert len(ran) == 1 and net.training
    assert found.maps["image"].values.shape == (4, 1, 1, 1, 256)
    assert (found.best >= found.base).all() and (found.best > found.base).any()


# --- saving and loading


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet", "pyramid", "swin", "dino"])
def test_saved_model_is_loaded_with_equal_config_and_predictions(name: str, tmp_path: Path) -> None:
    net = make_attached(name, score=dot_score, decision=average_levels).freeze()
    net(toy_batch())  # moves the statistics of the norms
    net.eval().save_pretrained(tmp_path / "net")
    again = AttachedAttention.from_pretrained(tmp_path / "net")
    assert again.levels == net.levels and again.config() == net.config() and again.frozen
    assert torch.equal(again(toy_batch()).prediction, net(toy_batch()).prediction)


def test_processor_is_saved_with_the_model(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    attach(host("vit"), classes=3, processor=processor).save_pretrained(tmp_path / "net")
    io.verify(tmp_path / "net")
    again = AttachedAttention.from_pretrained(tmp_path / "net")
    assert list(again.processor.image_mean) == [0.1, 0.2, 0.3]
    assert again.numbers == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))


def test_custom_backbone_must_be_passed_to_from_pretrained(tmp_path: Path) -> None:
    net = make_plain().eval()
    net.save_pretrained(tmp_path / "net")
    with pytest.raises(
        UserError,
        match=r"custom .*backbone=",
    ):
        AttachedAttention.from_pretrained(tmp_path / "net")
    again = AttachedAttention.from_pretrained(tmp_path / "net", backbone=Plain())
    assert torch.equal(again(toy_batch()).prediction, net(toy_batch()).prediction)
    with pytest.raises(CorruptFileError, match=r"model.*kind"):
        AttachedAttention.from_pretrained(tmp_path / "net", backbone=host("resnet"))


def test_saving_a_custom_score_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="custom score"):
        make_plain(score=lambda width: AdditiveCompatibility(width, torch.relu)).save_pretrained(
            tmp_path / "net"
        )
    assert not (tmp_path / "net").exists()


def test_custom_levels_are_saved(tmp_path: Path) -> None:
    own = FeatureLevel("two", AxisOrder.FIRST, 12)
    net = AttachedAttention(
        Plain(), (own,), 3, additive_score, concat_levels, 0.0, run_backbone, TinyProcessor()
    ).eval()
    net.save_pretrained(tmp_path / "net")
    assert AttachedAttention.from_pretrained(tmp_path / "net", Plain()).levels == (own,)


def test_bad_arguments_of_attach_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"nn\.Module.*got str"):
        attach("resnet18", classes=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"levels=\['0'\]"):
        attach(Plain(), classes=3, levels="0")
    with pytest.raises(ValueError, match="got 0"):
        attach(Plain(), classes=0)


def test_efficientnet_backbone_is_rebuilt_by_from_pretrained(tmp_path: Path) -> None:
    """Its pixel statistics and size are known, so uint8 images need no processor."""
    net = attach(EfficientNetLite(), classes=3, size=(64, 64)).eval()
    assert net.numbers == ((127 / 255,) * 3, (128 / 255,) * 3)
    net.save_pretrained(tmp_path / "net")
    again = AttachedAttention.from_pretrained(tmp_path / "net")
    assert isinstance(again.backbone, EfficientNetLite) and again.config() == net.config()
    batch = toy_batch()
    assert torch.equal(again(batch).prediction, net(batch).prediction)


def test_conv_backbone_is_rebuilt_by_from_pretrained(tmp_path: Path) -> None:
    net = attach(ConvBackbone((8, 16, 16), (2, 2, 1)), classes=3, processor=TinyProcessor()).eval()
    net.save_pretrained(tmp_path / "net")
    again = AttachedAttention.from_pretrained(tmp_path / "net")
    assert isinstance(again.backbone, ConvBackbone)
    batch = toy_batch()
    assert torch.equal(again(batch).prediction, net(batch).prediction)


def test_grey_images_are_taken_by_a_backbone_of_one_channel(tmp_path: Path) -> None:
    def grey() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1))

    model = attach(grey(), classes=3, levels=["1", "2"], size=(28, 28)).eval()
    digits = torch.rand(2, 1, 28, 28)
    assert [len(one.keys) for one in model(digits).attention] == [196, 49]
    with pytest.raises(ValueError, match=r"i, 1,.*2, 3, 28"):
        model(torch.rand(2, 3, 28, 28))
    model.save_pretrained(tmp_path)
    again = AttachedAttention.from_pretrained(tmp_path, backbone=grey()).eval()
    assert torch.equal(again(digits).prediction, model(digits).prediction)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"levels": (0, 1)}, r"got 0.*\['0'\]"),
        ({"score": "dot"}, r"score.*dot_score"),
        ({"decision": "mean"}, r"decision.*nn\."),
        ({"size": 32}, r"size.*got 32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_of_another_kind_raise(given: dict[str, Any], message: str) -> None:
    unchecked = inspect.unwrap(attach)  # without the type checks of the test suite
    with pytest.raises(TypeError, match=message):
        unchecked(nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1)), classes=3, **given)
