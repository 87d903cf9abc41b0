import inspect
import subprocess
import sys

import pytest

from overt import data
from overt.errors import BadInput

# These open in an empty folder: one has a package to fall back on, one a photo without pictures.
NEVER_EMPTY = {"EasyVqa", "pictures_in"}


def first_parameter(name: str) -> str:
    if isinstance(getattr(data, name), type(data.Split)):
        return ""  # a choice, not a reader
    return next(iter(inspect.signature(getattr(data, name)).parameters), "")


READERS = [name for name in data.__all__ if first_parameter(name) in ("root", "folder")]


def test_every_name_is_there():
    assert dir(data) == sorted(data.__all__)
    for name in data.__all__:
        assert getattr(data, name).__name__ == name
    with pytest.raises(AttributeError, match="Mnist"):
        _ = data.Mnist


def test_the_room_itself_costs_nothing():
    code = (
        "import sys, overt.data; print([n for n in ('torch', 'numpy', 'PIL') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in READERS if name not in NEVER_EMPTY])
def test_a_reader_takes_its_folder_as_text_too(name, tmp_path):
    said = []
    for folder in (str(tmp_path), tmp_path):
        with pytest.raises(BadInput) as problem:
            getattr(data, name)(folder)
        said.append(str(problem.value))
    assert said[0] == said[1] and str(tmp_path) in said[0]


def test_the_readers_that_are_asked_are_all_there_are():
    assert len(READERS) > 35 and set(READERS) >= {*NEVER_EMPTY, "flickr8k", "Cifar10", "vqa2"}


def test_the_folder_of_all_sets_may_be_text(tmp_path):
    assert data.root_of(str(tmp_path)) == data.root_of(tmp_path) == tmp_path
