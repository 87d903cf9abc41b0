"""A bright square is drawn on a photo, goes through the real processor, and is found again."""

import importlib
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from overt.capture.layouts.processors import image_geometry, tile_geometries, transform_geometry
from overt.capture.layouts.ramp_images import ImageTooSmallError, NotAffineError

transformers = pytest.importorskip("transformers", reason="processors come from transformers")

BOXES = {(120, 187): (83, 41, 117, 78), (300, 91): (28, 131, 66, 170)}  # in photos of these sizes

# The folder of the processor, and what its default arguments are changed to.
ONE_CANVAS = {
    "beit": {},
    "bit": {},
    "blip": {},
    "bridgetower": {},
    "chinese_clip": {},
    "clip": {},
    "convnext": {"size": {"shortest_edge": 224}},  # below 384: a crop of 224 / 256
    "deit": {},
    "detr": {"size": {"shortest_edge": 200, "longest_edge": 333}},
    "donut": {"size": {"height": 256, "width": 192}},
    "dpt": {},
    "efficientnet": {},
    "flava": {},
    "glpn": {},
    "grounding_dino": {"size": {"shortest_edge": 200, "longest_edge": 333}},
    "janus": {},
    "levit": {},
    "llava": {"do_pad": True},
    "mask2former": {"size": {"shortest_edge": 200, "longest_edge": 333}},
    "mobilenet_v2": {},
    "mobilevit": {},
    "owlv2": {"size": {"height": 320, "width": 320}},
    "owlvit": {"size": {"height": 256, "width": 256}},
    "perceiver": {},
    "pixtral": {},
    "poolformer": {},
    "qwen2_vl": {},
    "sam": {"size": {"longest_edge": 320}, "pad_size": {"height": 320, "width": 320}},
    "segformer": {},
    "siglip": {},
    "siglip2": {},
    "swin2sr": {},
    "videomae": {},
    "vilt": {},
    "vit": {},
    "yolos": {"size": {"shortest_edge": 200, "longest_edge": 333}},
}
TILES = {
    "idefics3": {"size": {"longest_edge": 448}, "max_image_size": {"longest_edge": 112}},
    "llava_next": {},
    "llava_onevision": {"size": {"height": 112, "width": 112}},
    "got_ocr2": {"crop_to_patches": True, "size": {"height": 112, "width": 112}},
    "mllama": {},
}


def build(folder, **changes):
    """The processor of one folder of transformers, in the version that needs no torchvision."""
    where = f"transformers.models.{folder}.image_processing_pil_{folder}"
    try:
        module = importlib.import_module(where)
    except ImportError as problem:
        pytest.skip(f"{where} cannot be had without torchvision: {problem}")
    (name,) = {
        n for n, c in vars(module).items() if n.endswith("ProcessorPil") and c.__module__ == where
    }
    return getattr(module, name)(**changes)


def photo(size, box=None):
    pixels = np.full((*size, 3), 40, np.uint8)
    if box is not None:
        x0, y0, x1, y1 = box
        pixels[y0:y1, x0:x1] = 230
    return Image.fromarray(pixels)


def pictures(value):
    if isinstance(value, list | tuple):
        return [p for part in value for p in pictures(part)]
    array = np.asarray(value)
    return [array] if array.ndim == 3 else [p for part in array for p in pictures(part)]


def canvases(processor, picture):
    """What the processor made of one photo, its patches put together by hand."""
    given = processor(images=[picture])
    values = given["pixel_values"]
    if "image_grid_thw" in given:
        _, rows, columns = np.asarray(given["image_grid_thw"])[0]
        side, merge = processor.patch_size, processor.merge_size
        whole = np.zeros((rows * side, columns * side))
        patches = iter(np.asarray(values).reshape(len(values), 3, -1, side, side)[:, 0, 0])
        for r in range(0, rows, merge):
            for c in range(0, columns, merge):
                for y in range(r, r + merge):
                    for x in range(c, c + merge):
                        whole[y * side : (y + 1) * side, x * side : (x + 1) * side] = next(patches)
        return [whole[None]]
    if "spatial_shapes" in given:
        rows, columns = np.asarray(given["spatial_shapes"])[0]
        side = processor.patch_size
        patches = np.asarray(values)[0, : rows * columns].reshape(rows, columns, side, side, 3)
        return [patches.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)]
    return pictures(values)


