"""Trust 11: every image raises one line or decodes to the same pixels."""

import base64
import io
import random
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from overt.data.images import FORMATS, open_image
from overt.errors import CorruptFileError, UserError
from overt.inspect.server.app import create_app
from overt.inspect.server.model_cache import ModelCache, find_models
from tests.inspect.server.conftest import encode_png as question_picture
from tests.inspect.server.conftest import write_run
from tests.trust.hostile import mutate_bytes

ROOT = Path(__file__).resolve().parents[2]
Y, X = np.mgrid[:24, :32]
PHOTO = np.stack([X * 8, Y * 10, (X + Y) % 256], axis=-1).astype(np.uint8)
GREY = PHOTO[..., 0]


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def originals() -> dict[str, bytes]:
    image = Image.fromarray(PHOTO)
    found = {kind: encoded(image, kind) for kind in FORMATS}
    for mode, kind in (("P", "PNG"), ("RGBA", "WEBP"), ("CMYK", "JPEG"), ("L", "PNG")):
        found[f"{mode} {kind}"] = encoded(image.convert(mode), kind)
    found["16 bit PNG"] = encoded(Image.fromarray(GREY.astype(np.uint16) * 257))
    return found


ORIGINALS = originals()


def decode_naively(data: bytes) -> np.ndarray:
    """Decode an image as most programs do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def decode_or_message(source: Path | bytes) -> np.ndarray | str:
    """Return the pixels, or the message of an expected error."""
    try:
        return open_image(source, most_pixels=1_000_000)[0]
    except (CorruptFileError, UserError) as problem:
        return str(problem)


def test_fuzzed_images_raise_or_decode_to_the_same_pixels(
    tmp_path: Path, full: bool, record_result: Callable[..., None]
) -> None:
    """Files and bytes give the same result; PNG has checksums and never gives other pixels."""
    rng = random.Random(11)
    count = 2_000 if full else 200
    pixels = {name: decode_or_message(data) for name, data in ORIGINALS.items()}
    naive_pixels = {name: decode_naively(data) for name, data in ORIGINALS.items()}
    refused = decoded = other = 0
    raised: set[str] = set()
    for number in range(count):
        name, data = rng.choice(list(ORIGINALS.items()))
        data = mutate_bytes(data, rng)
        path = tmp_path / "a.png"
        path.write_bytes(data)
        found, from_file = decode_or_message(data), decode_or_message(path)
        if isinstance(found, str):
            assert "\n" not in found and found.endswith(".") and isinstance(from_file, str)
            refused += 1
        else:
            assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3
            assert np.array_equal(found, from_file)
            if "PNG" in name:
                assert np.array_equal(found, pixels[name]), number
            decoded += 1
        try:
            other += "PNG" in name and not np.array_equal(decode_naively(data), naive_pixels[name])
        except Exception as problem:
            raised.add(type(problem).__name__)
    assert refused > count // 4 and decoded > count // 20
    assert other and len(raised) > 1
    record_result(
        11,
        "200 fuzzed: a one-line error or the same pixels",
        f"{refused} rejected and {decoded} decoded of {count}; 0 other exceptions",
        f"plain Pillow decodes {other} PNGs to other pixels and raises {len(raised)} kinds",
    )


def with_orientation(orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(PHOTO), kind, exif=exif, quality=100)


def unusual_formats() -> Iterator[tuple[str, bytes, np.ndarray]]:
    """Yield each unusual format with its expected pixels."""
    grey = GREY[..., None].repeat(3, axis=-1)
    plain = Image.fromarray(PHOTO)
    yield "CMYK", encoded(Image.fromarray(grey).convert("CMYK"), "JPEG", quality=100), grey
    yield "16 bits", encoded(Image.fromarray(GREY.astype(np.uint16) * 257)), grey
    yield "grey with alpha", encoded(Image.fromarray(GREY).convert("LA")), grey
    yield "palette", encoded(Image.fromarray(GREY).convert("P")), grey
    yield "progressive", encoded(plain, "JPEG", progressive=True, quality=100), PHOTO
    yield "one pixel", encoded(Image.fromarray(PHOTO[:1, :1])), PHOTO[:1, :1]
    yield "one row", encoded(Image.fromarray(PHOTO[:1])), PHOTO[:1]
    yield "lossless WEBP", encoded(plain, "WEBP", lossless=True), PHOTO
    clear = np.dstack([PHOTO, np.zeros_like(GREY)])
    yield "transparent", encoded(Image.fromarray(clear)), np.full_like(PHOTO, 255)
    for number, upright in enumerate(
        (
            PHOTO,
            PHOTO[:, ::-1],
            PHOTO[::-1, ::-1],
            PHOTO[::-1],
            PHOTO.transpose(1, 0, 2),
            np.rot90(PHOTO, -1),
            np.rot90(PHOTO, 2).transpose(1, 0, 2),
            np.rot90(PHOTO),
        ),
        start=1,
    ):
        yield f"EXIF {number}", with_orientation(number, "PNG"), upright
        yield f"EXIF {number} JPEG", with_orientation(number), upright


def differs(found: np.ndarray, expected: np.ndarray) -> bool:
    if found.shape != expected.shape:
        return True
    return bool(np.abs(found.astype(int) - expected.astype(int)).max() > 12)  # JPEG rounds


def test_unusual_image_formats_decode_to_the_same_pixels(
    record_result: Callable[..., None],
) -> None:
    wrong, naive = [], []
    kinds = list(unusual_formats())
    for name, data, expected in kinds:
        if differs(open_image(data)[0], expected):
            wrong.append(name)
        if differs(decode_naively(data), expected):
            naive.append(name)
    assert wrong == [] and naive
    for nothing in (b"", b"GIF89a", encoded(Image.fromarray(PHOTO), "BMP"), b"\xff\xd8\xff"):
        assert isinstance(decode_or_message(nothing), str)
    record_result(
        11,
        "CMYK, 16-bit, EXIF-rotated, 1x1, empty: decoded correctly or rejected",
        f"{len(kinds)} of {len(kinds)} decoded correctly, 4 of 4 others rejected",
        f"plain Pillow gets {len(naive)} of {len(kinds)} wrong",
    )


# --- bombs


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    header = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in (header, *chunks, (b"IEND", b""))
    )


def compressed_zeros(megabytes: int) -> bytes:
    """Compress zeros, about a thousand times smaller."""
    packer = zlib.compressobj(6)
    parts = [packer.compress(bytes(2**20)) for _ in range(megabytes)]
    return b"".join([*parts, packer.flush()])


def jpeg(width: int, height: int) -> bytes:
    """Return a JPEG with another size in its header."""
    data = bytearray(encoded(Image.fromarray(PHOTO), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def webp(width: int, height: int) -> bytes:
    """Return a lossless WEBP with another size in its header; sides have 14 bits."""
    data = bytearray(encoded(Image.fromarray(PHOTO), "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    bits = int.from_bytes(data[at : at + 4], "little") >> 28 << 28
    data[at : at + 4] = (bits | (height - 1) << 14 | (width - 1)).to_bytes(4, "little")
    return bytes(data)


def bombs() -> dict[str, bytes]:
    flat = compressed_zeros(500)
    return {
        "PNG of 10^10 pixels": png(100_000, 100_000, (b"IDAT", flat)),
        "PNG of 10^9 pixels": png(2**31 - 1, 1, (b"IDAT", flat)),
        "PNG of 300,000 x 1": png(300_000, 1, (b"IDAT", flat)),
        "PNG of 1 x 300,000": png(1, 300_000, (b"IDAT", flat)),
        "JPEG of 4 x 10^9 pixels": jpeg(65_000, 65_000),
        "WEBP of 3 x 10^8 pixels": webp(16_384, 16_384),
        "one pixel, half a gigabyte of it": png(1, 1, (b"IDAT", flat)),
        "half a gigabyte of text": png(1, 1, (b"zTXt", b"note\0\0" + flat), (b"IDAT", b"")),
        "half a gigabyte of colours": png(1, 1, (b"iCCP", b"note\0\0" + flat), (b"IDAT", b"")),
        "half a gigabyte of words": png(1, 1, (b"iTXt", b"a\0\1\0\0\0" + flat), (b"IDAT", b"")),
    }


CHILD = """
import io, resource, sys
from pathlib import Path
from PIL import Image
from overt.data.images import open_image
from overt.errors import CorruptFileError, UserError

