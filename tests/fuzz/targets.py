"""What reads bytes that somebody else wrote: each target takes any bytes and must end well.

A target returns, or raises `BadInput` or `Damaged`, which it swallows. Anything else is a defect.
Each comes with a few whole files to begin from.
"""

import contextlib
import functools
import io
import json
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overt import files
from overt.attention import AttentionMap, grid
from overt.errors import BadInput, Damaged

SMALL = 200_000  # pixels: what is fuzzed is the reading, not the memory


@dataclass(frozen=True)
class Target:
    """A reader of bytes, and whole files to begin from."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]

    def __call__(self, data: bytes) -> None:
        """Read the bytes; a refusal in a sentence is a good end."""
        try:
            self.read(data)
        except (BadInput, Damaged) as problem:
            told = str(problem)
            if not told or "\n" in told:
                raise AssertionError(f"not one sentence: {told!r}") from problem


@functools.cache
def _place() -> Path:
    """A folder in memory where there is one."""
    parent = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="overt-fuzz-", dir=parent if parent.is_dir() else None))


def clear() -> None:
    """Remove what the targets wrote."""
    shutil.rmtree(_place(), ignore_errors=True)
    _place.cache_clear()


def _from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        path = _place() / name
        path.write_bytes(data)
        return read(path)

    return run


# --- pictures and archives


def _picture(data: bytes) -> object:
    from overt.data.images import open_image

    return open_image(data, SMALL)


def _pictures() -> list[bytes]:
    from PIL import Image

    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    found = []
    for kind, mode in (("PNG", "RGB"), ("JPEG", "RGB"), ("WEBP", "RGBA"), ("PNG", "P")):
        stream = io.BytesIO()
        image.convert(mode).save(stream, kind)
        found.append(stream.getvalue())
    return found


def _unpack(path: Path) -> object:
    from overt.data.download import extract

    out = _place() / "root" / "unpacked"
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir()
    try:
        return extract(path, out, most_bytes=2**20)
    finally:
        beside = [one for one in out.parent.iterdir() if one != out]
        assert not beside, f"left {beside}"
        for one in out.rglob("*"):
            assert not one.is_symlink(), one


def _archives() -> list[bytes]:
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/b.txt", b"words " * 9)
        archive.writestr("../c", b"out")
    with tarfile.open(fileobj=tarred, mode="w") as opened:
        member = tarfile.TarInfo("a/b")
        member.size = 5
        opened.addfile(member, io.BytesIO(b"words"))
        link = tarfile.TarInfo("c")
        link.type, link.linkname = tarfile.SYMTYPE, "../.."
        opened.addfile(link)
    return [zipped.getvalue(), tarred.getvalue()]


# --- numbers


def _tensors() -> list[bytes]:
    files.write_tensors(_place() / "t", {"a": torch.ones(2, 3), "b": torch.zeros(1).half()})
    return [(_place() / "t").read_bytes()]


def _arrays() -> list[bytes]:
    files.write_arrays(_place() / "n", {"a": np.ones((2, 3)), "b": np.zeros(2, np.int32)})
    return [(_place() / "n").read_bytes()]


def _map(path: Path) -> object:
    from overt.show.export import load_map

    return load_map(path)


def _maps() -> list[bytes]:
    from overt.show.export import save_map

    save_map(_place() / "m.npz", AttentionMap(torch.ones(1, 1, 1, 1, 4) / 4, grid(2, 2)))
    return [(_place() / "m.npz").read_bytes()]


def _mat(path: Path) -> object:
    from overt.data.matlab import Wanted, read_arrays

    return read_arrays(path, {"X": Wanted((2, 3)), "y": Wanted((3, 1))})


def _mats() -> list[bytes]:
    try:
        from scipy.io import savemat
    except ImportError:
        return [bytes(128)]
    found = []
    for squeezed in (True, False):
        stream = io.BytesIO()
        savemat(stream, {"X": np.ones((2, 3)), "y": np.ones((3, 1))}, do_compression=squeezed)
        found.append(stream.getvalue())
    return found


def _regions(path: Path) -> object:
    from overt.data.bottomup import BottomUp

    folder = _place() / "regions"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(path, folder / "a.tsv")
    found = BottomUp(folder)
    return found.get(list(found._at)[:4])


def _lines() -> list[bytes]:
    numbers = b"AACAPwAAgD8AAIA/AACAPw=="
    return [b"1\t9\t9\t1\t" + numbers + b"\t" + numbers + b"\n"]


# --- texts


def _manifest(path: Path) -> object:
    folder = _place() / "sealed"
    folder.mkdir(exist_ok=True)
    (folder / "a").write_bytes(b"a")
    shutil.copy(path, folder / files.MANIFEST)
    return files.verify(folder)


def _manifests() -> list[bytes]:
    with files.writing(_place() / "whole") as inside:
        (inside / "a").write_bytes(b"a")
    return [(_place() / "whole" / files.MANIFEST).read_bytes()]


def _words(path: Path) -> object:
    from overt.data.vocabulary import load_words

    return load_words(path)


def _vocabularies() -> list[bytes]:
    from overt.data.vocabulary import Vocabulary

    Vocabulary.build(["a red ball", "a dog"]).save(_place() / "v.json")
    return [(_place() / "v.json").read_bytes()]


def _recipe(data: bytes) -> object:
    from overt.recipes import recipes, settings

    name, _, rest = data.decode("utf-8", "surrogateescape").partition("\n")
    known = recipes()
    recipe = known.get(name, known["scenes-soft"])()
    found = settings.apply(recipe, rest.split("\n"))
    assert settings.restore(recipe, settings.to_json(found)) == found
    return found


def _recipes() -> list[bytes]:
    return [b"scenes-soft\ntrain.epochs=3\ndata.limit=none", b"cifar10-cnn\ntrain.rate=1e-3"]


def _settings(data: bytes) -> object:
    from overt.recipes import recipes, settings

    with contextlib.suppress(ValueError, RecursionError):
        value: Any = json.loads(data)
        if isinstance(value, dict):
            return settings.restore(recipes()["scenes-soft"](), value)
    return None


def _all_settings() -> list[bytes]:
    from overt.recipes import recipes, settings

    return [json.dumps(settings.to_json(recipes()["scenes-soft"]())).encode()]


def _question(data: bytes) -> object:
    from pydantic import ValidationError

    from overt.serve.questions import Question

    with contextlib.suppress(ValidationError):
        asked = Question.model_validate_json(data)
        asked.wish()
        return asked.given()
    return None


def _questions() -> list[bytes]:
    import base64

    picture = base64.b64encode(_pictures()[0]).decode()
    whole = {"model": "a", "text": "what is it", "picture": picture, "without": [[0, 0, 1, 0.5]]}
    return [json.dumps(whole).encode(), b'{"model": "a", "unsaid": [[0, 3]], "text": "b"}']


def _name(data: bytes) -> object:
    from overt.data.download import safe_join

    root = Path("/srv/root")
    found = safe_join(root, data.decode("utf-8", "surrogateescape"))
    assert ".." not in found.parts and found.is_relative_to(root) and found != root
    return found


TARGETS: dict[str, Target] = {
    "picture": Target(_picture, _pictures),
    "archive": Target(_from_file("archive", _unpack), _archives),
    "json": Target(_from_file("a.json", files.read_json), lambda: [b'{"a": [1, 2.5, "b"]}']),
    "tensors": Target(_from_file("a.safetensors", files.read_tensors), _tensors),
    "metadata": Target(_from_file("a.safetensors", files.read_metadata), _tensors),
    "arrays": Target(_from_file("a.npz", files.read_arrays), _arrays),
    "map": Target(_from_file("a.npz", _map), _maps),
    "matlab": Target(_from_file("a.mat", _mat), _mats),
    "regions": Target(_from_file("a.tsv", _regions), _lines),
    "manifest": Target(_from_file("manifest", _manifest), _manifests),
    "vocabulary": Target(_from_file("a.json", _words), _vocabularies),
    "recipe": Target(_recipe, _recipes),
    "settings": Target(_settings, _all_settings),
    "question": Target(_question, _questions),
    "name": Target(_name, lambda: [b"a/b", b"../a", b"a\\b", b"C:a"]),
}
