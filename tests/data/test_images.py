import errno
import inspect
import io
import os
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from overt.data import images
from overt.data.images import (
    FORMATS,
    GREY,
    Size,
    crop,
    fit,
    load_images,
    open_image,
    prepare_image,
    stretch,
)
from overt.errors import CorruptFileError, RunError, UserError

SIDES = st.integers(1, 40)


def make_image(height: int = 12, width: int = 20) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=-1).astype(np.uint8)


def encode_image(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_header(height: int, width: int) -> bytes:
    """A PNG whose header has height x width pixels and whose data is empty."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", body), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def try_open(source) -> tuple[str | None, np.ndarray | None]:
    """The error message or the pixels; any other exception is a bug."""
    try:
        return None, open_image(source, most_pixels=1_000_000)[0]
    except (CorruptFileError, UserError) as problem:
        return str(problem), None


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_lossless_formats_keep_the_pixels(tmp_path, kind, options):
    path = tmp_path / "photo.jpg"  # the file extension is ignored
    path.write_bytes(encode_image(Image.fromarray(make_image()), kind, **options))
    for source in (path, str(path), path.read_bytes()):
        pixels, size = open_image(source)
        assert np.array_equal(pixels, make_image()) and size == (12, 20)


def test_jpeg_agrees_with_pillow():
    data = encode_image(Image.fromarray(make_image()), "JPEG", quality=90)
    expected = np.asarray(Image.open(io.BytesIO(data)))
    assert np.array_equal(open_image(data)[0], expected)


GREYS = make_image()[..., 0]


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
def test_every_image_mode_decodes_to_the_same_rgb(image, kind):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "JPEG" else {}
    pixels, size = open_image(encode_image(image, kind, **options))
    assert pixels.dtype == np.uint8 and pixels.shape == (12, 20, 3) and size == (12, 20)
    grey = np.repeat(GREYS[..., None], 3, axis=-1).astype(int)
    assert np.abs(pixels.astype(int) - grey).max() <= (6 if kind == "JPEG" else 0)


def test_1_bit_image_decodes_to_black_and_white():
    pixels, _ = open_image(encode_image(Image.fromarray(GREYS > 100)))
    assert np.array_equal(pixels, np.where(GREYS > 100, 255, 0)[..., None].repeat(3, -1))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_pixels_become_white(kind):
    above = np.zeros((2, 2, 4), np.uint8)
    above[0, 0] = (10, 20, 30, 255)
    above[1, 1] = (0, 0, 0, 128)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    pixels, _ = open_image(encode_image(Image.fromarray(above), kind, **options))
    assert pixels[0, 0].tolist() == [10, 20, 30] and pixels[0, 1].tolist() == [255] * 3
    assert pixels[1, 1].tolist() == [127] * 3


def test_transparent_colour_of_palette_and_rgb_becomes_white():
    flat = Image.fromarray(np.array([[0, 1]], np.uint8))
    flat.putpalette([9, 9, 9, 50, 60, 70])
    assert open_image(encode_image(flat, transparency=0))[0].tolist() == [[[255] * 3, [50, 60, 70]]]
    colour = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    found = open_image(encode_image(colour, transparency=(1, 2, 3)))[0]
    assert found.tolist() == [[[255] * 3, [4, 5, 6]]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation_is_applied(orientation, kind):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_image(Image.fromarray(make_image()), kind, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    pixels, size = open_image(data)
    assert np.array_equal(pixels, expected)
    assert size == ((20, 12) if orientation >= 5 else (12, 20))


def test_corrupt_exif_data_is_ignored():
    data = encode_image(
        Image.fromarray(make_image()), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"
    )
    assert open_image(data)[1] == (12, 20)


def test_image_of_one_pixel():
    assert open_image(encode_image(Image.new("RGB", (1, 1), (7, 8, 9))))[0].tolist() == [
        [[7, 8, 9]]
    ]


def test_animated_image_gives_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for kind in ("PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encode_image(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert open_image(data)[0][0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", FORMATS)
def test_truncated_file_raises_or_gives_all_pixels(tmp_path, kind):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    data = encode_image(image, kind)
    expected, _ = open_image(data)
    path = tmp_path / "cut"
    rejected = 0
    for length in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:length])
        problem, pixels = try_open(path)
        if problem is not None:
            assert str(path) in problem
            rejected += 1
        else:  # only the end marker is missing
            assert np.array_equal(pixels, expected)
    assert rejected > 40


@pytest.mark.parametrize("kind", FORMATS)
def test_half_a_file_raises(kind):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    data = encode_image(image, kind)
    with pytest.raises(CorruptFileError, match=kind):
        open_image(data[: len(data) // 2])


def test_mutated_images_raise_one_sentence_or_decode():
    rng = random.Random(0)
    image = Image.fromarray(make_image(24, 24))
    originals = [encode_image(image, kind) for kind in FORMATS] + [
        encode_image(image.convert(mode), kind)
        for mode, kind in [("P", "PNG"), ("RGBA", "WEBP"), ("CMYK", "JPEG"), ("L", "PNG")]
    ]
    rejected = decoded = 0
    for _ in range(200):
        data = bytearray(rng.choice(originals))
        for _ in range(rng.randint(1, 3)):
            match rng.choice([0, 0, 0, 1, 2, 3]):
                case 0:
                    data[rng.randrange(len(data))] = rng.randrange(256)
                case 1:
                    del data[rng.randrange(len(data)) :]
                case 2:
                    at = rng.randrange(len(data))
                    data[at:at] = rng.randbytes(rng.randint(1, 9))
                case 3:
                    at = rng.randrange(len(data))
                    data[at : at + 4] = b"\xff\xff\xff\xff"
            data = data or bytearray(b"\0")
        problem, pixels = try_open(bytes(data))
        if problem is not None:
            assert "\n" not in problem and problem.endswith(".")
            rejected += 1
        else:
            assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
            decoded += 1
    assert rejected > 50 and decoded > 10


def test_changed_byte_of_a_png_never_changes_pixels():
    data = encode_image(Image.fromarray(make_image()))
    expected, _ = open_image(data)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x10
        problem, pixels = try_open(bytes(changed))
        assert problem is not None or np.array_equal(pixels, expected), place


@pytest.mark.parametrize(("height", "width"), [(10_000, 10_000), (60_000, 60_000), (2**31 - 1, 9)])
def test_decompression_bomb_raises_before_decoding(tmp_path, height, width):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(height, width))
    with pytest.raises(UserError, match=r"bomb\.png"):
        open_image(path)


def test_most_pixels_limits_the_number_of_pixels():
    data = encode_image(Image.fromarray(make_image()))
    assert open_image(data, most_pixels=240)[1] == (12, 20)
    with pytest.raises(UserError, match="12 x 20"):
        open_image(data, most_pixels=239)


def test_compressed_text_bomb_raises():
    compressed = zlib.compress(b"a" * 100_000_000)
    body = b"note\0\0" + compressed
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + body))
    data = encode_image(Image.fromarray(make_image()))
    with pytest.raises(CorruptFileError):
        open_image(data[:33] + chunk + data[33:])


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM"])
def test_unsupported_formats_raise(tmp_path, kind):
    path = tmp_path / "photo.png"
    path.write_bytes(encode_image(Image.fromarray(make_image()), kind))
    with pytest.raises(UserError, match="JPEG, PNG or WEBP"):
        open_image(path)


def test_missing_files_folders_and_empty_files_raise(tmp_path):
    empty = tmp_path / "empty.png"
    empty.touch()
    with pytest.raises(CorruptFileError, match=r"empty\.png"):
        open_image(empty)
    for path in (tmp_path, tmp_path / "none.png", "a\0b.png"):
        with pytest.raises(UserError):
            open_image(path)
    with pytest.raises(CorruptFileError):
        open_image(b"")


def test_pipes_devices_and_large_files_raise_before_they_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    for name in ("pipe.png", "endless.png"):
        with pytest.raises(UserError, match="regular file"):
            open_image(tmp_path / name)
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    (tmp_path / "large.png").write_bytes(bytes(101))
    with pytest.raises(UserError, match="101 bytes.*100"):
        open_image(tmp_path / "large.png")


@pytest.mark.parametrize("resize", [stretch, crop, fit])
@settings(max_examples=40)
@given(st.tuples(SIDES, SIDES), st.tuples(SIDES, SIDES))
def test_canvas_has_the_requested_size_and_matching_geometry(resize, photo, size):
    canvas, geometry = prepare_image(make_image(*photo), size, resize)
    assert canvas.shape == (3, *size) and canvas.dtype == torch.uint8
    assert geometry.canvas == size and geometry.size.tolist() == [list(photo)]


@pytest.mark.parametrize("resize", [stretch, crop, fit])
@pytest.mark.parametrize("photo", [(60, 90), (90, 60), (31, 97)])
def test_geometry_maps_photo_points_to_the_canvas(resize, photo):
    image = np.zeros((*photo, 3), np.uint8)
    y, x = photo[0] // 2 + 3, photo[1] // 2 - 4
    image[y - 3 : y + 4, x - 3 : x + 4] = 255
    canvas, geometry = prepare_image(image, (48, 64), resize)
    bright = (canvas[0] > 160).nonzero().float().mean(dim=0) + 0.5
    expected = torch.tensor([y + 0.5, x + 0.5]).double() * geometry.scale[0] + geometry.offset[0]
    torch.testing.assert_close(bright.double(), expected, atol=0.8, rtol=0)


def test_scale_and_offset_match_hand_computed_values():
    image = np.zeros((4, 8, 3), np.uint8)
    canvas, geometry = prepare_image(image, (4, 4), crop)
    assert geometry.scale.tolist() == [[1, 1]] and geometry.offset.tolist() == [[0, -2]]
    canvas, geometry = prepare_image(image, (8, 8), fit)
    assert geometry.scale.tolist() == [[1, 1]] and geometry.offset.tolist() == [[2, 0]]
    assert canvas[0, :, 0].tolist() == [GREY] * 2 + [0] * 4 + [GREY] * 2
    canvas, geometry = prepare_image(image, (8, 4), stretch)
    assert geometry.scale.tolist() == [[2, 0.5]] and geometry.offset.tolist() == [[0, 0]]


def test_photo_of_the_canvas_size_is_unchanged():
    for resize in (stretch, crop, fit):
        canvas, _ = prepare_image(make_image(), (12, 20), resize)
        assert np.array_equal(canvas.permute(1, 2, 0).numpy(), make_image())


def test_empty_canvas_raises():
    with pytest.raises(UserError):
        prepare_image(make_image(), (0, 5))


def test_load_images_batches_several_files(tmp_path):
    paths = []
    for number, side in enumerate([(10, 20), (30, 5)]):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(make_image(*side)).save(paths[-1])
    images, geometry = load_images(paths, (16, 16), fit)
    assert images.shape == (2, 3, 16, 16) and geometry.size.tolist() == [[10, 20], [30, 5]]
    with pytest.raises(UserError, match="No photo"):
        load_images([], (16, 16))


def test_decoding_error_message_contains_no_object_repr(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    with pytest.raises(CorruptFileError, match=r"broken\.png.*PNG \(.*\)\.$") as found:
        open_image(path)
    assert "object at" not in str(found.value)


# Images with an extreme aspect ratio


def encode_thin_image(height: int, width: int) -> bytes:
    return encode_image(Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8)))


@pytest.mark.parametrize("size", [(1, 300_000), (300_000, 1), (2, 201)])
def test_extreme_aspect_ratio_raises_before_decoding(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode_thin_image(*size)
    monkeypatch.setattr(Image.Image, "load", lambda *args: pytest.fail("the image was decoded"))
    with pytest.raises(UserError, match=rf"{size[0]} x {size[1]} pixels.* 100"):
        open_image(data)


def test_most_ratio_allows_a_larger_aspect_ratio() -> None:
    assert open_image(encode_thin_image(2, 200))[1] == (2, 200)
    assert open_image(encode_thin_image(1, 3000), most_ratio=3000)[1] == (1, 3000)


LIMITED_MEMORY_SCRIPT = """
import resource, sys
import numpy as np
from PIL import Image
from overt.data.images import crop, fit, prepare_image, stretch
Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).resize((2, 2), Image.Resampling.BICUBIC)
height, width, resize = int(sys.argv[1]), int(sys.argv[2]), globals()[sys.argv[3]]
photo = np.full((height, width, 3), 7, dtype=np.uint8)
prepare_image(photo[:4, :4], (8, 8))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 10**8, used + 3 * 10**8))
canvas, geometry = prepare_image(photo, (224, 224), resize)
print(tuple(canvas.shape), int(canvas.min() if resize is not fit else canvas.max()))
"""


@pytest.mark.long
@pytest.mark.parametrize("resize", ["crop", "stretch", "fit"])
@pytest.mark.parametrize("size", [(1, 300_000), (300_000, 1), (3_000_000, 1), (1, 3_000_000)])
def test_resizing_a_thin_image_needs_little_memory(size: Size, resize: str) -> None:
    """300 MB are enough; an image of 67 million pixels or more is not allocated."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED_MEMORY_SCRIPT, str(size[0]), str(size[1]), resize],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("(3, 224, 224) "), done.stderr


