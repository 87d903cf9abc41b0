"""What commands print."""

import pytest

from overt.cli import printing
from tests.cli.conftest import Call

pytestmark = pytest.mark.usefixtures("toy_recipes")


def test_a_terminal_gets_a_drawn_table(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "plain", lambda: False)
    code, out, _ = call("list")
    assert code == 0 and "│" in out
