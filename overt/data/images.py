"""Loading of photos to a model's canvas, with the geometry that maps back to the photo.

Every image of a user is opened by `open_image`, so that hostile or broken files are handled in one
place: three formats detected by content, limits on pixels and aspect ratio before decoding, no
partial images, and an error that names the file. Resizing takes no more memory than the largest of
the image, its canvas and 16 million pixels: enlarging an image of 300,000 x 1 until it covers a
canvas would take 14 GB.
"""

import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Sequence
from errno import EIO, EMFILE, ENFILE, ENOMEM
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from overt import system
from overt.errors import CorruptFileError, RunError, UserError, missing_resource
from overt.geometry import PixelGeometry

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 50_000_000
MAX_BYTES = 2**29  # of a file: more than 50 million pixels of 16 bits take
MAX_RATIO = 100  # longer to shorter side: processors enlarge until the shorter side fits
MAX_RESIZED = 2**24  # pixels of an intermediate image that is larger than its canvas
GREY = 127  # padding around a photo that does not fill the canvas

Photo = UInt8[np.ndarray, "_ _ 3"]  # height, width, red green blue
Size = tuple[int, int]
Resize = Callable[[Photo, Size], tuple[Photo, PixelGeometry]]


def open_image(
    source: Path | str | bytes, most_pixels: int = MAX_PIXELS, most_ratio: int = MAX_RATIO
) -> tuple[Photo, Size]:
    """Open a JPEG, PNG or WEBP image as upright 8-bit RGB.

    Grey, palette, CMYK and 16-bit images are converted; transparent ones are laid over white; of an
    animation the first frame is used. The size is that of the upright image, in which boxes and
    fixations are given.

    Args:
        source: Path, or the bytes of a file.
        most_pixels: Largest number of pixels.
        most_ratio: Largest ratio of the longer to the shorter side.

    Returns:
        The pixels (height, width, 3) and the size (height, width).

    Raises:
        UserError: The file is missing, is not a regular file, is too large, has another format, too
            many pixels or too extreme an aspect ratio; this is checked before decoding.
        CorruptFileError: The file is empty, broken or truncated.

    Example:
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("L", (8, 6), 255).save(file, format="PNG")
        >>> pixels, size = open_image(file.getvalue())
        >>> pixels.shape, size
        ((6, 8, 3), (6, 8))
    """
    name, data = _read(source)
    kind = _kind(data)
    if not data:
        raise CorruptFileError(f"{name} is empty; replace it.")
    if kind is None:
        raise UserError(f"{name} is not an image in a supported format: use JPEG, PNG or WEBP.")
    from PIL.Image import DecompressionBombError

    try:
        with warnings.catch_warnings():  # Pillow's warnings are raised below as errors, or harmless
            warnings.simplefilter("ignore")
            pixels = _decode(name, data, kind, most_pixels, most_ratio)
    except (UserError, MemoryError):
        raise
    except DecompressionBombError as problem:
        raise UserError(f"{name} has too many pixels: {problem}") from problem
    except Exception as problem:  # Pillow's decoders raise a dozen types
        if lacked := missing_resource(problem):
            raise RunError(f"{name} could not be decoded: {lacked}.") from problem
        raise CorruptFileError(
            f"{name} cannot be decoded as {kind} ({_reason(problem)})."
        ) from problem
    return pixels, (pixels.shape[0], pixels.shape[1])


def stretch(image: Photo, size: Size) -> tuple[Photo, PixelGeometry]:
    """Resize the whole photo to the canvas; its aspect ratio is not kept.

    Args:
        image: The photo (rows, columns, 3), uint8.
        size: Rows and columns of the canvas.

    Returns:
        The canvas, and the geometry that leads back to the photo.

    Raises:
        TypeError: The photo is not such an array, or the size is not a pair.

    Example:
        >>> photo = np.zeros((40, 80, 3), dtype=np.uint8)
        >>> canvas, geometry = stretch(photo, (32, 32))
        >>> canvas.shape
        (32, 32, 3)
    """
    _check_photo(image, size)
    before = PixelGeometry.identity(1, (image.shape[0], image.shape[1]))
    return _resize(image, size), before.resize(size)


