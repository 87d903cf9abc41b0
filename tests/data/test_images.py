import io
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from overt.data.images import FORMATS, GREY, crop, fit, load, open_image, prepare, stretch
from overt.errors import BadInput, Damaged

SIDES = st.integers(1, 40)


def picture(height: int = 12, width: int = 20) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=-1).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_header(height: int, width: int) -> bytes:
    """A PNG that promises height x width pixels and holds none."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", body), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def attempt(source) -> tuple[str | None, np.ndarray | None]:
    """Either the sentence of a refusal or the pixels; any other exception is a defect."""
    try:
        return None, open_image(source, most_pixels=1_000_000)[0]
    except (Damaged, BadInput) as problem:
        return str(problem), None


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_pixels_come_back(tmp_path, kind, options):
    path = tmp_path / "photo.jpg"  # the name's ending says nothing
    path.write_bytes(encoded(Image.fromarray(picture()), kind, **options))
    for source in (path, str(path), path.read_bytes()):
        pixels, size = open_image(source)
        assert np.array_equal(pixels, picture()) and size == (12, 20)


def test_jpeg_agrees_with_pillow():
    data = encoded(Image.fromarray(picture()), "JPEG", quality=90)
    expected = np.asarray(Image.open(io.BytesIO(data)))
    assert np.array_equal(open_image(data)[0], expected)


GREYS = picture()[..., 0]


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (Image.fromarray(GREYS), "PNG"),
        (Image.fromarray(GREYS), "JPEG"),
        (Image.fromarray(GREYS).convert("P"), "PNG"),
        (Image.fromarray(GREYS).convert("RGBA"), "PNG"),
        (Image.fromarray(GREYS).convert("LA"), "PNG"),
        (Image.fromarray(GREYS.astype(np.uint16) * 257), "PNG"),
        (Image.fromarray(GREYS).convert("RGB").convert("CMYK"), "JPEG"),
        (Image.fromarray(GREYS).convert("RGBA"), "WEBP"),
    ],
    ids=["L", "L jpeg", "P", "RGBA", "LA", "16 bit", "CMYK jpeg", "RGBA webp"],
)
def test_one_picture_in_any_mode_decodes_alike(image, kind):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "JPEG" else {}
    pixels, size = open_image(encoded(image, kind, **options))
    assert pixels.dtype == np.uint8 and pixels.shape == (12, 20, 3) and size == (12, 20)
    grey = np.repeat(GREYS[..., None], 3, axis=-1).astype(int)
    assert np.abs(pixels.astype(int) - grey).max() <= (6 if kind == "JPEG" else 0)


def test_black_and_white_is_two_colours():
    pixels, _ = open_image(encoded(Image.fromarray(GREYS > 100)))
    assert np.array_equal(pixels, np.where(GREYS > 100, 255, 0)[..., None].repeat(3, -1))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_what_is_transparent_is_white(kind):
    above = np.zeros((2, 2, 4), np.uint8)
    above[0, 0] = (10, 20, 30, 255)
    above[1, 1] = (0, 0, 0, 128)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    pixels, _ = open_image(encoded(Image.fromarray(above), kind, **options))
    assert pixels[0, 0].tolist() == [10, 20, 30] and pixels[0, 1].tolist() == [255] * 3
    assert pixels[1, 1].tolist() == [127] * 3


def test_a_transparent_colour_of_a_palette_and_of_rgb_is_white():
    flat = Image.fromarray(np.array([[0, 1]], np.uint8))
    flat.putpalette([9, 9, 9, 50, 60, 70])
    assert open_image(encoded(flat, transparency=0))[0].tolist() == [[[255] * 3, [50, 60, 70]]]
    colour = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    found = open_image(encoded(colour, transparency=(1, 2, 3)))[0]
    assert found.tolist() == [[[255] * 3, [4, 5, 6]]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_photos_stand_upright(orientation, kind):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(picture()), kind, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    pixels, size = open_image(data)
    assert np.array_equal(pixels, expected)
    assert size == ((20, 12) if orientation >= 5 else (12, 20))


def test_a_broken_note_about_the_camera_does_not_break_the_picture():
    data = encoded(Image.fromarray(picture()), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert open_image(data)[1] == (12, 20)


def test_one_pixel():
    assert open_image(encoded(Image.new("RGB", (1, 1), (7, 8, 9))))[0].tolist() == [[[7, 8, 9]]]


def test_a_moving_picture_is_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for kind in ("PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert open_image(data)[0][0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_off_anywhere_is_refused_or_the_whole_picture(tmp_path, kind):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    data = encoded(image, kind)
    whole, _ = open_image(data)
    path = tmp_path / "cut"
    refused = 0
    for length in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:length])
        problem, pixels = attempt(path)
        if problem is not None:
            assert str(path) in problem
            refused += 1
        else:  # only a closing mark is missing
            assert np.array_equal(pixels, whole)
    assert refused > 40


@pytest.mark.parametrize("kind", FORMATS)
def test_half_a_photo_is_damaged(kind):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = encoded(image, kind)
    with pytest.raises(Damaged, match=kind):
        open_image(data[: len(data) // 2])


def test_200_mutated_pictures_are_refused_in_a_sentence_or_decoded():
    dice = random.Random(0)
    image = Image.fromarray(picture(24, 24))
    originals = [encoded(image, kind) for kind in FORMATS] + [
        encoded(image.convert(mode), kind)
        for mode, kind in [("P", "PNG"), ("RGBA", "WEBP"), ("CMYK", "JPEG"), ("L", "PNG")]
    ]
    refused = decoded = 0
    for _ in range(200):
        data = bytearray(dice.choice(originals))
        for _ in range(dice.randint(1, 3)):
            match dice.choice([0, 0, 0, 1, 2, 3]):
                case 0:
                    data[dice.randrange(len(data))] = dice.randrange(256)
                case 1:
                    del data[dice.randrange(len(data)) :]
                case 2:
                    at = dice.randrange(len(data))
                    data[at:at] = dice.randbytes(dice.randint(1, 9))
                case 3:
                    at = dice.randrange(len(data))
                    data[at : at + 4] = b"\xff\xff\xff\xff"
            data = data or bytearray(b"\0")
        problem, pixels = attempt(bytes(data))
        if problem is not None:
            assert "\n" not in problem and problem.endswith(".")
            refused += 1
        else:
            assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
            decoded += 1
    assert refused > 50 and decoded > 10


def test_a_changed_byte_of_a_png_never_changes_a_pixel():
    data = encoded(Image.fromarray(picture()))
    whole, _ = open_image(data)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x10
        problem, pixels = attempt(bytes(changed))
        assert problem is not None or np.array_equal(pixels, whole), place


@pytest.mark.parametrize(("height", "width"), [(10_000, 10_000), (60_000, 60_000), (2**31 - 1, 9)])
def test_a_bomb_is_refused_before_it_is_decoded(tmp_path, height, width):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(height, width))
    with pytest.raises(BadInput, match=r"bomb\.png"):
        open_image(path)


def test_the_cap_is_on_pixels():
    data = encoded(Image.fromarray(picture()))
    assert open_image(data, most_pixels=240)[1] == (12, 20)
    with pytest.raises(BadInput, match="12 x 20"):
        open_image(data, most_pixels=239)


def test_a_text_bomb_is_damaged():
    squeezed = zlib.compress(b"a" * 100_000_000)
    body = b"note\0\0" + squeezed
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + body))
    data = encoded(Image.fromarray(picture()))
    with pytest.raises(Damaged):
        open_image(data[:33] + chunk + data[33:])


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM"])
def test_other_kinds_are_refused(tmp_path, kind):
    path = tmp_path / "photo.png"
    path.write_bytes(encoded(Image.fromarray(picture()), kind))
    with pytest.raises(BadInput, match="JPEG, PNG or WEBP"):
        open_image(path)


def test_no_file_a_folder_and_an_empty_file(tmp_path):
    empty = tmp_path / "empty.png"
    empty.touch()
    with pytest.raises(Damaged, match=r"empty\.png"):
        open_image(empty)
    for path in (tmp_path, tmp_path / "none.png", "a\0b.png"):
        with pytest.raises(BadInput):
            open_image(path)
    with pytest.raises(Damaged):
        open_image(b"")


@pytest.mark.parametrize("how", [stretch, crop, fit])
@settings(max_examples=40)
@given(st.tuples(SIDES, SIDES), st.tuples(SIDES, SIDES))
def test_canvas_has_its_size_and_the_geometry_agrees(how, photo, size):
    canvas, geometry = prepare(picture(*photo), size, how)
    assert canvas.shape == (3, *size) and canvas.dtype == torch.uint8
    assert geometry.canvas == size and geometry.size.tolist() == [list(photo)]


@pytest.mark.parametrize("how", [stretch, crop, fit])
@pytest.mark.parametrize("photo", [(60, 90), (90, 60), (31, 97)])
def test_a_mark_lands_where_the_geometry_says(how, photo):
    image = np.zeros((*photo, 3), np.uint8)
    y, x = photo[0] // 2 + 3, photo[1] // 2 - 4
    image[y - 3 : y + 4, x - 3 : x + 4] = 255
    canvas, geometry = prepare(image, (48, 64), how)
    bright = (canvas[0] > 160).nonzero().float().mean(dim=0) + 0.5
    expected = torch.tensor([y + 0.5, x + 0.5]).double() * geometry.scale[0] + geometry.offset[0]
    torch.testing.assert_close(bright.double(), expected, atol=0.8, rtol=0)


def test_how_by_hand():
    image = np.zeros((4, 8, 3), np.uint8)
    canvas, geometry = prepare(image, (4, 4), crop)
    assert geometry.scale.tolist() == [[1, 1]] and geometry.offset.tolist() == [[0, -2]]
    canvas, geometry = prepare(image, (8, 8), fit)
    assert geometry.scale.tolist() == [[1, 1]] and geometry.offset.tolist() == [[2, 0]]
    assert canvas[0, :, 0].tolist() == [GREY] * 2 + [0] * 4 + [GREY] * 2
    canvas, geometry = prepare(image, (8, 4), stretch)
    assert geometry.scale.tolist() == [[2, 0.5]] and geometry.offset.tolist() == [[0, 0]]


def test_a_photo_of_the_right_size_is_left_alone():
    for how in (stretch, crop, fit):
        canvas, _ = prepare(picture(), (12, 20), how)
        assert np.array_equal(canvas.permute(1, 2, 0).numpy(), picture())


def test_impossible_canvas():
    with pytest.raises(BadInput):
        prepare(picture(), (0, 5))


def test_several_files_become_one_batch(tmp_path):
    paths = []
    for number, side in enumerate([(10, 20), (30, 5)]):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(picture(*side)).save(paths[-1])
    images, geometry = load(paths, (16, 16), fit)
    assert images.shape == (2, 3, 16, 16) and geometry.size.tolist() == [[10, 20], [30, 5]]
    with pytest.raises(BadInput, match="No photo"):
        load([], (16, 16))


def test_what_cannot_be_decoded_is_said_without_objects_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    with pytest.raises(Damaged, match=r"broken.png cannot be decoded as PNG \(.*\)\.$") as found:
        open_image(path)
    assert "object at" not in str(found.value)
