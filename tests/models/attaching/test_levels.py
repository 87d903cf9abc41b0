"""Levels: what modules return is told apart by its shape, and found again on another canvas."""

from dataclasses import replace
from threading import Thread

import pytest
import torch
from torch import nn

from overt.capture.positions.grids import Patches
from overt.models.attaching.backbones import run_backbone
from overt.models.attaching.levels import (
    Level,
    Order,
    find_levels,
    named_levels,
    recognise,
    returning,
    square,
    submodule,
    tensors,
)
from tests.models.hosts import HOSTS, SIZE, Last, Plain, host

CANVAS = (SIZE, SIZE)


def found(name: str) -> list[tuple[str, str, int, tuple[int, int] | None, int]]:
    levels = find_levels(host(name), run_backbone, CANVAS)
    return [(one.name, one.order.name, one.width, one.stride, one.before) for one in levels]


# --- what is found


def test_stages_of_convolutions_are_one_level_a_resolution() -> None:
    assert found("convnext") == [
        ("encoder.stages.0", "FIRST", 8, (4, 4), 0),
        ("encoder.stages.1", "FIRST", 12, (8, 8), 0),
        ("encoder.stages.2", "FIRST", 16, (16, 16), 0),  # the last stage has one cell
    ]
    levels = find_levels(host("resnet"), run_backbone, (224, 224))
    assert [one.name for one in levels] == [f"resnet.encoder.stages.{at}" for at in (1, 2, 3)]
    assert [one.stride for one in levels] == [(8, 8), (16, 16), (32, 32)]


def test_what_a_backbone_returns_itself_comes_first() -> None:
    assert found("pyramid") == [
        ("", "FIRST", 8, (4, 4), 0),
        ("[1]", "FIRST", 12, (8, 8), 0),
        ("[2]", "FIRST", 16, (16, 16), 0),
    ]


def test_tokens_of_merged_windows() -> None:
    assert found("swin") == [
        ("encoder.layers.0", "TOKENS", 16, (4, 4), 0),
        ("encoder.layers.2", "TOKENS", 32, (8, 8), 0),
    ]


def test_blocks_of_one_resolution_are_spread_evenly_up_to_the_last() -> None:
    assert found("vit") == [(f"layers.{at}", "TOKENS", 16, (8, 8), 1) for at in range(3)]
    # a class token and four registers
    assert found("dino") == [(f"encoder.layer.{at}", "TOKENS", 16, (8, 8), 5) for at in (0, 1, 3)]


def test_features_last_also_where_there_are_as_many_as_rows() -> None:
    """The first stage is (2, 8, 8, 8), which its neighbours explain."""
    assert found("last") == [
        ("stages.0", "LAST", 8, (4, 4), 0),
        ("stages.1", "LAST", 12, (8, 8), 0),
        ("stages.2", "LAST", 20, (16, 16), 0),
    ]


def test_a_stage_is_not_taken_from_the_stem() -> None:
    """The stem goes through more resolutions than the stages, but not through the last."""

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


def test_nothing_to_find_is_said() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4))
    with pytest.raises(ValueError, match="no module of Sequential returns the cells"):
        find_levels(net, run_backbone, CANVAS)


@pytest.mark.parametrize("name", HOSTS)
def test_a_trial_leaves_the_backbone_and_the_random_state_alone(name: str) -> None:
    backbone = host(name).train()
    run_backbone(backbone, torch.zeros(2, 3, *CANVAS))  # transformers hangs up hooks of its own
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


def test_levels_by_name_in_the_order_of_their_names() -> None:
    levels = named_levels(host("swin"), run_backbone, CANVAS, ("encoder.layers.1[1]", "embeddings"))
    assert levels[0] == Level("encoder.layers.1[1]", Order.FIRST, 32, (8, 8))
    assert levels[1] == Level("embeddings", Order.TOKENS, 8, (2, 2))