def crop(image: Photo, size: Size) -> tuple[Photo, PixelGeometry]:
    """Scale the photo until it covers the canvas, and cut out the centre.

    Args:
        image: The photo (rows, columns, 3), uint8.
        size: Rows and columns of the canvas.

    Returns:
        The canvas, and the geometry that leads back to the photo.

    Raises:
        TypeError: The photo is not such an array, or the size is not a pair.

    Example:
        >>> photo = np.zeros((40, 80, 3), dtype=np.uint8)
        >>> canvas, geometry = crop(photo, (32, 32))
        >>> canvas.shape
        (32, 32, 3)
    """
    _check_photo(image, size)
    height, width = image.shape[:2]
    scale = max(size[0] / height, size[1] / width)
    whole = (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    top, left = (whole[0] - size[0]) // 2, (whole[1] - size[1]) // 2
    geometry = PixelGeometry.identity(1, (height, width)).resize(whole).crop(top, left, *size)
    if whole[0] * whole[1] > max(MAX_RESIZED, 4 * size[0] * size[1]):
        return _window(image, whole, (top, left), size), geometry
    return _resize(image, whole)[top : top + size[0], left : left + size[1]], geometry


def fit(image: Photo, size: Size) -> tuple[Photo, PixelGeometry]:
    """Scale the whole photo to fit into the canvas, and pad with grey.

    Args:
        image: The photo (rows, columns, 3), uint8.
        size: Rows and columns of the canvas.

    Returns:
        The canvas, and the geometry that leads back to the photo.

    Raises:
        TypeError: The photo is not such an array, or the size is not a pair.

    Example:
        >>> photo = np.zeros((40, 80, 3), dtype=np.uint8)
        >>> canvas, geometry = fit(photo, (32, 32))
        >>> canvas.shape
        (32, 32, 3)
    """
    _check_photo(image, size)
    height, width = image.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    whole = tuple(
        min(limit, max(1, round(side * scale)))
        for limit, side in zip(size, (height, width), strict=True)
    )
    top, left = (size[0] - whole[0]) // 2, (size[1] - whole[1]) // 2
    resized, geometry = stretch(image, (whole[0], whole[1]))
    canvas = np.full((*size, 3), GREY, dtype=np.uint8)
    canvas[top : top + whole[0], left : left + whole[1]] = resized
    return canvas, geometry.pad(top, left, size[0] - whole[0] - top, size[1] - whole[1] - left)


def _check_photo(image: Any, size: Any) -> None:
    """Raise unless these are a photo and a size; Pillow's own errors name neither."""
    if not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] == (3,)):
        found = getattr(image, "shape", None)
        about = type(image).__name__ if found is None else f"{tuple(found)} of {image.dtype}"
        raise TypeError(
            f"expected a photo as a uint8 array (height, width, 3), got {about}: "
            "overt.data.images.open_image(path) reads one"
        )
    if not (isinstance(size, tuple | list) and len(size) == 2):
        raise TypeError(f"size must be (height, width), got {size!r}")


def prepare_image(
    image: Photo, size: Size, resize: Resize = crop
) -> tuple[UInt8[Tensor, "3 y x"], PixelGeometry]:
    """Return a photo resized to a canvas of `size` = (height, width), and the geometry.

    Args:
        image: The photo (rows, columns, 3), uint8.
        size: Rows and columns of the canvas.
        resize: How the photo gets onto the canvas: `crop`, `fit` or `stretch`.

    Returns:
        The image, and the geometry that leads back to the photo.

    Raises:
        UserError: The photo or the canvas is empty.

    Example:
        >>> image, geometry = prepare_image(np.zeros((40, 80, 3), dtype=np.uint8), (32, 32))
        >>> image.shape
        torch.Size([3, 32, 32])
    """
    if min(size) < 1 or min(image.shape[:2]) < 1:
        raise UserError(f"A photo of {image.shape[:2]} pixels cannot be resized to {size}.")
    canvas, geometry = resize(image, size)
    return torch.from_numpy(np.ascontiguousarray(canvas.transpose(2, 0, 1))), geometry


def load_images(
    paths: Sequence[Path], size: Size, resize: Resize = crop
) -> tuple[UInt8[Tensor, "i 3 y x"], PixelGeometry]:
    """Load several files to one canvas size, ready for a `Batch`."""
    if not paths:
        raise UserError("No photos to load: give at least one path.")
    ready = [prepare_image(open_image(path)[0], size, resize) for path in paths]
    return torch.stack([image for image, _ in ready]), PixelGeometry.join([g for _, g in ready])


