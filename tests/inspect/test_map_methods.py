"""Maps of a model by the word of their method: each finds the deciding cell or word."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from overt.attention import grid, words
from overt.attribution import grad_cam, integrated_gradients, relevance, rollout
from overt.cli.commands import measure
from overt.data.batch import Batch
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.inspect.map_methods import (
    ATTENTION,
    METHODS,
    OF_ATTENTION,
    OF_LAYER,
    MethodMap,
    method_maps,
)
from overt.inspect.measure import (
    MeasuredModel,
    MeasureRequest,
    check_request,
    compute_scorecard,
    without_attention,
)
from overt.nn import wrap
from overt.nn.output import Output
from tests.inspect.test_measure import photos, shelf  # noqa: F401

CELL = 5  # of 4 x 4


class Corner(nn.Module):
    """A CNN that answers by the brightness of one cell; pixels are scaled inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 1, 2, 2)
        for layer in (self.first, self.second):
            nn.init.constant_(layer.weight, 0.25)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        cells = self.second(self.first(images.float() / 255)).flatten(1)
        return torch.stack([cells[:, CELL] * 4, torch.zeros(len(images))], dim=1)


def pictures(count: int = 3) -> Batch:
    """Return bright images, two of which share one."""
    images = torch.full((count, 3, 8, 8), 200, dtype=torch.uint8)
    return Batch(
        tuple(f"p{at}" for at in range(count + 1)),
        images=images,
        image_of=torch.tensor([0, *range(count)]),
        geometry=PixelGeometry.identity(count, (8, 8)),
    )


@pytest.fixture
def cnn() -> nn.Module:
    return without_attention(Corner(), lambda net, batch: net(batch.with_own_images().images))


PIXELS = [name for name in METHODS if name != ATTENTION and name not in OF_ATTENTION]


