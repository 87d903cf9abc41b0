"""Output of commands: tables, progress and escaped control characters."""

import pytest

from overt.cli import output
from tests.cli.conftest import Call

pytestmark = pytest.mark.usefixtures("toy_recipes")


def test_a_terminal_gets_a_rich_table(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_plain", lambda: False)
    code, out, _ = call("list")
    assert code == 0 and "│" in out


def test_a_table_with_too_many_columns_is_printed_in_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "is_plain", lambda: False)
    monkeypatch.setenv("COLUMNS", "80")
    header = ["metric", "measures", "better", "range", "unit", "needs", "cannot show"]
    line = ["deletion_area@mask", "probability after removal", "lower", "", *3 * ["informative"]]
    output.print_table("Metrics", header, [line])
    printed = [one.rstrip() for one in capsys.readouterr().out.splitlines()]
    assert printed[:3] == [
        "Metrics",
        "  deletion_area@mask",
        "      measures: probability after removal",
    ]
    assert "      range:" not in printed and max(map(len, printed)) <= 80
    output.print_table("Metrics", header[:3], [line[:3]])
    assert "│ deletion_area@mask │" in capsys.readouterr().out


COMMANDS = "list run table demo report look serve measure bench doctor data".split()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(call: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(command, "--help")
    assert code == 0 and [line for line in out.splitlines() if len(line) > 80] == []


def test_progress_shows_the_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 10.0, 60.0, 300.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True, raising=False)
    line = output.ProgressLine("measuring")
    for done in (10, 30, 40):
        line(done, 40)
    printed = capsys.readouterr().err.split("\r")
    assert [one.rstrip() for one in printed[1:]] == [
        "measuring: 25 %, about 30 s left",
        "measuring: 75 %, about 20 s left",
        "measuring: 100 %",
    ]


def test_announcements_are_printed_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output.announce("loading ...")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True, raising=False)
    output.announce("loading \x1b[2J ...")
    assert capsys.readouterr() == ("", "loading \\x1b[2J ...\n")
    monkeypatch.setattr(output.sys, "stderr", None)
    output.announce("loading ...")


def test_control_characters_are_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = "\x1b]0;owned\x07\x1b[31mred\r\x9b1m é 猫"
    output.print_table(bad, ["a"], [[bad]])
    output.show(f"{bad}\n{bad}")
    output.say(bad)
    out, err = capsys.readouterr()
    monkeypatch.setattr(output, "is_plain", lambda: False)
    output.print_table(bad, ["a"], [[bad]])
    rich_output, _ = capsys.readouterr()
    for printed in (out, err, rich_output):
        assert not any(sign in printed for sign in ("\x1b]", "\x1b[31m", "\x07", "\x9b", "\r"))
    assert out.count("\\x1b]0;owned\\x07\\x1b[31mred\\r") == 4 and "é 猫" in out
