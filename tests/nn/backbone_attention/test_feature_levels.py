"""Feature levels: recognised by tensor shape, and read at other image sizes."""

from dataclasses import replace
from threading import Thread

import pytest
import torch
from torch import nn

from overt.capture.layouts.patch_grids import PatchSpec
from overt.nn.backbone_attention.backbones import run_backbone
from overt.nn.backbone_attention.feature_levels import (
    AxisOrder,
    FeatureLevel,
    capture_outputs,
    find_levels,
    find_module,
    find_tensors,
    grid_for_count,
    named_levels,
    recognise_level,
)
from tests.nn.hosts import HOSTS, SIZE, Last, Plain, host

CANVAS = (SIZE, SIZE)


def found(name: str) -> list[tuple[str, str, int, tuple[int, int] | None, int]]:
    levels = find_levels(host(name), run_backbone, CANVAS)
    return [(one.name, one.order.name, one.width, one.stride, one.before) for one in levels]


# --- discovery


def test_conv_stages_give_one_level_per_resolution() -> None:
    assert found("convnext") == [
        ("encoder.stages.0", "FIRST", 8, (4, 4), 0),
        ("encoder.stages.1", "FIRST", 12, (8, 8), 0),
        ("encoder.stages.2", "FIRST", 16, (16, 16), 0),  # the last stage has one cell
    ]
    levels = find_levels(host("resnet"), run_backbone, (224, 224))
    assert [one.name for one in levels] == [f"resnet.encoder.stages.{at}" for at in (1, 2, 3)]
    assert [one.stride for one in levels] == [(8, 8), (16, 16), (32, 32)]


def test_feature_maps_returned_by_the_backbone_come_first() -> None:
    assert found("pyramid") == [
        ("", "FIRST", 8, (4, 4), 0),
        ("[1]", "FIRST", 12, (8, 8), 0),
        ("[2]", "FIRST", 16, (16, 16), 0),
    ]


def test_window_stages_give_token_levels() -> None:
    assert found("swin") == [
        ("encoder.layers.0", "TOKENS", 16, (4, 4), 0),
        ("encoder.layers.2", "TOKENS", 32, (8, 8), 0),
    ]


def test_levels_of_equal_resolution_are_spread_evenly_up_to_the_last() -> None:
    assert found("vit") == [(f"layers.{at}", "TOKENS", 16, (8, 8), 1) for at in range(3)]
    # a class token and four registers
    assert found("dino") == [(f"encoder.layer.{at}", "TOKENS", 16, (8, 8), 5) for at in (0, 1, 3)]


def test_channels_last_levels_are_recognised_with_as_many_channels_as_rows() -> None:
    """The first stage is (2, 8, 8, 8); the other stages resolve the axis order."""
    assert found("last") == [
        ("stages.0", "LAST", 8, (4, 4), 0),
        ("stages.1", "LAST", 12, (8, 8), 0),
        ("stages.2", "LAST", 20, (16, 16), 0),
    ]