def share_lit(processor, size, box, canvas, grid):
    """How much of each cell of each tile the square lights up, from 0 to 1."""
    found = []
    white = Image.fromarray(np.full((*size, 3), 230, np.uint8))
    made = (canvases(processor, p) for p in (photo(size), white, photo(size, box)))
    for dark, bright, seen in zip(*made, strict=True):
        gain = np.asarray(bright[0], float) - np.asarray(dark[0], float)
        lit = np.asarray(seen[0], float) - np.asarray(dark[0], float)
        lit = np.where(np.abs(gain) > 1e-6, lit / np.where(gain == 0, 1, gain), 0)
        lit = np.pad(lit, [(0, n - m) for n, m in zip(canvas, lit.shape, strict=True)])
        for axis, count in enumerate(grid):
            lit = np.apply_along_axis(means, axis, lit, count)
        found.append(lit.clip(0, 1).flatten())
    return torch.from_numpy(np.stack(found)).float()


def means(line, count):
    """The means of a row of pixels over so many equal parts."""
    summed = np.interp(
        np.linspace(0, len(line), count + 1), np.arange(len(line) + 1), [0, *line.cumsum()]
    )
    return np.diff(summed) * count / len(line)


def cut(canvas):
    """A grid of cells of about sixteen pixels."""
    return canvas[0] // 16, canvas[1] // 16


@pytest.mark.parametrize("size", BOXES, ids=str)
@pytest.mark.parametrize("folder", ONE_CANVAS)
def test_the_square_is_found_at_the_cells_its_box_covers(folder, size):
    processor = build(folder, **ONE_CANVAS[folder])
    geometry = image_geometry(processor, [size])
    grid, box = cut(geometry.canvas), BOXES[size]
    lit = share_lit(processor, size, box, geometry.canvas, grid)
    cover = geometry.cover_boxes(torch.tensor([[box]], dtype=torch.float32), grid)[0]
    torch.testing.assert_close(lit, cover, rtol=0, atol=0.12)  # filters blur the rim of a square

    mask = torch.zeros(size, dtype=torch.bool)
    mask[box[1] : box[3], box[0] : box[2]] = True
    torch.testing.assert_close(geometry.cover_masks([mask], grid), cover)

    (painted,) = geometry.paint(lit, grid)
    inside = painted[mask].mean()
    assert inside > 0.55
    assert inside > 5 * painted[~mask].mean()

    middle = torch.tensor([[(box[1] + box[3]) / 2, (box[0] + box[2]) / 2]])
    fixated = geometry.density([middle], grid, bandwidth=0.0)[0]
    assert lit[0, fixated.argmax()] > 0.8


@pytest.mark.long
@pytest.mark.parametrize("size", BOXES, ids=str)
@pytest.mark.parametrize("folder", TILES)
def test_the_square_is_found_on_every_tile_it_reaches(folder, size):
    processor = build(folder, **TILES[folder])
    tiles = tile_geometries(processor, [size])
    assert len(tiles.geometries) > 1
    canvas, box = tiles.geometries[0].canvas, BOXES[size]
    grid = cut(canvas)
    lit = share_lit(processor, size, box, canvas, grid)
    boxes = torch.tensor([[box]], dtype=torch.float32)
    cover = torch.cat([geometry.cover_boxes(boxes, grid)[0] for geometry in tiles.geometries])
    torch.testing.assert_close(lit, cover, rtol=0, atol=0.12)
    assert (cover.amax(dim=1) > 0.5).sum() >= 1


def test_a_batch_is_padded_as_the_processor_pads_it():
    processor = build("detr", size={"shortest_edge": 120, "longest_edge": 200})
    sizes = list(BOXES)
    geometry = image_geometry(processor, sizes)
    given = processor([photo(size, BOXES[size]) for size in sizes], return_tensors="pt")
    assert geometry.canvas == tuple(given["pixel_values"].shape[-2:])
    ends = (geometry.size * geometry.scale + geometry.offset).round().long()
    for row, (height, width) in enumerate(ends.tolist()):
        assert int(given["pixel_mask"][row].sum()) == height * width