open_image(sys.argv[1])  # the first image loads modules
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = size + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[2:]:
    try:
        open_image(path)
        print("decoded")
    except (UserError, CorruptFileError) as problem:
        print("refused")
    except MemoryError:
        print("MEMORY")
Image.MAX_IMAGE_PIXELS = None
for path in sys.argv[2:]:
    try:
        Image.open(path).convert("RGB")
        print("decoded")
    except Exception as problem:
        print(type(problem).__name__)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")
def test_decompression_bombs_raise_within_400_megabytes(
    tmp_path: Path, record_result: Callable[..., None]
) -> None:
    """A child process with a memory limit opens each bomb."""
    first = tmp_path / "first.webp"
    first.write_bytes(ORIGINALS["WEBP"])
    paths = []
    for number, data in enumerate(bombs().values()):
        paths.append(tmp_path / f"bomb-{number}")
        paths[-1].write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, first, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.split()
    ours, naive = lines[: len(paths)], lines[len(paths) :]
    assert set(ours) <= {"refused", "decoded"} and ours.count("refused") >= 8, ours
    assert "MemoryError" in naive
    record_result(
        11,
        "bombs: rejected within 400 MB",
        f"{ours.count('refused')} of {len(ours)} rejected, the others one pixel; 0 out of memory",
        f"Pillow without its limit runs out of memory on {naive.count('MemoryError')}",
    )


