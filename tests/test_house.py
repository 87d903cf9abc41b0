"""The rules of the house, held by reading the source: no rule here needs the code to run well."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "overt"

# A module may import from its own room and from rooms to the left of it.
ORDER = "errors files geometry attention capture data models supervise measure train show testing"
ROOMS = [*ORDER.split(), "recipes", "serve", "cli", "__main__"]

HEAVY = set("torch numpy scipy transformers tokenizers PIL accelerate matplotlib fastapi".split())
HEAVY |= {"jaxtyping", "safetensors"}

# Modules without a test file of their own, and where they are tested instead.
NO_MIRROR = {
    "errors.py": "three exceptions without behaviour; tests/cli/test_ending.py holds exit codes",
}
# Tests that mirror no module.
NO_MODULE = {"test_house.py", "test_readme.py", "test_packaging.py", "test_docs.py", "test_ci.py"}
NO_MODULE |= {"test_bad_input.py", "test_kept.py", "test_speed.py"}
# Folders of tests that go through the whole house: beside foreign libraries, and what must survive.
NO_MIRRORS = ("parity/", "trust/")


def modules(folder: Path = PACKAGE) -> list[Path]:
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def name_of(path: Path) -> str:
    """overt/data/cifar.py -> data/cifar.py: what a failing test prints."""
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


# --- import order ---------------------------------------------------------------------------


def rooms_imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Each import of a part of overt, anywhere in the file: its line and its room.

    `package` is the dotted package the file is in, which relative imports start from.
    """
    for node in ast.walk(ast.parse(source)):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            found = [base] if base != "overt" else [f"overt.{a.name}" for a in node.names]
        for name in found:
            if name == "overt":
                yield node.lineno, "overt"
            elif name.startswith("overt.") and name != "overt.__version__":
                yield node.lineno, name.split(".")[1]


def breaks_order(source: str, path: str) -> list[str]:
    """What a file at this path inside overt/ imports against the order of the rooms."""
    room = path.split("/", maxsplit=1)[0].removesuffix(".py")
    package = ".".join(["overt", *path.split("/")[:-1]])
    wrong = []
    for line, other in rooms_imported(source, package):
        if other not in ROOMS:
            wrong.append(f"{path}:{line} imports overt.{other}, which is no room")
        elif other != room and ROOMS.index(other) > ROOMS.index(room):
            wrong.append(f"{path}:{line} ({room}) imports {other}, which comes after it")
    return wrong


@pytest.mark.parametrize(
    "path", [p for p in modules() if p != PACKAGE / "__init__.py"], ids=name_of
)
def test_rooms_import_one_way(path: Path) -> None:
    assert room_of(path) in ROOMS, f"{path} is in no room"
    assert breaks_order(path.read_text(), name_of(path)) == []


@pytest.mark.parametrize(
    ("path", "line", "wrong"),
    [
        ("data/batch.py", "from overt.models import output", True),
        ("data/batch.py", "import overt.models.output", True),
        ("data/batch.py", "from ..models import output", True),
        ("data/scenes/world.py", "from ...models.output import Output", True),
        ("data/batch.py", "def f():\n    from overt.models import output", True),
        ("data/batch.py", "from overt import models", True),
        ("data/batch.py", "from overt import watch", True),
        ("data/batch.py", "import overt", True),
        ("files.py", "from .geometry import PixelGeometry", True),
        ("data/batch.py", "from . import cifar", False),
        ("data/batch.py", "from overt import __version__", False),
        ("data/batch.py", "from .cifar import load", False),
        ("data/batch.py", "from ..attention import grid", False),
        ("models/output.py", "from overt import attention", False),
        ("models/output.py", "import overture, torch", False),
    ],
)
def test_the_order_check_sees_every_kind_of_import(path: str, line: str, wrong: bool) -> None:
    assert bool(breaks_order(line, path)) is wrong


