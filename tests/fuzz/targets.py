"""Fuzz targets: each reads arbitrary bytes and must return or raise an expected error.

`UserError` and `CorruptFileError` are expected; any other exception is a defect. Each target has a
few valid files as seeds.
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

from overt import io as overt_io
from overt.attention import AttentionMap, grid
from overt.errors import CorruptFileError, UserError

MAX_PIXELS = 200_000  # pixels: this tests the decoder, not memory use


@dataclass(frozen=True)
class Target:
    """A reader of bytes, and valid files as seeds."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]

    def __call__(self, data: bytes) -> None:
        """Read the bytes; an expected error must have a one-line message."""
        try:
            self.read(data)
        except (UserError, CorruptFileError) as problem:
            message = str(problem)
            if not message or "\n" in message:
                raise AssertionError(f"not one line: {message!r}") from problem


@functools.cache
def _folder() -> Path:
    """Return a temporary folder, in memory if possible."""
    parent = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="overt-fuzz-", dir=parent if parent.is_dir() else None))


def clear() -> None:
    """Remove the files of the targets."""
    shutil.rmtree(_folder(), ignore_errors=True)
    _folder.cache_clear()


def _from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        path = _folder() / name
        path.write_bytes(data)
        return read(path)

    return run


# --- pictures and archives


def _read_image(data: bytes) -> object:
    from overt.data.images import open_image

    return open_image(data, MAX_PIXELS)


def _images() -> list[bytes]:
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

    out = _folder() / "root" / "unpacked"
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir()
    try:
        return extract(path, out, most_bytes=2**20)
    finally:
        outside = [one for one in out.parent.iterdir() if one != out]
        assert not outside, f"left {outside}"
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
    overt_io.write_tensors(_folder() / "t", {"a": torch.ones(2, 3), "b": torch.zeros(1).half()})
    return [(_folder() / "t").read_bytes()]


def _arrays() -> list[bytes]:
    overt_io.write_arrays(_folder() / "n", {"a": np.ones((2, 3)), "b": np.zeros(2, np.int32)})
    return [(_folder() / "n").read_bytes()]


def _read_map(path: Path) -> object:
    from overt.viz.export import load_map

    return load_map(path)


def _maps() -> list[bytes]:
    from overt.viz.export import save_map

    save_map(_folder() / "m.npz", AttentionMap(torch.ones(1, 1, 1, 1, 4) / 4, grid(2, 2)))
    return [(_folder() / "m.npz").read_bytes()]


def _read_mat(path: Path) -> object:
    from overt.data.mat_files import ArraySpec, read_arrays

    return read_arrays(path, {"X": ArraySpec((2, 3)), "y": ArraySpec((3, 1))})


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


def _read_regions(path: Path) -> object:
    from overt.data.bottom_up import BottomUpFeatures

    folder = _folder() / "regions"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(path, folder / "a.tsv")
    found = BottomUpFeatures(folder)
    return found.get(list(found._at)[:4])


def _region_files() -> list[bytes]:
    numbers = b"AACAPwAAgD8AAIA/AACAPw=="
    return [b"1\t9\t9\t1\t" + numbers + b"\t" + numbers + b"\n"]


# --- texts


def _read_manifest(path: Path) -> object:
    folder = _folder() / "sealed"
    folder.mkdir(exist_ok=True)
    (folder / "a").write_bytes(b"a")
    shutil.copy(path, folder / overt_io.MANIFEST)
    return overt_io.verify(folder)


def _manifests() -> list[bytes]:
    with overt_io.atomic_folder(_folder() / "whole") as inside:
        (inside / "a").write_bytes(b"a")
    return [(_folder() / "whole" / overt_io.MANIFEST).read_bytes()]


def _read_vocabulary(path: Path) -> object:
    from overt.data.vocabulary import load_vocabulary

    return load_vocabulary(path)


def _vocabularies() -> list[bytes]:
    from overt.data.vocabulary import Vocabulary

    Vocabulary.build([["a", "red", "ball"], ["a", "dog"]]).save(_folder() / "v.json")
    return [(_folder() / "v.json").read_bytes()]


def _apply_settings(data: bytes) -> object:
    from overt.experiments import settings
    from overt.papers.catalog import recipes

    name, _, rest = data.decode("utf-8", "surrogateescape").partition("\n")
    known = recipes()
    recipe = known.get(name, known["scenes-soft"])()
    found = settings.apply(recipe, rest.split("\n"))
    assert settings.restore(recipe, settings.to_json(found)) == found
    return found


def _recipes() -> list[bytes]:
    return [b"scenes-soft\ntrain.epochs=3\ndata.limit=none", b"cifar10-cnn\ntrain.rate=1e-3"]


def _restore_settings(data: bytes) -> object:
    from overt.experiments import settings
    from overt.papers.catalog import recipes

    with contextlib.suppress(ValueError, RecursionError):
        value: Any = json.loads(data)
        if isinstance(value, dict):
            return settings.restore(recipes()["scenes-soft"](), value)
    return None


def _settings_files() -> list[bytes]:
    from overt.experiments import settings
    from overt.papers.catalog import recipes

    return [json.dumps(settings.to_json(recipes()["scenes-soft"]())).encode()]


def _read_request(data: bytes) -> object:
    from pydantic import ValidationError

    from overt.inspect.server.request_schema import InspectRequest

    with contextlib.suppress(ValidationError):
        request_model = InspectRequest.model_validate_json(data)
        request_model.view_options()
        return request_model.model_input()
    return None


def _requests() -> list[bytes]:
    import base64

    picture = base64.b64encode(_images()[0]).decode()
    request = {"model": "a", "text": "what is it", "picture": picture, "without": [[0, 0, 1, 0.5]]}
    return [json.dumps(request).encode(), b'{"model": "a", "unsaid": [[0, 3]], "text": "b"}']


def _join_name(data: bytes) -> object:
    from overt.data.download import safe_join

    root = Path("/srv/root")
    found = safe_join(root, data.decode("utf-8", "surrogateescape"))
    assert ".." not in found.parts and found.is_relative_to(root) and found != root
    return found


TARGETS: dict[str, Target] = {
    "picture": Target(_read_image, _images),
    "archive": Target(_from_file("archive", _unpack), _archives),
    "json": Target(_from_file("a.json", overt_io.read_json), lambda: [b'{"a": [1, 2.5, "b"]}']),
    "tensors": Target(_from_file("a.safetensors", overt_io.read_tensors), _tensors),
    "metadata": Target(_from_file("a.safetensors", overt_io.read_metadata), _tensors),
    "arrays": Target(_from_file("a.npz", overt_io.read_arrays), _arrays),
    "map": Target(_from_file("a.npz", _read_map), _maps),
    "matlab": Target(_from_file("a.mat", _read_mat), _mats),
    "regions": Target(_from_file("a.tsv", _read_regions), _region_files),
    "manifest": Target(_from_file("manifest", _read_manifest), _manifests),
    "vocabulary": Target(_from_file("a.json", _read_vocabulary), _vocabularies),
    "recipe": Target(_apply_settings, _recipes),
    "settings": Target(_restore_settings, _settings_files),
    "question": Target(_read_request, _requests),
    "name": Target(_join_name, lambda: [b"a/b", b"../a", b"a\\b", b"C:a"]),
}
