"""Trust 11: any picture is refused in a sentence or decoded as the same picture always is."""

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
from overt.errors import BadInput, Damaged
from overt.serve.app import make
from overt.serve.shelf import Shelf, offer
from tests.serve.conftest import encoded as question_picture
from tests.serve.conftest import write_run
from tests.trust.hostile import mutated

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


def plainly(data: bytes) -> np.ndarray:
    """What most programs do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def attempt(source: Path | bytes) -> np.ndarray | str:
    """Pixels, or the sentence of a refusal; any other exception is a defect."""
    try:
        return open_image(source, most_pixels=1_000_000)[0]
    except (Damaged, BadInput) as problem:
        return str(problem)


def test_fuzzed_pictures(tmp_path: Path, full: bool, reached: Callable[..., None]) -> None:
    """From a file and from memory alike; a PNG, which has checksums, never with other pixels."""
    dice = random.Random(11)
    count = 2_000 if full else 200
    whole = {name: attempt(data) for name, data in ORIGINALS.items()}
    theirs = {name: plainly(data) for name, data in ORIGINALS.items()}
    refused = decoded = other = 0
    raised: set[str] = set()
    for number in range(count):
        name, data = dice.choice(list(ORIGINALS.items()))
        data = mutated(data, dice)
        path = tmp_path / "a.png"
        path.write_bytes(data)
        found, again = attempt(data), attempt(path)
        if isinstance(found, str):
            assert "\n" not in found and found.endswith(".") and isinstance(again, str)
            refused += 1
        else:
            assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3
            assert np.array_equal(found, again)
            if "PNG" in name:
                assert np.array_equal(found, whole[name]), number
            decoded += 1
        try:
            other += "PNG" in name and not np.array_equal(plainly(data), theirs[name])
        except Exception as problem:
            raised.add(type(problem).__name__)
    assert refused > count // 4 and decoded > count // 20
    assert other and len(raised) > 1
    reached(
        11,
        "200 fuzzed: a sentence or the same pixels",
        f"{refused} refused and {decoded} decoded of {count}; 0 other exceptions",
        f"plain Pillow decodes {other} PNGs to other pixels and raises {len(raised)} kinds",
    )


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(PHOTO), kind, exif=exif, quality=100)


def odd() -> Iterator[tuple[str, bytes, np.ndarray]]:
    """Each odd kind with the picture that it is."""
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
        yield f"EXIF {number}", turned(number, "PNG"), upright
        yield f"EXIF {number} JPEG", turned(number), upright


def apart(found: np.ndarray, wanted: np.ndarray) -> bool:
    if found.shape != wanted.shape:
        return True
    return bool(np.abs(found.astype(int) - wanted.astype(int)).max() > 12)  # JPEG rounds


def test_odd_kinds_are_the_pictures_that_they_are(reached: Callable[..., None]) -> None:
    wrong, naive = [], []
    kinds = list(odd())
    for name, data, wanted in kinds:
        if apart(open_image(data)[0], wanted):
            wrong.append(name)
        if apart(plainly(data), wanted):
            naive.append(name)
    assert wrong == [] and naive
    for nothing in (b"", b"GIF89a", encoded(Image.fromarray(PHOTO), "BMP"), b"\xff\xd8\xff"):
        assert isinstance(attempt(nothing), str)
    reached(
        11,
        "CMYK, 16-bit, EXIF-rotated, 1x1, empty: decoded alike or refused",
        f"{len(kinds)} of {len(kinds)} decoded alike, 4 of 4 others refused",
        f"plain Pillow gets {len(naive)} of {len(kinds)} wrong",
    )


# --- bombs


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    header = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in (header, *chunks, (b"IEND", b""))
    )


def squeezed(megabytes: int) -> bytes:
    """Zeros, a thousand times smaller than they will be."""
    packer = zlib.compressobj(6)
    parts = [packer.compress(bytes(2**20)) for _ in range(megabytes)]
    return b"".join([*parts, packer.flush()])


def jpeg(width: int, height: int) -> bytes:
    """The picture with another size in its head."""
    data = bytearray(encoded(Image.fromarray(PHOTO), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def webp(width: int, height: int) -> bytes:
    """The same for the lossless kind, whose sides have 14 bits."""
    data = bytearray(encoded(Image.fromarray(PHOTO), "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    bits = int.from_bytes(data[at : at + 4], "little") >> 28 << 28
    data[at : at + 4] = (bits | (height - 1) << 14 | (width - 1)).to_bytes(4, "little")
    return bytes(data)


def bombs() -> dict[str, bytes]:
    flat = squeezed(500)
    return {
        "PNG of 10^10 pixels": png(100_000, 100_000, (b"IDAT", flat)),
        "PNG of 10^9 pixels": png(2**31 - 1, 1, (b"IDAT", flat)),
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
from overt.errors import BadInput, Damaged

open_image(sys.argv[1])  # whatever a first picture needs
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = size + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[2:]:
    try:
        open_image(path)
        print("decoded")
    except (BadInput, Damaged) as problem:
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
def test_bombs_are_refused_within_400_megabytes(
    tmp_path: Path, reached: Callable[..., None]
) -> None:
    """A cap on memory, in a process of its own, is what a bomb would run into."""
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
    told = done.stdout.split()
    ours, naive = told[: len(paths)], told[len(paths) :]
    assert set(ours) <= {"refused", "decoded"} and ours.count("refused") >= 6, ours
    assert "MemoryError" in naive
    reached(
        11,
        "bombs: refused, within 400 MB",
        f"{ours.count('refused')} of {len(ours)} refused, the others one pixel; 0 out of memory",
        f"Pillow without its cap runs out of memory on {naive.count('MemoryError')}",
    )


# --- uploads


def test_fuzzed_uploads_are_answered_in_a_sentence(
    tmp_path: Path, full: bool, reached: Callable[..., None]
) -> None:
    write_run(tmp_path / "soft")
    dice = random.Random(12)
    app = make(Shelf(offer([str(tmp_path / "soft")])))
    statuses: dict[int, int] = {}
    faults = 0
    count = 300 if full else 100
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for number in range(count):
            kind, data = dice.choice(list(ORIGINALS.items()))
            text = base64.b64encode(mutated(data, dice)).decode()
            if number % 4 == 0:
                text = mutated(text.encode(), dice).decode("latin-1")
            if number % 9 == 0:
                text = "data:image/png;base64," + text
            body = {"model": "soft", "picture": text, "text": "what colour is the ball"}
            answer = client.post("/api/ask", json=body)
            try:
                plainly(base64.b64decode(text))
            except Exception:
                faults += 1
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            if answer.status_code != 200:
                said = answer.json()
                assert set(said) == {"error"} and "\n" not in said["error"], kind
                assert str(tmp_path) not in said["error"] and "Traceback" not in said["error"]
        whole = {"model": "soft", "picture": question_picture(), "text": "what colour"}
        assert client.post("/api/ask", json=whole).status_code == 200
    assert set(statuses) <= {200, 400, 413, 422} and statuses.get(400, 0) > count // 4
    assert faults
    reached(
        11,
        "uploads: a sentence or an answer, never a fault of the server",
        f"{statuses.get(200, 0)} answered, {count - statuses.get(200, 0)} refused of {count}; "
        "0 faults",
        f"decoding what comes raises on {faults} of {count}",
    )
