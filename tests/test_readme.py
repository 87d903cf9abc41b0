"""README.md and the pages of docs/: code blocks run, commands exist, and the tour is complete.

Conventions by the words after the three backticks:

- `python`: run. The blocks of one page share a namespace, in order, in an empty folder.
- `console`: lines that start with `$ `. For an `overt ...` line the command and its flags must
  exist, for a `make ...` line the targets. Other programs are not checked.
- `console run`: each `overt` line is also run, in the same folder as the Python of the page, and
  must exit with 0. Lines below it are its output, compared as in doctest: `...` matches anything.
- `output`: the printed output of the `python` block directly above, compared as in doctest. With
  `output within=0.05` every number may differ by that much, because rounding and training differ
  between machines.
- A page in docs/tutorials shows images (`![...](x.png)`) that its code writes; the small copy next
  to the page is made by `python docs/pictures.py`.
- other words: `long` (run only by `make test-long`, after the blocks above it), `needs=timm`
  (skipped without that package), `with="--set train.steps=2"` (added to each command to make it
  small; not shown to the reader).
- Code that is not run is `text` instead of `python`.

The tour is the first block below a heading with the word "tour" in README.md: a tree with two
spaces per level, folders end in `/`, and every line describes its file.
"""

import contextlib
import doctest
import importlib.util
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("**/*.md"))]
PAGES += sorted((ROOT / "overt" / "papers").glob("*/README.md"))
# Pages whose code takes several seconds run in `make test-long`; README.md always runs.
SLOW_PAGES = "measure speed tour extending train-without-labels inspect-a-model a2/README".split()
SLOW_PAGES += ["look-at-a-vlm", "prune-a-vlm"]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, eq=False)
class Block:
    """One fenced block: first line, language, words after the language, and text."""

    line: int
    language: str
    words: dict[str, str]
    body: str


@dataclass(frozen=True)
class Command:
    """One `$` line of a console block, joined over `\\` line ends, and the output below it."""

    line: int
    text: str
    output: str


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        language, *words = shlex.split(match["info"]) or [""]
        pairs = {name: value for name, _, value in (word.partition("=") for word in words)}
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(line, language, pairs, match["body"]))
    return found


def commands(block: Block) -> list[Command]:
    found: list[tuple[int, str, list[str]]] = []
    open_end = False
    for number, line in enumerate(block.body.splitlines(), block.line + 1):
        if open_end:
            start, text, output = found[-1]
            found[-1] = (start, text[:-1] + line.strip(), output)
        elif line.startswith("$ "):
            found.append((number, line[2:], []))
        elif found:
            found[-1][2].append(line)
        open_end = bool(found) and not found[-1][2] and found[-1][1].endswith("\\")
    return [Command(line, text, "\n".join(output)) for line, text, output in found]


# --- running --------------------------------------------------------------------------------


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def run_python(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """Run a block and return its printed output."""
    # Empty lines before the code, so that a traceback has the line number of the page.
    source = "\n" * block.line + block.body
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, str(page), "exec"), namespace)  # noqa: S102  # our own page
    return printed.getvalue()


def same_output(shown: Block, printed: str) -> bool:
    """Return whether the printed output equals that of the page, within its tolerance."""
    if "within" not in shown.words:
        wanted, found = (f"{text.strip()}\n" for text in (shown.body, printed))
        return doctest.OutputChecker().check_output(wanted, found, DOCTEST_FLAGS)
    near = float(shown.words["within"])
    texts = [" ".join(NUMBER.sub(" # ", text).split()) for text in (shown.body, printed)]
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (shown.body, printed)]
    return texts[0] == texts[1] and all(
        abs(one - two) <= near + 1e-9 for one, two in zip(*numbers, strict=True)
    )


CommandResult = tuple[int, str, str]  # exit code, stdout, stderr


