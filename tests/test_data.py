"""The package `overt.data`: exported names, lazy import and readers."""

import inspect
import subprocess
import sys

import pytest

from overt import data
from overt.errors import UserError

# These accept an empty folder: one falls back to a package, one lists maps lazily.
NEVER_EMPTY = {"EasyVqa", "maps_in_folder"}


def first_parameter(name: str) -> str:
    if isinstance(getattr(data, name), type(data.Split)):
        return ""  # an enum, not a reader
    return next(iter(inspect.signature(getattr(data, name)).parameters), "")


READERS = [name for name in data.__all__ if first_parameter(name) in ("root", "folder")]


def test_all_exported_names_exist():
    assert dir(data) == sorted(data.__all__)
    for name in data.__all__:
        assert getattr(data, name).__name__ == name
    with pytest.raises(AttributeError, match="Mnist"):
        _ = data.Mnist


def test_package_import_is_lazy():
    code = (
        "import sys, overt.data; print([n for n in ('torch', 'numpy', 'PIL') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in READERS if name not in NEVER_EMPTY])
def test_readers_accept_their_folder_as_a_string(name, tmp_path):
    messages = []
    for folder in (str(tmp_path), tmp_path):
        with pytest.raises(UserError) as problem:
            getattr(data, name)(folder)
        messages.append(str(problem.value))
    assert messages[0] == messages[1] and str(tmp_path) in messages[0]


def test_readers_are_found():
    assert len(READERS) > 35 and set(READERS) >= {*NEVER_EMPTY, "flickr8k", "Cifar10", "vqa2"}


def test_data_root_accepts_a_string(tmp_path):
    assert data.data_root(str(tmp_path)) == data.data_root(tmp_path) == tmp_path