def test_a_level_is_taken_at_its_word() -> None:
    own = Level("stages.0", Order.FIRST, 8)
    assert named_levels(Last(), run_backbone, CANVAS, (own,)) == (own,)
    with pytest.raises(ValueError, match=r"has no module 'stage.0'; near it: stages.0"):
        named_levels(Last(), run_backbone, CANVAS, (replace(own, name="stage.0"),))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two.9", "no module 'two.9'; near it: two"),
        ("head", r"shape \(2, 5\) for 2 images .* are the cells of no grid"),
        ("one[3]", r"'one\[3\]': the module returns 1 tensors"),
    ],
)
def test_a_name_that_is_no_level_is_answered(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        named_levels(Plain(), run_backbone, CANVAS, (name,))


def test_a_module_that_does_not_run_and_one_cell_are_no_levels() -> None:
    backbone = Plain()
    backbone.spare = nn.Conv2d(3, 3, 1)
    with pytest.raises(ValueError, match="'spare' was not called"):
        named_levels(backbone, run_backbone, CANVAS, ("spare",))
    with pytest.raises(ValueError, match=r"has one cell .* give the size of your images"):
        named_levels(host("convnext"), run_backbone, CANVAS, ("encoder.stages.3",))


# --- what a tensor is


@pytest.mark.parametrize(
    ("shape", "order", "grid", "before"),
    [
        ((2, 96, 7, 14), Order.FIRST, (7, 14), 0),
        ((2, 7, 14, 96), Order.LAST, (7, 14), 0),
        ((2, 98, 96), Order.TOKENS, (7, 14), 0),
        ((2, 99, 96), Order.TOKENS, (7, 14), 1),
        ((2, 8, 8, 8), None, None, 0),  # no grid of a wide canvas is square
        ((6, 96, 7, 14), None, None, 0),  # windows
        ((2, 96), None, None, 0),
    ],
)
def test_shapes_on_a_wide_canvas(
    shape: tuple[int, ...],
    order: Order | None,
    grid: tuple[int, int] | None,
    before: int,
) -> None:
    made = recognise(torch.zeros(shape), "x", 2, (112, 224), None)
    if order is None:
        assert made is None
    else:
        assert made == (Level("x", order, 96, (16, 16), before), grid)


def test_tokens_around_the_cells_are_those_the_patches_tell() -> None:
    patches = Patches((8, 8), (("class", 1), ("registers", 3)), (("detection", 5),))
    made = recognise(torch.zeros(2, 4 + 16 + 5, 6), "x", 2, CANVAS, patches)
    level = Level("x", Order.TOKENS, 6, (8, 8), 4, 5)
    assert made == (level, (4, 4))
    tokens = torch.arange(25.0)[None, :, None].expand(2, 25, 6)
    read = level.read((tokens, None), CANVAS)
    assert read.cells[0, 0].flatten().tolist() == [float(at) for at in range(4, 20)]
    assert read.token is not None and float(read.token[0, 0]) == 0


def test_whole_numbers_are_no_features() -> None:
    assert recognise(torch.zeros(2, 8, 4, 4).long(), "x", 2, CANVAS, None) is None


@pytest.mark.parametrize(
    ("count", "canvas", "grid"),
    [(12, (60, 80), (3, 4)), (12, (80, 60), (4, 3)), (13, (60, 80), None), (1, (9, 9), (1, 1))],
)
def test_a_number_of_cells_is_a_grid_of_the_shape_of_the_canvas(
    count: int, canvas: tuple[int, int], grid: tuple[int, int] | None
) -> None:
    assert square(count, canvas) == grid


# --- another canvas


def test_cells_are_read_on_another_canvas() -> None:
    tokens = Level("x", Order.TOKENS, 5, (8, 8), 1)
    assert tokens.read(torch.zeros(1, 1 + 2 * 7, 5), (16, 60)).grid == (2, 7)  # rest left out
    assert tokens.read(torch.zeros(1, 1 + 3 * 8, 5), (17, 60)).grid == (3, 8)  # rest padded
    assert replace(tokens, stride=None).read(torch.zeros(1, 1 + 12, 5), (60, 80)).grid == (3, 4)
    with pytest.raises(ValueError, match="'x' gave 13 cells"):
        tokens.read(torch.zeros(1, 1 + 13, 5), (16, 60))
    last = Level("x", Order.LAST, 5).read(torch.zeros(1, 2, 3, 5), (16, 24))
    assert last.cells.shape == (1, 5, 2, 3) and last.token is None


def test_pixels_under_a_grid() -> None:
    level = Level("x", Order.FIRST, 5, (8, 8))
    assert level.covered((2, 7), (16, 60)) == (16, 56)  # a ViT leaves the rest out
    assert level.covered((2, 8), (16, 60)) == (16, 64)  # a convolution looks beyond
    assert level.covered((4, 4), (16, 60)) == (16, 60)  # not with this stride at all
    assert replace(level, stride=None).covered((2, 8), (16, 60)) == (16, 60)


@pytest.mark.parametrize(
    ("shape", "said"),
    [((1, 4, 5), "is not channels first"), ((1, 4, 2, 2), "gave 4 features a cell, and 5 before")],
)
def test_a_tensor_of_another_make_is_refused(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Level("x", Order.FIRST, 5).read(torch.zeros(shape), CANVAS)


# --- reading from outside


def test_tensors_in_the_order_in_which_they_are_returned() -> None:
    a, b, c = (torch.tensor(float(at)) for at in range(3))
    nest = {"x": (a, None), "y": [{"z": b}], "n": 3, "w": c}
    assert [float(one) for one in tensors(nest)] == [0, 1, 2]
    assert tensors(None) == []


def test_hooks_are_gone_after_an_error() -> None:
    backbone = Plain()
    with pytest.raises(RuntimeError), returning(backbone, ["one", "one.0"]) as kept:
        backbone(torch.zeros(1, 4, 8, 8))
    assert kept == {} and not any(one._forward_hooks for one in backbone.modules())
    with returning(backbone, ["two", "one"]) as kept:
        backbone(torch.zeros(1, 3, 8, 8))
    assert list(kept) == ["one", "two"], "in the order in which they end"
    assert submodule(backbone, "") is backbone


def test_another_thread_is_not_overheard() -> None:
    backbone, blank = Plain().eval(), torch.zeros(1, 3, 8, 8)
    with returning(backbone, ["one"]) as kept:
        backbone(blank)
        other = Thread(target=backbone, args=(torch.ones(1, 3, 8, 8),))
        other.start()
        other.join()
    assert torch.equal(kept["one"], backbone.one(blank))