def test_levels_are_not_taken_from_the_stem() -> None:
    """The stem has more resolutions than the stages, but not the last one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(*(nn.Conv2d(3, 3, 2, 2) for _ in range(3)))
            self.stages = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 2, 2)])

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            x = self.stem(pixels)
            for stage in self.stages:
                x = stage(x)
            return x

    levels = find_levels(Net(), run_backbone, CANVAS, most=2)
    assert [one.name for one in levels] == ["stages.0", "stages.1"]


def test_backbone_without_levels_raises() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4))
    with pytest.raises(ValueError, match=r"Sequential.*levels="):
        find_levels(net, run_backbone, CANVAS)


@pytest.mark.parametrize("name", HOSTS)
def test_find_levels_leaves_backbone_and_rng_state_unchanged(name: str) -> None:
    backbone = host(name).train()
    run_backbone(backbone, torch.zeros(2, 3, *CANVAS))  # transformers adds its hooks here
    hooks = [list(one._forward_hooks) for one in backbone.modules()]
    backbone.get_submodule(next(n for n, _ in backbone.named_children())).eval()
    modes = [one.training for one in backbone.modules()]
    weights = {key: value.clone() for key, value in backbone.state_dict().items()}
    state = torch.get_rng_state()
    find_levels(backbone, run_backbone, CANVAS)
    assert torch.equal(torch.get_rng_state(), state)
    assert [one.training for one in backbone.modules()] == modes
    assert all(torch.equal(weights[key], value) for key, value in backbone.state_dict().items())
    assert [list(one._forward_hooks) for one in backbone.modules()] == hooks


# --- named levels


def test_named_levels_keep_the_given_order() -> None:
    levels = named_levels(host("swin"), run_backbone, CANVAS, ("encoder.layers.1[1]", "embeddings"))
    assert levels[0] == FeatureLevel("encoder.layers.1[1]", AxisOrder.FIRST, 32, (8, 8))
    assert levels[1] == FeatureLevel("embeddings", AxisOrder.TOKENS, 8, (2, 2))


def test_a_given_level_is_used_unchanged() -> None:
    own = FeatureLevel("stages.0", AxisOrder.FIRST, 8)
    assert named_levels(Last(), run_backbone, CANVAS, (own,)) == (own,)
    with pytest.raises(ValueError, match=r"'stage.0'.*stages.0"):
        named_levels(Last(), run_backbone, CANVAS, (replace(own, name="stage.0"),))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two.9", "'two.9'.*two"),
        ("head", r"\(2, 5\).* 2 images"),
        ("one[3]", r"'one\[3\]'.*only 1"),
    ],
)
def test_name_that_is_not_a_level_raises(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_levels(Plain(), run_backbone, CANVAS, (name,))


def test_unused_module_and_one_cell_output_raise() -> None:
    backbone = Plain()
    backbone.spare = nn.Conv2d(3, 3, 1)
    with pytest.raises(ValueError, match="'spare' did not run"):
        named_levels(backbone, run_backbone, CANVAS, ("spare",))
    with pytest.raises(ValueError, match=r"one cell .*size="):
        named_levels(host("convnext"), run_backbone, CANVAS, ("encoder.stages.3",))


# --- recognising tensors


@pytest.mark.parametrize(
    ("shape", "order", "grid", "before"),
    [
        ((2, 96, 7, 14), AxisOrder.FIRST, (7, 14), 0),
        ((2, 7, 14, 96), AxisOrder.LAST, (7, 14), 0),
        ((2, 98, 96), AxisOrder.TOKENS, (7, 14), 0),
        ((2, 99, 96), AxisOrder.TOKENS, (7, 14), 1),
        ((2, 8, 8, 8), None, None, 0),  # a wide canvas has no square grid
        ((6, 96, 7, 14), None, None, 0),  # windows
        ((2, 96), None, None, 0),
    ],
)
def test_levels_of_a_wide_canvas_are_recognised_by_shape(
    shape: tuple[int, ...],
    order: AxisOrder | None,
    grid: tuple[int, int] | None,
    before: int,
) -> None:
    made = recognise_level(torch.zeros(shape), "x", 2, (112, 224), None)
    if order is None:
        assert made is None
    else:
        assert made == (FeatureLevel("x", order, 96, (16, 16), before), grid)


def test_special_tokens_are_skipped_as_the_patch_spec_says() -> None:
    patches = PatchSpec((8, 8), (("class", 1), ("registers", 3)), (("detection", 5),))
    made = recognise_level(torch.zeros(2, 4 + 16 + 5, 6), "x", 2, CANVAS, patches)
    level = FeatureLevel("x", AxisOrder.TOKENS, 6, (8, 8), 4, 5)
    assert made == (level, (4, 4))
    tokens = torch.arange(25.0)[None, :, None].expand(2, 25, 6)
    read = level.read((tokens, None), CANVAS)
    assert read.cells[0, 0].flatten().tolist() == [float(at) for at in range(4, 20)]
    assert read.token is not None and float(read.token[0, 0]) == 0


def test_integer_tensors_are_not_levels() -> None:
    assert recognise_level(torch.zeros(2, 8, 4, 4).long(), "x", 2, CANVAS, None) is None


@pytest.mark.parametrize(
    ("count", "canvas", "grid"),
    [(12, (60, 80), (3, 4)), (12, (80, 60), (4, 3)), (13, (60, 80), None), (1, (9, 9), (1, 1))],
)
def test_grid_for_count_has_the_aspect_ratio_of_the_canvas(
    count: int, canvas: tuple[int, int], grid: tuple[int, int] | None
) -> None:
    assert grid_for_count(count, canvas) == grid


# --- another canvas


def test_cells_are_read_at_another_image_size() -> None:
    tokens = FeatureLevel("x", AxisOrder.TOKENS, 5, (8, 8), 1)
    assert tokens.read(torch.zeros(1, 1 + 2 * 7, 5), (16, 60)).grid == (2, 7)  # rest left out
    assert tokens.read(torch.zeros(1, 1 + 3 * 8, 5), (17, 60)).grid == (3, 8)  # rest padded
    assert replace(tokens, stride=None).read(torch.zeros(1, 1 + 12, 5), (60, 80)).grid == (3, 4)
    with pytest.raises(ValueError, match=r"'x' .* 13 cells"):
        tokens.read(torch.zeros(1, 1 + 13, 5), (16, 60))
    last = FeatureLevel("x", AxisOrder.LAST, 5).read(torch.zeros(1, 2, 3, 5), (16, 24))
    assert last.cells.shape == (1, 5, 2, 3) and last.token is None


def test_covered_gives_the_pixels_of_a_grid() -> None:
    level = FeatureLevel("x", AxisOrder.FIRST, 5, (8, 8))
    assert level.covered((2, 7), (16, 60)) == (16, 56)  # a ViT drops the remainder
    assert level.covered((2, 8), (16, 60)) == (16, 64)  # a convolution pads
    assert level.covered((4, 4), (16, 60)) == (16, 60)  # does not fit this stride
    assert replace(level, stride=None).covered((2, 8), (16, 60)) == (16, 60)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 4, 5), "channels first"), ((1, 4, 2, 2), r"4 features.* 5")],
)
def test_tensor_of_another_layout_raises(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureLevel("x", AxisOrder.FIRST, 5).read(torch.zeros(shape), CANVAS)


# --- capturing outputs


def test_find_tensors_keeps_the_order_of_the_output() -> None:
    a, b, c = (torch.tensor(float(at)) for at in range(3))
    nest = {"x": (a, None), "y": [{"z": b}], "n": 3, "w": c}
    assert [float(one) for one in find_tensors(nest)] == [0, 1, 2]
    assert find_tensors(None) == []


def test_hooks_are_removed_after_an_error() -> None:
    backbone = Plain()
    with pytest.raises(RuntimeError), capture_outputs(backbone, ["one", "one.0"]) as kept:
        backbone(torch.zeros(1, 4, 8, 8))
    assert kept == {} and not any(one._forward_hooks for one in backbone.modules())
    with capture_outputs(backbone, ["two", "one"]) as kept:
        backbone(torch.zeros(1, 3, 8, 8))
    assert list(kept) == ["one", "two"], "in the order in which they end"
    assert find_module(backbone, "") is backbone


def test_outputs_of_another_thread_are_not_captured() -> None:
    backbone, blank = Plain().eval(), torch.zeros(1, 3, 8, 8)
    with capture_outputs(backbone, ["one"]) as kept:
        backbone(blank)
        other = Thread(target=backbone, args=(torch.ones(1, 3, 8, 8),))
        other.start()
        other.join()
    assert torch.equal(kept["one"], backbone.one(blank))