def _read(source: Path | str | bytes) -> tuple[str, bytes]:
    if isinstance(source, bytes):
        return f"The image of {len(source)} bytes", source
    try:
        # A pipe would block for ever, and a device has no end.
        with open(source, "rb", opener=system.open_nonblocking) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                kind = "a folder" if stat.S_ISDIR(about.st_mode) else "not a regular file"
                raise UserError(f"{source} is {kind}: give a JPEG, PNG or WEBP file.")
            if about.st_size > MAX_BYTES:
                raise UserError(
                    f"{source} has {about.st_size} bytes: images of at most {MAX_BYTES} are read."
                )
            return str(source), file.read(about.st_size)  # it allocates as much as it is given
    except (OSError, ValueError) as problem:
        if isinstance(problem, OSError) and problem.errno in (ENOMEM, EMFILE, ENFILE, EIO):
            raise RunError(f"{source} could not be read: {problem.strerror}.") from problem
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"{source} cannot be read: {reason}.") from problem


def _kind(data: bytes) -> str | None:
    """Return the format by the first bytes; file extensions are ignored."""
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return None


def _decode(name: str, data: bytes, kind: str, most: int, ratio: int) -> Photo:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=[kind]) as picture:
        width, height = picture.size
        if width * height > most:
            raise UserError(
                f"{name} has {height} x {width} pixels, more than the limit of {most:,}."
            )
        check_aspect_ratio(name, (height, width), ratio)
        if kind == "PNG":  # Pillow decodes pixels with a wrong checksum silently
            picture.verify()
    with Image.open(io.BytesIO(data), formats=[kind]) as picture:
        picture.load()
        return np.array(_upright(_as_rgb(picture), _orientation(picture)), dtype=np.uint8)


def check_aspect_ratio(name: str, size: Size, ratio: int = MAX_RATIO) -> None:
    """Raise `UserError` for a (height, width) with too extreme an aspect ratio.

    Image processors that enlarge such an image until its shorter side fits would allocate
    gigabytes.
    """
    if max(size) > ratio * min(size):
        raise UserError(
            f"{name} has {size[0]} x {size[1]} pixels: the ratio of its sides is above the limit "
            f"of {ratio}."
        )


def _reason(problem: Exception) -> str:
    """Return Pillow's message without object addresses."""
    said = re.sub(r" ?<[^<>]* object at 0x[0-9a-f]+>", "", str(problem))
    return " ".join(said.split())[:200] or type(problem).__name__


def _orientation(picture: Any) -> int:
    """Return the EXIF orientation, 1 to 8; broken EXIF data does not break the image."""
    try:
        return int(picture.getexif().get(0x0112, 1))
    except Exception:
        return 1


def _upright(picture: Any, orientation: int) -> Any:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return picture.transpose(turns[orientation]) if orientation in turns else picture


def _as_rgb(picture: Any) -> Any:
    from PIL import Image

    if picture.mode.startswith("I"):  # 16 bits of grey: keep the upper 8, as for 16 bits of colour
        values = np.asarray(picture)
        return Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        above = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")
    return picture.convert("RGB")


def _resize(image: Photo, size: Size) -> Photo:
    """Resize bicubically with antialiasing."""
    from PIL import Image

    height, width = image.shape[:2]
    if (height, width) == size:
        return image
    if height * size[1] > max(MAX_RESIZED, width * size[0]):
        # Pillow resizes rows first, which makes a tall image larger
        turned = np.ascontiguousarray(image.swapaxes(0, 1))
        return _resize(turned, (size[1], size[0])).swapaxes(0, 1)
    resized = Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return np.array(resized, dtype=np.uint8)


def _window(image: Photo, whole: Size, corner: Size, size: Size) -> Photo:
    """Return the part of `_resize` to `whole` at `corner`, computed from that part alone."""
    from PIL import Image

    down, across = image.shape[0] / whole[0], image.shape[1] / whole[1]
    (top, left), (tall, wide) = corner, size
    right, bottom = (left + wide) * across, (top + tall) * down
    box = (left * across, top * down, min(right, image.shape[1]), min(bottom, image.shape[0]))
    part = Image.fromarray(image).resize((wide, tall), Image.Resampling.BICUBIC, box=box)
    return np.array(part, dtype=np.uint8)