def expected_of_clip(size, edge=224):
    """CLIP's rule: the shortest edge to 224, the other truncated, then the middle of both."""
    short, long = min(size), max(size)
    other = int(edge * long / short)
    resized = (edge, other) if size[0] <= size[1] else (other, edge)
    return resized, tuple(-((n - edge) // 2) for n in resized)


@pytest.mark.parametrize("size", [(480, 640), (640, 427), (224, 225), (60, 300), (1200, 500)])
def test_the_rule_of_clip_is_met_exactly(size):
    geometry = image_geometry(build("clip"), [size])
    resized, moved = expected_of_clip(size)
    assert (geometry.scale * geometry.size)[0].tolist() == pytest.approx(resized, abs=1e-9)
    assert geometry.offset[0].tolist() == pytest.approx(moved, abs=1e-9)


def test_the_sizes_of_sam_are_those_it_reports():
    processor = build("sam")
    for size in [(111, 47)]:
        given = processor(photo(size))
        geometry = image_geometry(processor, [size])
        resized = (geometry.scale * geometry.size)[0].round().long().tolist()
        assert resized == np.asarray(given["reshaped_input_sizes"])[0].tolist()
        assert geometry.offset.tolist() == [[0, 0]]


def test_a_processor_of_pictures_and_text_is_asked_for_its_pictures():
    class Both:
        image_processor = build("clip")

    assert image_geometry(Both(), [(90, 140)]).canvas == (224, 224)


def test_settings_of_a_call_are_bound_to_the_processor():
    bound = partial(build("clip"), do_center_crop=False)
    assert image_geometry(bound, [(100, 200)]).canvas == (224, 448)


def test_tiles_are_not_one_geometry():
    with pytest.raises(ValueError, match="tile_geometries"):
        image_geometry(build("llava_next"), [(90, 140)])


def test_what_gives_no_pictures_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"pixel_values.*hand"):
        image_geometry(build("pix2struct"), [(90, 140)])
    with pytest.raises(ValueError, match="single image"):
        image_geometry(build("lightglue"), [(90, 140)])
    with pytest.raises(NotAffineError, match=r"Nougat.*crop"):
        image_geometry(build("nougat"), [(90, 140)])  # cuts away what is blank


def as_timm(picture):
    """What timm does for evaluation: resize the short side, cut the middle, then a tensor."""
    scale = 256 / min(picture.size)
    picture = picture.resize([int(n * scale) for n in picture.size], Image.Resampling.BICUBIC)
    left, top = ((n - 224) // 2 for n in picture.size)
    pixels = np.asarray(picture.crop((left, top, left + 224, top + 224)), dtype=np.float32)
    return (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - 0.45) / 0.22


def test_any_transform_of_a_picture_has_its_geometry_measured():
    geometry = transform_geometry(as_timm, [(300, 500), (400, 256)])
    assert (geometry.scale * geometry.size).tolist() == [[256, 426], [400, 256]]
    assert geometry.offset.tolist() == [[-16, -101], [-88, -16]]


def test_a_transform_may_give_a_picture_back():
    geometry = transform_geometry(lambda picture: picture.resize((64, 32)), [(300, 500)])
    assert geometry.canvas == (32, 64)


def test_a_transform_that_tosses_a_coin_is_refused():
    def transform(picture):
        turned = bool(torch.rand(()) < 0.5)
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if turned else picture

    torch.manual_seed(0)
    with pytest.raises(NotAffineError, match="random"):
        transform_geometry(transform, [(60, 100)])


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (1, 3000), (300, 1), (5, 300)])
def test_a_photo_too_small_to_measure_is_no_fault_of_the_processor(size):
    with pytest.raises(ImageTooSmallError, match=r"too small .*ViT") as refused:
        image_geometry(build("vit"), [size])
    said = str(refused.value)
    assert f"it has {size[0]} x {size[1]} pixels, too few" in said and "larger" in said
    assert "more to a photo" not in said and "turned" not in said


def test_a_small_photo_does_not_hide_a_transform_that_is_random():
    def transform(picture):
        return picture.resize((32, 32)).rotate(90 * int(torch.randint(4, ())))

    torch.manual_seed(0)
    with pytest.raises(NotAffineError, match="random") as refused:
        transform_geometry(transform, [(12, 16)])
    assert not isinstance(refused.value, ImageTooSmallError)


def test_a_thin_photo_is_refused_before_a_processor_enlarges_it():
    from overt.capture.layouts import processors
    from overt.data.images import MAX_RATIO

    assert processors.MAX_ASPECT_RATIO == MAX_RATIO

    def never(*args, **kwargs):
        raise AssertionError("it was called")

    for size in ((1, 300_000), (300_000, 1)):
        with pytest.raises(
            ImageTooSmallError,
            match=r"300000.*too few",
        ):
            image_geometry(never, [size])
        with pytest.raises(
            ImageTooSmallError,
            match=r"300000.*too few",
        ):
            transform_geometry(never, [size])
