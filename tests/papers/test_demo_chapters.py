"""Chapters of the demo: fair controls, commands that exist, and the runs that they read."""

from pathlib import Path

import pytest

from overt import io
from overt.errors import UserError
from overt.experiments import settings
from overt.papers import demo, demo_chapters
from overt.papers.catalog import tables
from tests import toys

PAPERS = Path(demo.__file__).parent


@pytest.mark.parametrize("chapter", demo_chapters.CHAPTERS, ids=lambda one: one.name)
def test_a_method_differs_from_its_control_in_one_setting(
    chapter: demo_chapters.ChapterSpec,
) -> None:
    """The data, the schedule and every other setting are those of the control."""
    rows = {row.label: settings.to_json(demo.demo_recipe(row)) for row in demo.ROWS}
    control, method = rows[chapter.control], rows[chapter.method]
    assert {key for key in control if control[key] != method[key]} == {
        "LTPA": {"model.score"},
        "SSA": {"supervise.target"},
        "HAN": {"model.select"},
        "AdaHAN": {"model.select"},
        "VGP": {"supervise.way"},
        "A2": {"align.fuse"},
        "image": {"model.look"},
        "attention": {"model.look"},
        "truth": {"supervise.target"},
    }[chapter.name]


@pytest.mark.parametrize("chapter", demo_chapters.CHAPTERS, ids=lambda one: one.name)
def test_a_chapter_names_rows_of_a_table(chapter: demo_chapters.ChapterSpec) -> None:
    """The command at full length runs; chapters from no paper have none."""
    command = demo_chapters.table_command(chapter).split()
    assert bool(command) is bool(chapter.paper)
    if command:
        assert command[:2] == ["overt", "table"] and "--seeds 5" in " ".join(command)
        rows = {row.label for row in tables()[command[2]].rows}
        assert set(command[command.index("--rows") + 1].split(",")) <= rows
        assert (PAPERS / chapter.paper / "RESULTS.md").is_file()


def test_names_and_reports_of_chapters_are_unique() -> None:
    names = [one.name.lower() for one in demo_chapters.CHAPTERS]
    assert len(set(names)) == len(names) and "report" not in names  # names of pages
    methods = [one.method for one in demo_chapters.CHAPTERS]
    assert len(set(methods)) == len(methods)


def test_a_chapter_needs_both_of_its_rows() -> None:
    assert demo_chapters.chapters_of(["grounded", "soft-attention"]) == ()
    (found,) = demo_chapters.chapters_of(["grounded", "ungrounded", "soft-attention"])
    assert found.name == "VGP"
    assert demo_chapters.with_controls(["grounded"]) == {"grounded", "ungrounded"}


def test_chapters_read_the_runs_of_their_rows(tmp_path: Path) -> None:
    rows = ("ungrounded", "grounded")
    for label in rows:
        toys.write_run_folder(tmp_path / label, toys.RECIPES["toy"](), 0)
        results = io.read_json(tmp_path / label / "results.json")
        io.write_json(tmp_path / label / "results.json", {**results, "title": label})
    (found,) = demo_chapters.read_chapters(tmp_path, rows)
    assert (found.name, found.control.name, found.method.name) == ("VGP", *rows)
    assert found.metrics[0].key == "grounding_accuracy" and found.report == "vgp.html"
    assert found.command.startswith("overt table vgp-scenes") and "RESULTS.md" in found.more
    with pytest.raises(UserError, match="average-pooling"):
        demo_chapters.read_chapters(tmp_path, ("average-pooling", "learned-attention"))
