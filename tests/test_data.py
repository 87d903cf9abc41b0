import subprocess
import sys

import pytest

from overt import data


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