def run_installed(words: list[str]) -> CommandResult:
    """Run the installed command in a subprocess."""
    done = subprocess.run(
        [Path(sys.executable).with_name("overt"), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )
    return done.returncode, done.stdout, done.stderr


def inside(words: list[str]) -> CommandResult:
    """Run the command in this process, which is faster because torch is imported already."""
    from overt.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def run_command(command: Command, extra: str, run: Callable[[list[str]], CommandResult]) -> None:
    words = shlex.split(command.text, comments=True) + shlex.split(extra)
    if words[0] != "overt":
        return
    code, out, err = run(words[1:])
    assert code == 0, f"{command.text}\n{out}{err}"
    if command.output.strip():
        same = doctest.OutputChecker().check_output(
            command.output.strip() + "\n", out.strip() + "\n", DOCTEST_FLAGS
        )
        assert same, f"{command.text}\nshown:\n{command.output}\nprinted:\n{out}"


def run_page(page: Path, long: bool) -> int:
    """Run a page in the current folder, long blocks only if `long`; return the number of blocks."""
    shown = blocks(page.read_text(encoding="utf-8"))
    todo = [b for b in shown if b.language == "python" or "run" in b.words]
    todo = [b for b in todo if long or "long" not in b.words]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    after = dict(itertools.pairwise(shown))
    missing: list[str] = []
    for block in todo:
        wanted = filter(None, block.words.get("needs", "").split(","))
        lacking = [name for name in wanted if importlib.util.find_spec(name) is None]
        if lacking:  # the block and all that depend on it are skipped
            missing.append(f"{page.name}:{block.line} needs the package {', '.join(lacking)}")
        elif block.language == "python":
            printed = run_python(block, page, namespace)
            below = after.get(block)
            if below is not None and below.language == "output":
                where = f"{page.name}:{below.line}"
                assert same_output(below, printed), f"{where} shows\n{below.body}\nnot\n{printed}"
        else:
            for command in commands(block):
                run = run_installed if page == README else inside
                run_command(command, block.words.get("with", ""), run)
    if missing:
        pytest.skip("; ".join(missing))
    return len(todo)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PICTURE = re.compile(r"!\[[^\]]+\]\(([^)]+\.png)\)")


def check_pictures(page: Path, folder: Path) -> None:
    """Check that the code of a tutorial writes its images, and that small copies exist."""
    if page.parent.name != "tutorials":
        return
    for name in PICTURE.findall(page.read_text(encoding="utf-8")):
        assert (folder / name).is_file(), (
            f"{page.name} shows {name}, and its code wrote no such file"
        )
        assert (page.parent / name).is_file(), f"{name} is missing: run python docs/pictures.py"
        assert (page.parent / name).stat().st_size < 150_000, f"{name} is too large"


def is_long(page: Path) -> bool:
    return any("long" in block.words for block in blocks(page.read_text(encoding="utf-8")))


def marked_pages() -> list[object]:
    """Return the pages; slow ones are marked as long."""
    slow = tuple(f"/{name}.md" for name in SLOW_PAGES)
    marks = [(pytest.mark.long,) if str(page).endswith(slow) else () for page in PAGES]
    assert sum(map(len, marks)) == len(SLOW_PAGES), "a slow page was renamed"
    return [pytest.param(page, marks=mark) for page, mark in zip(PAGES, marks, strict=True)]


@pytest.mark.parametrize("page", marked_pages(), ids=page_name)
def test_code_blocks_of_pages_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page, long=False)
    if not is_long(page):
        check_pictures(page, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_code_blocks_of_long_pages_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if is_long(page):
        run_page(page, long=True)
        check_pictures(page, tmp_path)


def test_readme_has_python_code_and_a_command_that_run() -> None:
    shown = blocks(README.read_text(encoding="utf-8"))
    assert any(block.language == "python" for block in shown)
    assert any("run" in block.words for block in shown)


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


# --- commands exist -------------------------------------------------------------------------


def unknown_part(words: list[str]) -> str | None:
    """Return the unknown command or flag of an `overt` command line, or None."""
    import typer

    from overt.cli import app

    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    flags = {flag for p in command.params for flag in [*p.opts, *p.secondary_opts]} | {"--help"}
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return next((f"flag {flag}" for flag in given if flag not in flags), None)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_on_pages_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for block in blocks(page.read_text(encoding="utf-8")):
        for command in commands(block) if block.language == "console" else []:
            for part in re.split(r"\s*(?:&&|\|\||;|\|)\s*", command.text):
                words = shlex.split(part, comments=True)
                if words[:1] == ["overt"] and (missing := unknown_part(words)):
                    wrong.append(f"line {command.line}: no {missing}")
                if words[:1] == ["make"]:
                    goals = {w for w in words[1:] if "=" not in w and not w.startswith("-")}
                    wrong += [f"line {command.line}: no target {g}" for g in goals - targets]
    assert wrong == []


# --- the tour -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One line of a tour."""

    path: str
    about: str


def entries(tree: str) -> Iterator[Entry]:
    """Yield each file and folder of a tree with two spaces per level."""
    above: list[str] = []
    for line in filter(str.strip, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, about = line.strip().partition(" ")
        del above[depth:]
        yield Entry("".join([*above, name]), about.strip())
        above.append(name)


def files_below(folder: Path) -> set[str]:
    """Return the modules and packages of a folder, which a tour must list."""
    hidden = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    shown = [p for p in folder.iterdir() if p.name not in hidden and not p.name.startswith(".")]
    return {p.name + "/" * p.is_dir() for p in shown if p.is_dir() or p.suffix == ".py"}


def tour_faults(tree: str, root: Path) -> list[str]:
    """Return messages for missing or unexplained entries and for unlisted files."""
    listed = list(entries(tree))
    faults = [f"{e.path} is not there" for e in listed if not (root / e.path).exists()]
    faults += [f"{e.path} is not explained" for e in listed if not e.about]
    paths = {entry.path for entry in listed}
    for folder in [e.path for e in listed if e.path.startswith("overt/") and e.path.endswith("/")]:
        inside = any(path != folder and path.startswith(folder) for path in paths)
        if (folder == "overt/" or inside) and (root / folder).is_dir():
            missing = sorted(n for n in files_below(root / folder) if folder + n not in paths)
            faults += [f"{folder}{name} is not listed" for name in missing]
    return faults if "overt/" in paths else [*faults, "overt/ is not listed"]


def test_the_tour_lists_every_package() -> None:
    text = README.read_text(encoding="utf-8")
    heading = re.search(r"^#+ .*\btour\b.*$", text, re.MULTILINE | re.IGNORECASE)
    assert heading, "README.md has no heading with the word tour"
    tree = blocks(text[heading.end() :])[0].body
    assert tour_faults(tree, ROOT) == []


# --- tests of the checks ------------------------------------------------------------------

PAGE = """# Title
```python
x = 2
```
```console run with="--steps 1"
$ overt run \\
    demo  # a word
said
...
$ make test
```
```python long needs=no_such_package
y = x + 1
```
"""


def test_blocks_and_commands_are_parsed() -> None:
    first, second, third = blocks(PAGE)
    assert (first.line, first.language, first.body) == (2, "python", "x = 2\n")
    assert second.words == {"run": "", "with": "--steps 1"}
    assert third.words == {"long": "", "needs": "no_such_package"}
    one, two = commands(second)
    assert (one.line, one.text, one.output) == (6, "overt run demo  # a word", "said\n...")
    assert (two.line, two.text, two.output) == (10, "make test", "")


def test_commands_and_flags_that_do_not_exist_are_found() -> None:
    assert unknown_part(["overt", "list", "--json"]) is None
    assert unknown_part(["overt", "--version"]) is None
    assert unknown_part(["overt", "lisst"]) == "command lisst"
    assert unknown_part(["overt", "list", "--yaml=x"]) == "flag --yaml"


def test_python_blocks_share_a_namespace_and_report_their_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 2\n```\n\n```python\nassert x == 2\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page, long=False)
    assert caught.traceback[-1].lineno + 1 == 7


def test_printed_output_is_compared_with_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    code = "```python\nprint('a 0.52 of', 3)\n```\n"
    for words, body, right in (
        ("output", "a ... of 3", True),
        ("output", "a 0.50 of 3", False),
        ("output within=0.05", "a  0.5 of\n3", True),
        ("output within=0.01", "a 0.5 of 3", False),
        ("output within=9", "b 0.52 of 3", False),
        ("output within=9", "a 0.52 of 3 4", False),
    ):
        page.write_text(f"{code}\n```{words}\n{body}\n```\n")
        with contextlib.nullcontext() if right else pytest.raises(AssertionError, match="shows"):
            run_page(page, long=False)


def test_a_block_with_a_missing_package_is_skipped_with_its_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python needs=no_such_package\n1 / 0\n```\n```python\n1 / 1\n```\n")
    with pytest.raises(pytest.skip.Exception, match=r"page\.md:1.*no_such"):
        run_page(page, long=False)


def test_the_tour_check_finds_missing_entries(tmp_path: Path) -> None:
    (tmp_path / "overt/data").mkdir(parents=True)
    for name in ["__init__.py", "files.py", "data/__init__.py", "data/cifar.py"]:
        (tmp_path / "overt" / name).touch()
    whole = "overt/  the package\n  files.py  disk\n  data/  sets\n    cifar.py  pictures\n"
    assert tour_faults(whole, tmp_path) == []
    assert tour_faults("overt/  x\n  files.py  y\n  data/  sets\n", tmp_path) == []
    assert tour_faults("overt/  x\n  data/  sets\n", tmp_path) == ["overt/files.py is not listed"]
    assert tour_faults(whole + "  gone.py  x\n", tmp_path) == ["overt/gone.py is not there"]
    assert tour_faults(whole.replace("  disk", ""), tmp_path) == ["overt/files.py is not explained"]
    (tmp_path / "overt/data/trec.py").touch()
    assert tour_faults(whole, tmp_path) == ["overt/data/trec.py is not listed"]
    assert tour_faults("", tmp_path) == ["overt/ is not listed"]
