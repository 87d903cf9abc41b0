"""docs/design/items.md: every item of the five papers is listed with references that exist."""

import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from overt.experiments import settings
from overt.papers import catalog

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "items.md"
SPEC = ROOT.parent / "shared" / "spec"  # notes on the papers, which are not in the repository
FINDINGS = 22
# Questions, tests and experiments of each paper; experiments have names, the others are numbered.
PAPERS: dict[str, tuple[int, int, str]] = {
    "LT": (14, 14, "T1 T2 F6 T3 F9 F10 F3/4/7"),
    "SSA": (19, 12, "T1 T2 T3 T4 F3/F5 F6 F7 F8/F9 A1"),
    "HAN": (15, 13, "T1a T1b T1c T2 T2n T3 47 C1 F3a F3b S"),
    "VGP": (17, 13, "1 2 3 4 5 6 7 8"),
    "A2": (19, 13, "F2 T1 T2 T3 F4 F5 F6 F7 T4 X"),
}
ROW = re.compile(
    r"^\| (?P<item>[FQTE][-\d]\S*) \| (?P<says>.*?) \| ?(?P<where>.*?) \|(?P<why>.*)\|$"
)
SENTENCE = re.compile(r"[A-Z].*[\w`)]\.")


def expected() -> list[str]:
    """Return the ids of all items."""
    ids = [f"F{n}" for n in range(1, FINDINGS + 1)]
    for paper, (questions, tests, experiments) in PAPERS.items():
        ids += [f"Q-{paper}-{n}" for n in range(1, questions + 1)]
        ids += [f"T-{paper}-{n}" for n in range(1, tests + 1)]
        ids += [f"E-{paper}-{name}" for name in experiments.split()]
    return ids


def parse_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of all tables of a page."""
    lines = [line for line in text.splitlines() if re.match(r"\| [FQTE][-\d]", line)]
    found = [ROW.match(line) for line in lines]
    assert None not in found, [line for line, one in zip(lines, found, strict=True) if not one]
    return [{k: v.strip() for k, v in one.groupdict().items()} for one in found if one]


ITEMS = parse_rows(PAGE.read_text(encoding="utf-8"))


@cache
def list_test_names(path: str) -> frozenset[str]:
    """Return the names of the tests of a file."""
    place = ROOT / path
    if not place.is_file():
        return frozenset()
    tree = ast.parse(place.read_text(encoding="utf-8"))
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef))


tables = cache(catalog.tables)


def resolve(name: str) -> Any:
    """Import `overt.x.y` or return the attribute `overt.x.y.f` or `overt.x.C.f`."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as problem:
            if problem.name != module and not module.startswith(f"{problem.name}."):
                raise
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def find_fault(reference: str) -> str | None:
    """Return what is wrong with a function, test, table, recipe or command; None if it exists."""
    if reference.startswith("tests/"):
        path, _, test = reference.partition("::")
        return (
            None if test.startswith("test_") and test in list_test_names(path) else "no such test"
        )
    if reference.startswith("overt."):
        try:
            resolve(reference)
        except AttributeError:
            return "no such name"
        return None
    program, *words = shlex.split(reference)
    return find_command_fault(words) if program == "overt" else "not a reference"


def find_command_fault(words: list[str]) -> str | None:
    """Return what does not exist in `overt table NAME --rows A,B`, `overt run NAME` and others."""
    match words:
        case ["table", name, *options]:
            table = tables().get(name)
            if table is None:
                return "no such table"
            wanted = options[1].split(",") if options[:1] == ["--rows"] else []
            missing = set(wanted) - {row.label for row in table.rows}
            return f"no rows {sorted(missing)}" if missing else None
        case ["run", name, *options]:
            if name not in catalog.recipes():
                return "no such recipe"
            settings.apply(catalog.find_recipe(name), [one for one in options if one != "--set"])
            return None
        case [("look" | "report" | "measure"), *_]:
            return None
    return "no such command"


def references(cell: str) -> list[str]:
    """Return the text between back-ticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_item_is_listed_exactly_once() -> None:
    assert [item["item"] for item in ITEMS] == expected()


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["item"])
def test_references_of_each_item_exist(item: dict[str, str]) -> None:
    assert item["says"], "has no description"
    names = references(item["where"])
    rest = re.sub(r"`[^`]+`", "", item["where"]).replace(",", "").strip()
    assert rest == "", f"the column takes references between back-ticks, found {rest!r}"
    assert names or item["why"], "needs a reference or a reason"
    names += [one for one in references(item["why"]) if one.startswith("overt.")]
    assert {one: wrong for one in names if (wrong := find_fault(one))} == {}


@pytest.mark.parametrize(
    "item", [one for one in ITEMS if one["why"]], ids=lambda item: item["item"]
)
def test_a_reason_is_a_full_sentence(item: dict[str, str]) -> None:
    assert SENTENCE.fullmatch(item["why"]) and len(item["why"].split()) >= 6, item["why"]


def test_items_equal_those_of_the_notes_on_the_papers() -> None:
    seeds, review = SPEC / "seeds.md", SPEC / "review.md"
    if not (seeds.is_file() and review.is_file()):
        pytest.skip("the notes on the papers are not next to this checkout")
    text = seeds.read_text(encoding="utf-8")
    found = re.findall(r"^\| (F\d+) \|", text, re.MULTILINE)
    found += re.findall(r"^## (F\d+)\b", review.read_text(encoding="utf-8"), re.MULTILINE)
    found += re.findall(r"^(?:\||-) ((?:Q|T|E)-(?:LT|SSA|HAN|VGP|A2)-[\w/]+) ", text, re.MULTILINE)
    assert sorted(found) == sorted(expected())


# --- the checks themselves


@pytest.mark.parametrize(
    ("reference", "wrong"),
    [
        ("overt.nn.keep_top", None),
        ("overt.nn.Aligner.advance", None),
        ("overt.nn.keep_bottom", "no such name"),
        ("overt.nowhere.f", "no such name"),
        ("tests/papers/test_items.py::test_a_reason_is_a_full_sentence", None),
        ("tests/papers/test_items.py::test_nothing", "no such test"),
        ("tests/papers/test_nothing.py::test_nothing", "no such test"),
        ("overt table ltpa-1 --rows cifar10-vgg", None),
        ("overt table ltpa-1 --rows cifar10-vgg,oak", "no rows ['oak']"),
        ("overt table ltpa-9", "no such table"),
        ("overt run ltpa-svhn", None),
        ("overt run oak", "no such recipe"),
        ("overt fly", "no such command"),
        ("keep_top", "not a reference"),
    ],
)
def test_references_that_do_not_exist_are_found(reference: str, wrong: str | None) -> None:
    assert find_fault(reference) == wrong


def test_a_malformed_row_is_rejected() -> None:
    assert parse_rows("| F1 | says | `x` | |\n| F2 | says | | Why not. |") == [
        {"item": "F1", "says": "says", "where": "`x`", "why": ""},
        {"item": "F2", "says": "says", "where": "", "why": "Why not."},
    ]
    with pytest.raises(AssertionError, match="F1"):
        parse_rows("| F1 | says |")