@pytest.mark.parametrize("method", PIXELS)
def test_every_method_of_images_finds_the_deciding_cell(
    method: str, cnn: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overt.inspect.map_methods.RISE_MASKS", 300)
    batch = pictures()
    batch = replace(batch, target=None)
    look = method_maps([method], cnn)[method]
    found = look(batch).check()
    assert found.shape[:4] == (4, 1, 1, 1) and found.keys.find("image").geometry is not None
    side = found.keys.find("image").shape[0]
    cells = found.weights.reshape(4, side, side)
    inside = cells[:, side // 4 : side // 2, side // 4 : side // 2]
    if method == "vargrad":  # the gradient of a linear model does not vary
        assert not cells.any()
        return
    if method in ("gradcam", "gradcam++"):  # they weight channels, which are equal everywhere
        assert bool((cells == cells[:, :1, :1]).all()) and bool(cells.any())
        return
    outside = cells.sum(dim=(1, 2)) - inside.sum(dim=(1, 2))
    if method == "rise":  # large masks: most, and not all, is inside
        assert bool((inside.mean(dim=(1, 2)) > cells.mean(dim=(1, 2))).all())
    else:
        assert bool((inside.sum(dim=(1, 2)) > 5 * outside.abs()).all()), cells
    assert not any(module._forward_pre_hooks for module in cnn.modules())


@pytest.mark.parametrize("method", ["smoothgrad", "rise", "shap", "lime"])
def test_random_methods_do_not_depend_on_the_batch(
    method: str, cnn: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overt.inspect.map_methods.RISE_MASKS", 40)
    look, batch = MethodMap(method, cnn, seed=3), pictures(2)
    whole = look(batch)
    alone = look(batch.select(torch.tensor([2])))
    torch.testing.assert_close(alone.values, whole.values[2:])
    assert "3" in look.digest and method in look.digest


@pytest.mark.parametrize("method", ["smoothgrad", "vargrad", "shap", "lime"])
def test_random_methods_of_texts_do_not_depend_on_longer_texts(method: str) -> None:
    tokens = torch.tensor([[1, 2, 3, 4] * 40, [4, 7, 5, 6, 8, 1, 2] + [0] * 153])
    batch = Batch(("a", "b"), tokens=tokens, token_mask=tokens > 0)
    short = Batch(("b",), tokens=tokens[1:, :7], token_mask=tokens[1:, :7] > 0)
    look = MethodMap(method, make_reader(), seed=3)
    torch.testing.assert_close(look(batch).values[1:, ..., :7], look(short).values)


def test_integrated_gradients_are_of_normalized_pixels(cnn: nn.Module) -> None:
    found = method_maps(["ig"], cnn)["ig"](pictures(2))
    images = pictures(2).with_own_images().images
    assert images is not None
    expected = integrated_gradients(Corner(), images.float(), 0)
    torch.testing.assert_close(found.values.flatten(1), expected.values.flatten(1))


class Reader(nn.Module):
    """Answers by one word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3)
        nn.init.zeros_(self.embed.weight)
        self.embed.weight.data[7] = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        score = self.embed(tokens).sum(dim=(1, 2))
        return torch.stack([score, torch.zeros_like(score)], dim=1)


def make_reader() -> Any:
    """Return a model of texts in which words interact."""
    torch.manual_seed(0)
    reader = Reader()
    nn.init.normal_(reader.embed.weight)
    reader.embed.weight.data[0] = 0.0

    def run(net: nn.Module, batch: Batch) -> Tensor:
        assert batch.tokens is not None and batch.token_mask is not None
        found = (reader.embed(batch.tokens) * batch.token_mask[..., None]).sum(dim=1)
        return found.square()

    return without_attention(reader, run)


@pytest.mark.parametrize("method", [m for m in PIXELS if m not in (*OF_LAYER, "rise", "vargrad")])
def test_every_method_of_text_finds_the_deciding_word(method: str) -> None:
    tokens = torch.tensor([[1, 7, 2, 3], [7, 4, 0, 0]])
    batch = Batch(("a", "b"), tokens=tokens, token_mask=tokens > 0)
    model = without_attention(Reader(), lambda net, batch: net(batch.tokens))
    found = method_maps([method], model)[method](batch).check()
    assert found.keys.find("text").shape == (4,)
    if method in ("saliency", "smoothgrad"):  # the gradient is the same for every word
        assert bool((found.weights[0, 0, 0, 0] == found.weights[0, 0, 0, 0, 0]).all())
    else:
        assert found.weights.flatten(1).argmax(dim=1).tolist() == [1, 0]
    assert found.visible[1, 0].tolist() == [True, True, False, False]


class Encoder(nn.Module):
    """A tiny ViT on 4 x 4 cells with a class token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.first, self.head = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images.float() / 255).flatten(2).mT
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
        return self.head(self.blocks(x)[:, 0])


def make_vit() -> Any:
    return wrap(
        Encoder().eval(),
        lambda net, batch: net(batch.images),
        words(1, "class") + grid(4, 4),
    )


def test_maps_of_attention_are_those_of_the_class_token() -> None:
    model, batch = make_vit(), pictures().with_own_images()
    batch = replace(batch, images=torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8))
    maps = method_maps(["rollout", "relevance", "values"], model)
    scores, trace = model.run_traced(model.encode(batch), model.call)
    expected = rollout(trace, rows="class").between("class", "image")
    torch.testing.assert_close(maps["rollout"](batch).weights, expected.weights)
    expected = relevance(trace, scores.amax(dim=1), "class").between("class", "image")
    torch.testing.assert_close(maps["relevance"](batch).weights, expected.weights)
    assert maps["values"](batch).check().shape == (4, 1, 1, 1, 16)


def test_grad_cam_of_a_vit_is_of_the_block_before_the_last() -> None:
    model, batch = make_vit(), pictures().with_own_images()
    found = method_maps(["gradcam"], model)["gradcam"](batch)
    net, images = model.model, batch.images
    assert images is not None
    expected = grad_cam(
        net, images.float(), net(images).argmax(dim=1), net.blocks.layers[1],
        layout=words(1, "class") + grid(4, 4),
    )  # fmt: skip
    torch.testing.assert_close(found.values, expected.values)


class RegionReader(nn.Module):
    """Answer by the first feature of the second region, without convolutions."""

    def forward(self, batch: Batch) -> Output:
        assert batch.features is not None
        score = batch.features[:, 1, 0] * 4
        return Output(torch.stack([score, torch.zeros_like(score)], dim=1))


REGIONS = [name for name in PIXELS if name not in OF_LAYER and name != "rise"]


@pytest.mark.parametrize("method", REGIONS)
def test_every_method_of_regions_finds_the_deciding_region(method: str) -> None:
    there = torch.tensor([[True, True, True], [True, True, False]])
    features = (torch.rand(2, 3, 4) + 0.5) * there[..., None]
    features[:, 1, 0] += torch.tensor([0.5, 1.0])
    batch = Batch(("a", "b"), features=features, region_mask=there)
    found = MethodMap(method, RegionReader(), "image")(batch).check()
    assert found.keys.spans[0].name == "regions"
    assert found.visible[1, 0].tolist() == [True, True, False] and not found.values[1, ..., 2].any()
    if method != "vargrad":  # the gradient is the same everywhere
        assert found.values[:, 0, 0, 0].argmax(dim=-1).tolist() == [1, 1]


@pytest.mark.parametrize("method", ["gradcam", "rise"])
def test_methods_of_pixels_do_not_apply_to_regions(method: str) -> None:
    batch = Batch(("a",), features=torch.rand(1, 3, 4))
    with pytest.raises(ValueError, match="regions"):
        MethodMap(method, RegionReader(), "image")(batch)


def test_methods_that_do_not_apply_raise(cnn: nn.Module) -> None:
    text = Batch(("a",), tokens=torch.tensor([[1, 7]]))
    reader = without_attention(Reader(), lambda net, batch: net(batch.tokens))
    for method in ("gradcam", "rise"):
        with pytest.raises(ValueError, match=method):
            method_maps([method], reader)[method](text)
    with pytest.raises(ValueError, match=r"rollout.*timm"):
        method_maps(["rollout"], cnn)["rollout"](pictures())
    with pytest.raises(ValueError, match="needs a text"):
        method_maps(["ig"], cnn, "text")["ig"](pictures())
    with pytest.raises(ValueError, match="needs images"):
        method_maps(["ig"], reader, "image")["ig"](text)
    flat = without_attention(nn.Linear(2, 2), lambda net, batch: torch.zeros(4, 2))
    with pytest.raises(ValueError, match="convolution"):
        method_maps(["ig"], flat)["ig"](pictures())
    with pytest.raises(UserError, match="'cat'.*ig"):
        method_maps(["cat"], cnn)
    with pytest.raises(UserError, match="only maps"):
        method_maps(["ig"], None)
    assert method_maps([ATTENTION], cnn) == {}


class OneBatch:
    """A dataset of one batch."""

    name, split = "pictures", "test"

    def __len__(self) -> int:
        return 2

    def batch(self, indices: Any) -> Batch:
        return pictures(2).select(torch.tensor(list(indices)))

    def digest(self) -> str:
        return "two"


def test_attention_needs_a_model_with_attention(
    cnn: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = MeasuredModel("cnn", cnn)
    monkeypatch.setattr("overt.inspect.measure.open_measured", lambda *_: opened)
    monkeypatch.setattr("overt.inspect.measure.open_dataset", lambda *_: OneBatch())
    request = MeasureRequest("cnn", "pictures", ("entropy",), methods=("attention", "ig"))
    with pytest.raises(UserError, match="cnn .*attention"):
        compute_scorecard(request, None)
    card = compute_scorecard(replace(request, methods=("ig", "saliency")), None)
    assert card.maps[:2] == ("ig", "saliency")
    with pytest.raises(UserError, match="'igg'.*ig"):
        check_request(replace(request, model=str(tmp_path), methods=("igg",)), tmp_path / "out")


def test_the_help_and_the_guide_list_every_method() -> None:
    option = get_type_hints(measure, include_extras=True)["method"].__metadata__[0]
    assert option.help.endswith(f": {', '.join(METHODS)}.")
    guide = (Path(__file__).resolve().parents[2] / "docs" / "score-your-model.md").read_text()
    assert [one for one in METHODS if f"`{one}`" not in guide] == []


@pytest.mark.long
def test_a_vision_transformer_is_measured_with_several_methods(shelf: Any, photos: Path) -> None:  # noqa: F811
    request = MeasureRequest(
        str(shelf["vit"]), str(photos), ("spearman",), limit=2,
        methods=("attention", "rollout", "relevance", "gradcam", "ig"),
    )  # fmt: skip
    card = compute_scorecard(request, None)
    assert card.maps[:5] == ("attention", "rollout", "relevance", "gradcam", "ig")