@pytest.mark.parametrize("size", [(3, 90), (90, 3), (40, 60), (7, 500)])
def test_low_memory_crop_gives_the_same_result(size: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    # far from 0 and 255, where bicubic clips and the order of rows and columns matters
    photo = np.random.default_rng(0).integers(90, 160, (*size, 3), dtype=np.uint8)
    expected, geometry = crop(photo, (32, 24))
    flat, _ = stretch(photo, (32, 24))
    monkeypatch.setattr(images, "MAX_RESIZED", 0)
    part, place = crop(photo, (32, 24))
    assert np.abs(part.astype(int) - expected).max() <= 2
    torch.testing.assert_close(place.cells((4, 4)), geometry.cells((4, 4)))
    again, _ = stretch(photo, (32, 24))
    assert np.abs(again.astype(int) - flat).max() <= 2  # rows and columns in the other order


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE, errno.EIO])
def test_system_errors_raise_run_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode_thin_image(4, 4))

    def fail(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "load", fail)
        with pytest.raises(RunError, match=r"a\.png.*decoded"):
            open_image(path)
    monkeypatch.setattr(images.system, "open_nonblocking", fail)
    with pytest.raises(RunError, match=r"a\.png.*read"):
        open_image(path)


@pytest.mark.parametrize("resize", [images.crop, images.fit, images.stretch])
def test_photos_and_sizes_of_another_kind_raise(resize: Any) -> None:
    unchecked = inspect.unwrap(resize)  # without the type checks of the test suite
    photo = np.zeros((6, 8, 3), np.uint8)
    with pytest.raises(TypeError, match=r"float64.*open_image"):
        unchecked(photo / 255, (4, 4))
    with pytest.raises(TypeError, match=r"str.*open_image"):
        unchecked("cat.png", (4, 4))
    with pytest.raises(TypeError, match=r"size.*got 4"):
        unchecked(photo, 4)