# --- uploads


def test_fuzzed_uploads_get_an_answer_or_a_one_line_error(
    tmp_path: Path, full: bool, record_result: Callable[..., None]
) -> None:
    write_run(tmp_path / "soft")
    rng = random.Random(12)
    app = create_app(ModelCache(find_models([str(tmp_path / "soft")])))
    statuses: dict[int, int] = {}
    faults = 0
    count = 300 if full else 100
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for number in range(count):
            kind, data = rng.choice(list(ORIGINALS.items()))
            text = base64.b64encode(mutate_bytes(data, rng)).decode()
            if number % 4 == 0:
                text = mutate_bytes(text.encode(), rng).decode("latin-1")
            if number % 9 == 0:
                text = "data:image/png;base64," + text
            body = {"model": "soft", "picture": text, "text": "what colour is the ball"}
            answer = client.post("/api/ask", json=body)
            try:
                decode_naively(base64.b64decode(text))
            except Exception:
                faults += 1
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if answer.status_code != 200:
                error = answer.json()
                assert set(error) == {"error"} and "\n" not in error["error"], kind
                assert str(tmp_path) not in error["error"] and "Traceback" not in error["error"]
        pixels = {"model": "soft", "picture": question_picture(), "text": "what colour"}
        assert client.post("/api/ask", json=pixels).status_code == 200
    assert set(statuses) <= {200, 400, 413, 422} and statuses.get(400, 0) > count // 4
    assert faults
    record_result(
        11,
        "uploads: an answer or a one-line error, never a server error",
        f"{statuses.get(200, 0)} answered, {count - statuses.get(200, 0)} rejected of {count}; "
        "0 server errors",
        f"decoding without checks raises on {faults} of {count}",
    )
