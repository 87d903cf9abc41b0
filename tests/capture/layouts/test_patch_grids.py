"""One patch of the canvas is changed, and the token that changes is the one the layout names."""

import pytest
import torch
from torch import nn

from overt.capture.layouts.patch_grids import (
    cells_span,
    compact_index,
    feature_layout,
    module_at,
    patch_owners,
    patch_positions,
    patch_spec,
    pixel_owners,
    select_images,
    stage_grids,
    vision_layout,
)
from overt.geometry import PixelGeometry

transformers = pytest.importorskip("transformers", reason="models come from transformers")

SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 32,
    "patch_size": 8,
}


def vit(name, **more):
    return getattr(transformers, f"{name}Model")(
        getattr(transformers, f"{name}Config")(**{**SMALL, **more})
    ).eval()


BUILT = {
    "ViT": (lambda: vit("ViT"), ["class"]),
    "DeiT": (lambda: vit("DeiT"), ["class", "distillation"]),
    "BEiT": (lambda: vit("Beit"), ["class"]),
    "DINOv2": (lambda: vit("Dinov2"), ["class"]),
    "DINOv2 with registers": (
        lambda: vit("Dinov2WithRegisters", num_register_tokens=4),
        ["class", "registers"],
    ),
    "SigLIP": (lambda: vit("SiglipVision"), []),
    "CLIP": (lambda: vit("CLIPVision"), ["class"]),
    "BLIP": (lambda: vit("BlipVision"), ["class"]),
    "YOLOS": (lambda: vit("Yolos", image_size=[32, 32], num_detection_tokens=5), ["class"]),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_changed_patch_changes_its_token_and_no_other(name):
    tower = BUILT[name][0]()
    layout = vision_layout(tower, (32, 32))
    assert [s.name for s in layout.spans][: len(BUILT[name][1])] == BUILT[name][1]
    image = layout.find("image")
    assert image.shape == (4, 4)
    pixels = torch.randn(1, 3, 32, 32)
    changed = pixels.clone()
    changed[:, :, 8:16, 24:32] += 1  # row 1, column 3
    with torch.no_grad():
        embeddings = getattr(tower, "vision_model", tower).embeddings  # of transformers 4, or 5
        before, after = (_first(embeddings(p)) for p in (pixels, changed))
    assert before.shape[1] == len(layout)
    moved = (before - after).abs().amax(dim=-1)[0].nonzero()[:, 0].tolist()
    assert moved == [image.index.start + 1 * 4 + 3]


def _first(given):
    return given[0] if isinstance(given, tuple) else given


def test_detection_tokens_stand_after_the_cells():
    layout = vision_layout(BUILT["YOLOS"][0](), (32, 32))
    assert layout.find("detection").index == slice(17, 22)


def test_registers_are_counted():
    assert patch_spec(BUILT["DINOv2 with registers"][0]()).before == (
        ("class", 1),
        ("registers", 4),
    )


class Timm(nn.Module):
    """The names that timm gives the tokens of its vision transformers."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 4, 16, 16)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.reg_token = nn.Parameter(torch.zeros(1, 3, 4))


def test_the_names_of_timm_are_known():
    patches = patch_spec(Timm())
    assert patches.before == (("class", 1), ("registers", 3))
    assert patches.lead == 4
    assert patches.grid((64, 40)) == (4, 2)


def test_a_rest_of_the_canvas_that_fills_no_patch_is_left_out_of_the_geometry():
    geometry = PixelGeometry.identity(1, (70, 50))
    image = vision_layout(Timm(), (70, 50), geometry).find("image")
    assert image.shape == (4, 3)
    assert image.geometry.canvas == (64, 48)
    assert image.geometry.cells((4, 3))[0, -1].tolist() == [32, 48, 48, 64]


def test_the_geometry_has_to_lead_to_the_canvas_of_the_model():
    with pytest.raises(ValueError, match="processor settings"):
        vision_layout(Timm(), (64, 64), PixelGeometry.identity(1, (32, 32)))


def test_overlapping_patches_and_no_patches_are_refused():
    with pytest.raises(ValueError, match=r"stride.*by hand"):
        patch_spec(nn.Sequential(nn.Conv2d(3, 4, 7, 4)))
    with pytest.raises(ValueError, match=r"embedding.*by hand"):
        patch_spec(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"smaller.*patch"):
        patch_spec(Timm()).grid((8, 80))


def test_a_feature_map_reaches_beyond_a_canvas_it_does_not_divide():
    geometry = PixelGeometry.identity(1, (100, 64))
    image = feature_layout((100, 64), 32, geometry).find("image")
    assert image.shape == (4, 2)
    assert image.geometry.cells((4, 2))[0, -1].tolist() == [32, 96, 64, 100]


def test_the_stages_of_swin_have_the_grids_it_reports():
    config = transformers.SwinConfig(
        image_size=104, patch_size=4, embed_dim=4, depths=[1, 1, 1], num_heads=[1, 1, 1],
        window_size=4,
    )  # fmt: skip
    with torch.no_grad():
        given = transformers.SwinModel(config).eval()(
            torch.zeros(1, 3, 104, 88), output_hidden_states=True, interpolate_pos_encoding=True
        )
    sizes = [tuple(state.shape[-2:]) for state in given.reshaped_hidden_states[:-1]]
    grids = stage_grids((104, 88), 4, 3)
    assert grids == [(26, 22), (13, 11), (7, 6)]
    assert sizes == grids


def test_merged_neighbours_follow_each_other():
    positions = patch_positions((4, 6), 2)
    assert positions[:2, :2].tolist() == [[0, 1], [2, 3]]
    assert positions[0, 2:4].tolist() == [4, 5]
    assert positions[2:, 0].tolist() == [12, 14]
    assert sorted(positions.flatten().tolist()) == list(range(24))
    with pytest.raises(ValueError, match="not divisible"):
        patch_positions((3, 4), 2)


def test_pixels_belong_to_the_tokens_of_their_cells():
    owner = pixel_owners((5, 4), 2, (2, 2), (2, 2), lead=1)
    first = [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4], [-1] * 4]
    assert owner[0].tolist() == first
    assert (owner[1] - owner[0]).unique().tolist() == [0, 5]
    assert patch_owners([(2, 4), (2, 2)], 2).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_samples_with_grids_of_their_own_share_the_largest():
    span = cells_span("image", [torch.arange(6).reshape(2, 3), None, torch.arange(4).reshape(4, 1)])
    assert span.shape == (4, 3)
    assert span.index[0].reshape(4, 3).tolist()[:3] == [[0, 1, 2], [3, 4, 5], [-1, -1, -1]]
    assert (span.index[1] == -1).all()
    assert span.index[2].reshape(4, 3)[:, 0].tolist() == [0, 1, 2, 3]


def test_one_run_for_all_is_a_slice():
    assert compact_index(torch.tensor([[3, 4, 5], [3, 4, 5]])) == slice(3, 6)
    assert isinstance(compact_index(torch.tensor([[3, 5, 4], [3, 5, 4]])), torch.Tensor)
    assert isinstance(compact_index(torch.tensor([[3, 4], [4, 5]])), torch.Tensor)
    assert isinstance(compact_index(torch.tensor([[3, 4], [3, -1]])), torch.Tensor)


def test_a_sample_without_a_photo_shows_nothing():
    geometry = select_images(PixelGeometry.identity(2, (8, 8)), [1, None])
    assert geometry.cells((2, 2))[1].abs().sum() == 0
    assert geometry.cells((2, 2))[0, 3].tolist() == [4, 4, 8, 8]


def test_the_first_module_that_is_there():
    model = nn.Sequential(nn.Linear(1, 1))
    assert module_at(model, "vision.tower", "0") is model[0]
    assert module_at(model, "vision") is None
