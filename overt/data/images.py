"""Photos from disk to a model's canvas, with the geometry that leads back.

Everything that opens a picture of the user's goes through `open_image`, so that a hostile or broken
file is met in one place: three formats told by content, a cap on pixels before anything is decoded,
no partial pictures, and one sentence that names the file.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from overt.errors import BadInput, Damaged
from overt.geometry import PixelGeometry

FORMATS = ("JPEG", "PNG", "WEBP")
MOST_PIXELS = 50_000_000
GREY = 127  # what stands around a photo that does not fill the canvas

Photo = UInt8[np.ndarray, "_ _ 3"]  # height, width, red green blue
Size = tuple[int, int]
How = Callable[[Photo, Size], tuple[Photo, PixelGeometry]]


def open_image(source: Path | str | bytes, most_pixels: int = MOST_PIXELS) -> tuple[Photo, Size]:
    """The RGB pixels of a JPEG, PNG or WEBP, upright, and its (height, width).

    The size is that of the upright picture, in which boxes and fixations are given. Grey, palette,
    CMYK and 16-bit pictures come out as 8-bit RGB; transparent ones are laid over white; of a
    moving picture the first frame counts. A broken or cut-off file is `Damaged`; another kind of
    file, a missing one, or more than `most_pixels` is `BadInput`.
    """
    name, data = _read(source)
    kind = _kind(data)
    if not data:
        raise Damaged(f"{name} is empty; replace it.")
    if kind is None:
        raise BadInput(f"{name} is not a JPEG, PNG or WEBP picture.")
    from PIL.Image import DecompressionBombError

    try:
        with warnings.catch_warnings():  # what Pillow warns of is said below, or is of no matter
            warnings.simplefilter("ignore")
            pixels = _decode(name, data, kind, most_pixels)
    except (BadInput, MemoryError):
        raise
    except DecompressionBombError as problem:
        raise BadInput(f"{name} has too many pixels to be opened: {problem}") from problem
    except Exception as problem:  # Pillow's decoders raise a dozen kinds
        raise Damaged(f"{name} cannot be decoded as {kind} ({_reason(problem)}).") from problem
    return pixels, (pixels.shape[0], pixels.shape[1])


def stretch(image: Photo, size: Size) -> tuple[Photo, PixelGeometry]:
    """The whole photo drawn out to the canvas; its shape is not kept."""
    before = PixelGeometry.identity(1, (image.shape[0], image.shape[1]))
    return _resize(image, size), before.resize(size)


def crop(image: Photo, size: Size) -> tuple[Photo, PixelGeometry]:
    """The middle of the photo: scaled until it covers the canvas, then cut."""
    height, width = image.shape[:2]
    scale = max(size[0] / height, size[1] / width)
    whole = (max(size[0], round(height * scale)), max(size[1], round(width * scale)))
    top, left = (whole[0] - size[0]) // 2, (whole[1] - size[1]) // 2
    resized, geometry = stretch(image, whole)
    window = resized[top : top + size[0], left : left + size[1]]
    return window, geometry.crop(top, left, *size)


def fit(image: Photo, size: Size) -> tuple[Photo, PixelGeometry]:
    """The whole photo in its own shape, in the middle of a grey canvas."""
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


def prepare(
    image: Photo, size: Size, how: How = crop
) -> tuple[UInt8[Tensor, "3 y x"], PixelGeometry]:
    """A photo brought to a canvas of `size` = (height, width), and the geometry of doing so."""
    if min(size) < 1 or min(image.shape[:2]) < 1:
        raise BadInput(f"A photo of {image.shape[:2]} pixels cannot become a canvas of {size}.")
    canvas, geometry = how(image, size)
    return torch.from_numpy(np.ascontiguousarray(canvas.transpose(2, 0, 1))), geometry


def load(
    paths: Sequence[Path], size: Size, how: How = crop
) -> tuple[UInt8[Tensor, "i 3 y x"], PixelGeometry]:
    """The photos of several files on one canvas size, ready for a `Batch`."""
    if not paths:
        raise BadInput("No photo was named, so there is nothing to load.")
    ready = [prepare(open_image(path)[0], size, how) for path in paths]
    return torch.stack([image for image, _ in ready]), PixelGeometry.join([g for _, g in ready])


def _read(source: Path | str | bytes) -> tuple[str, bytes]:
    if isinstance(source, bytes):
        return f"The picture of {len(source)} bytes", source
    try:
        return str(source), Path(source).read_bytes()
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise BadInput(f"{source} cannot be read: {reason}.") from problem


def _kind(data: bytes) -> str | None:
    """The format by the first bytes; a name's ending says nothing."""
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return None


def _decode(name: str, data: bytes, kind: str, most: int) -> Photo:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=[kind]) as picture:
        width, height = picture.size
        if width * height > most:
            raise BadInput(f"{name} has {height} x {width} pixels; at most {most:,} are opened.")
        if kind == "PNG":  # pixels with a wrong checksum would be decoded without a word
            picture.verify()
    with Image.open(io.BytesIO(data), formats=[kind]) as picture:
        picture.load()
        return np.array(_upright(_as_rgb(picture), _orientation(picture)), dtype=np.uint8)


def _reason(problem: Exception) -> str:
    """What Pillow says, without the objects of ours that it names."""
    said = re.sub(r" ?<[^<>]* object at 0x[0-9a-f]+>", "", str(problem))
    return " ".join(said.split())[:200] or type(problem).__name__


def _orientation(picture: Any) -> int:
    """The EXIF orientation, 1 to 8; a broken note about the camera does not break the picture."""
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
        values = np.asarray(picture).astype(np.int64)
        return Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        above = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")
    return picture.convert("RGB")


def _resize(image: Photo, size: Size) -> Photo:
    """Bicubic with antialiasing, each output pixel the mean of what it covers."""
    from PIL import Image

    if image.shape[:2] == size:
        return image
    resized = Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return np.array(resized, dtype=np.uint8)