# --- public names and what they cost --------------------------------------------------------


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_at_most_30_public_names_and_all_resolve() -> None:
    code = (
        "import overt\n"
        "names = [n for n in overt.__all__ if not n.startswith('_')]\n"
        "assert len(set(names)) == len(names) <= 30, names\n"
        "extra = {n for n in dir(overt) if not n.startswith('_')} - set(names)\n"
        "assert not extra, f'public but not in __all__: {extra}'\n"
        "[getattr(overt, name) for name in overt.__all__]\n"
    )
    run_python(code)


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], ["list"], ["run", "--help"], ["demo", "--help"]],
    ids=" ".join,
)
def test_quick_commands_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import contextlib, io, sys\n"
        f"sys.argv = ['overt', *{argv!r}]\n"
        "from overt.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "assert out.getvalue().strip()\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    assert run_python(code).split() == []


@pytest.mark.parametrize("name", ["overt", "overt.errors", "overt.files", "overt.cli"])
def test_light_modules_import_nothing_heavy(name: str) -> None:
    out = run_python(f"import sys, {name}\nprint(*sorted({HEAVY!r} & set(sys.modules)))")
    assert out.split() == []


def test_every_recipe_imports_nothing_heavy() -> None:
    files = [f"overt.recipes.{p.stem}" for p in (PACKAGE / "recipes").glob("recipe*.py")]
    out = run_python(
        f"import sys, {', '.join(files)}\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert out.split() == []


def test_the_flags_of_the_command_line_are_frozen() -> None:
    """A flag changes only on purpose: after a wanted change run `make freeze` and commit."""
    code = "import sys; sys.path.insert(0, 'tests'); import freeze; print(freeze.flags(), end='')"
    frozen = (ROOT / "tests" / "cli_flags.txt").read_text()
    assert run_python(code).splitlines() == frozen.splitlines(), "if wanted: make freeze"


# --- files and words ------------------------------------------------------------------------


def test_no_file_is_called_utils() -> None:
    names = [
        p
        for p in [*modules(), *modules(ROOT / "tests")]
        if re.search("utils?|helpers?|misc", p.stem)
    ]
    assert names == []


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in modules()}
    assert [f for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_every_module_has_its_test_file_and_every_test_file_its_module() -> None:
    tests = ROOT / "tests"
    wanted = {
        (p.relative_to(PACKAGE).parent / f"test_{p.name}").as_posix(): name_of(p)
        for p in modules()
        if p.name not in {"__init__.py", "__main__.py"}
    }
    there = {p.relative_to(tests).as_posix() for p in tests.rglob("test_*.py")}
    missing = {name: test for test, name in wanted.items() if test not in there}
    assert sorted(set(missing) - set(NO_MIRROR)) == [], "modules without a test file"
    assert sorted(set(NO_MIRROR) - set(wanted.values())) == [], "reasons for no module"
    alone = {t for t in there - set(wanted) - NO_MODULE if not t.startswith(NO_MIRRORS)}
    # A module with much to test may have several files: test_files_crash.py beside test_files.py.
    alone = {t for t in alone if not any(t.startswith(w.removesuffix(".py") + "_") for w in wanted)}
    packages = {
        (f.relative_to(PACKAGE).parent / f"test_{f.name}.py").as_posix()
        for f in {p.parent for p in modules()} - {PACKAGE}
    }
    assert sorted(alone - packages) == [], "test files without a module"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_shapes_are_not_hidden_by_the_future_import(path: Path) -> None:
    """`from __future__ import annotations` turns shapes into strings that nobody checks."""
    text = path.read_text()
    assert not ("from __future__ import annotations" in text and "jaxtyping" in text)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_public_methods_say_what_they_do(path: Path) -> None:
    """Ruff asks for the docstrings of modules, classes and functions; methods are asked for here.

    Free are protocols' empty bodies, `forward`, and what overrides a documented base.
    """
    silent = []
    for kind in ast.walk(ast.parse(path.read_text())):
        if not isinstance(kind, ast.ClassDef) or kind.name.startswith("_"):
            continue
        for method in kind.body:
            if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
                continue
            empty = ast.unparse(method.body[-1]) == "..."
            overrides = any("override" in ast.unparse(d) for d in method.decorator_list)
            if not (empty or overrides or method.name == "forward" or ast.get_docstring(method)):
                silent.append(f"{method.lineno}: {kind.name}.{method.name}")
    assert silent == []
