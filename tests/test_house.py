"""Project rules checked on the source: import order, names, files, docstrings and messages."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "overt"

# A module may import from its own package and from packages to the left of it.
ORDER = "errors system io geometry attention capture attribution data losses targets nn metrics"
PACKAGES = [
    *ORDER.split(),
    "train",
    "viz",
    "testing",
    "experiments",
    "papers",
    "inspect",
    "cli",
    "__main__",
]

HEAVY = set("torch numpy scipy transformers tokenizers PIL accelerate matplotlib fastapi".split())
HEAVY |= {"jaxtyping", "safetensors"}

# Modules without a separate test file, and where they are tested.
MODULES_WITHOUT_TEST = {
    "errors.py": "exceptions without behaviour; tests/cli/test_exit_codes.py has the exit codes",
    "inspect/loaded_model.py": "a record of fields; tests/inspect/test_load_model.py makes it",
    "papers/worker.py": "an entry point; tests/experiments/test_workers.py starts it",
}
# Test files without a module.
TESTS_WITHOUT_MODULE = {
    "test_house.py",
    "test_readme.py",
    "test_packaging.py",
    "test_docs.py",
    "test_ci.py",
    "test_examples.py",
}
TESTS_WITHOUT_MODULE |= {
    "test_bad_input.py",
    "test_results.py",
    "test_speed.py",
    "papers/test_items.py",
}
# Folders of tests across modules: comparison with other libraries, and robustness.
CROSS_MODULE_FOLDERS = ("parity/", "trust/")


def modules(folder: Path = PACKAGE) -> list[Path]:
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def relative_name(path: Path) -> str:
    """overt/data/cifar.py -> data/cifar.py, as test id."""
    return path.relative_to(PACKAGE).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


# --- import order ---------------------------------------------------------------------------


def packages_imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and package of each import of a part of overt, anywhere in the file.

    `package` is the dotted package of the file, from which relative imports start.
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


def order_violations(source: str, path: str) -> list[str]:
    """Return the imports of a file in overt/ that break the order of the packages."""
    home = path.split("/", maxsplit=1)[0].removesuffix(".py")
    package = ".".join(["overt", *path.split("/")[:-1]])
    wrong = []
    for line, other in packages_imported(source, package):
        if other not in PACKAGES:
            wrong.append(f"{path}:{line} imports overt.{other}, which is not a package")
        elif other != home and PACKAGES.index(other) > PACKAGES.index(home):
            wrong.append(f"{path}:{line} ({home}) imports {other}, which is later in the order")
    return wrong


@pytest.mark.parametrize(
    "path", [p for p in modules() if p != PACKAGE / "__init__.py"], ids=relative_name
)
def test_packages_import_one_way(path: Path) -> None:
    assert package_of(path) in PACKAGES, f"{path} is in no package"
    assert order_violations(path.read_text(), relative_name(path)) == []


@pytest.mark.parametrize(
    ("path", "line", "wrong"),
    [
        ("data/batch.py", "from overt.nn import output", True),
        ("data/batch.py", "import overt.nn.output", True),
        ("data/batch.py", "from ..nn import output", True),
        ("data/scenes/world.py", "from ...nn.output import Output", True),
        ("data/batch.py", "def f():\n    from overt.nn import output", True),
        ("data/batch.py", "from overt import nn", True),
        ("data/batch.py", "from overt import watch", True),
        ("data/batch.py", "import overt", True),
        ("io.py", "from .geometry import PixelGeometry", True),
        ("data/batch.py", "from . import cifar", False),
        ("data/batch.py", "from overt import __version__", False),
        ("data/batch.py", "from .cifar import load", False),
        ("data/batch.py", "from ..attention import grid", False),
        ("nn/output.py", "from overt import attention", False),
        ("nn/output.py", "import overture, torch", False),
    ],
)
def test_the_order_check_finds_every_kind_of_import(path: str, line: str, wrong: bool) -> None:
    assert bool(order_violations(line, path)) is wrong


def modules_imported(path: Path, known: set[str]) -> set[str]:
    """Return the modules of overt that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overt"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & known) or ({node.module or ""} & known)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found


def test_modules_have_no_import_cycles() -> None:
    """Imports inside functions count; `__init__` of packages only re-export and do not."""
    paths = {dotted(p): p for p in modules() if p.name != "__init__.py"}
    graph = {name: modules_imported(path, set(paths)) - {name} for name, path in paths.items()}
    while outer := [
        name
        for name, used in graph.items()
        if not used & set(graph) or not any(name in others for others in graph.values())
    ]:  # has no imports left, or no importers left
        for name in outer:
            del graph[name]
    cyclic = {name: sorted(used & set(graph)) for name, used in graph.items()}
    assert not cyclic, f"modules that import each other: {cyclic}"


def dotted(path: Path) -> str:
    """overt/data/cifar.py -> overt.data.cifar"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


# --- public names and import time --------------------------------------------------------


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
def test_quick_commands_import_no_heavy_packages(argv: list[str]) -> None:
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


@pytest.mark.parametrize("name", ["overt", "overt.errors", "overt.io", "overt.cli"])
def test_light_modules_import_no_heavy_packages(name: str) -> None:
    out = run_python(f"import sys, {name}\nprint(*sorted({HEAVY!r} & set(sys.modules)))")
    assert out.split() == []


def test_recipes_import_no_heavy_packages() -> None:
    files = ["overt.papers.catalog", "overt.experiments.recipe"]
    files += [f"overt.papers.{p.parent.name}.config" for p in PACKAGE.glob("papers/*/config.py")]
    files += [f"overt.papers.{p.parent.name}.tables" for p in PACKAGE.glob("papers/*/tables.py")]
    out = run_python(
        f"import sys, {', '.join(files)}\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    assert out.split() == []


def test_the_flags_of_the_command_line_are_frozen() -> None:
    """Flags change only on purpose: after an intended change run `make freeze` and commit."""
    code = "import sys; sys.path.insert(0, 'tests'); import freeze; print(freeze.flags(), end='')"
    frozen = (ROOT / "tests" / "cli_flags.txt").read_text()
    assert run_python(code).splitlines() == frozen.splitlines(), "if intended: make freeze"


MAX_EXPORTS = 80


@pytest.mark.parametrize(
    "package", sorted(PACKAGE.glob("*/__init__.py")), ids=lambda p: p.parent.name
)
def test_a_package_exports_at_most_80_names(package: Path) -> None:
    module = importlib.import_module(f"overt.{package.parent.name}")
    names = [name for name in getattr(module, "__all__", []) if not name.startswith("_")]
    assert len(set(names)) == len(names) <= MAX_EXPORTS
    assert all(hasattr(module, name) for name in names)


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(relative_name(path))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


# Participles that are nouns of the field.
NOUNS = set("decoding distributed forgetting frozen grounding published sampling varlen".split())
NOUNS |= {"captioning", "pretraining", "testing"}


def test_no_module_is_named_by_a_participle() -> None:
    names = {path.stem for path in modules()} | {path.parent.name for path in modules()}
    bare = {n for n in names if "_" not in n and re.search(r"(ing|ed|en)$", n)} - NOUNS
    assert sorted(bare) == []


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


def test_modules_and_test_files_correspond() -> None:
    tests = ROOT / "tests"
    wanted = {
        (p.relative_to(PACKAGE).parent / f"test_{p.name}").as_posix(): relative_name(p)
        for p in modules()
        if p.name not in {"__init__.py", "__main__.py"}
    }
    there = {p.relative_to(tests).as_posix() for p in tests.rglob("test_*.py")}
    missing = {name: test for test, name in wanted.items() if test not in there}
    assert sorted(set(missing) - set(MODULES_WITHOUT_TEST)) == [], "modules without a test file"
    assert sorted(set(MODULES_WITHOUT_TEST) - set(wanted.values())) == [], (
        "entries without a module"
    )
    alone = {
        t
        for t in there - set(wanted) - TESTS_WITHOUT_MODULE
        if not t.startswith(CROSS_MODULE_FOLDERS)
    }
    # A module may have several test files: test_files_crash.py and test_files.py.
    alone = {t for t in alone if not any(t.startswith(w.removesuffix(".py") + "_") for w in wanted)}
    packages = {
        (f.relative_to(PACKAGE).parent / f"test_{f.name}.py").as_posix()
        for f in {p.parent for p in modules()} - {PACKAGE}
    }
    assert sorted(alone - packages) == [], "test files without a module"


@pytest.mark.parametrize("path", modules(), ids=relative_name)
def test_modules_with_shapes_have_no_future_annotations(path: Path) -> None:
    """`from __future__ import annotations` turns shapes into unchecked strings."""
    text = path.read_text()
    assert not ("from __future__ import annotations" in text and "jaxtyping" in text)


@pytest.mark.parametrize("path", modules(), ids=relative_name)
def test_public_methods_have_docstrings(path: Path) -> None:
    """Ruff checks docstrings of modules, classes and functions; this test checks methods.

    Exceptions: empty bodies of protocols, `forward`, and overrides of a documented base.
    """
    undocumented = []
    for kind in ast.walk(ast.parse(path.read_text())):
        if not isinstance(kind, ast.ClassDef) or kind.name.startswith("_"):
            continue
        for method in kind.body:
            if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
                continue
            empty = ast.unparse(method.body[-1]) == "..."
            overrides = any("override" in ast.unparse(d) for d in method.decorator_list)
            if not (empty or overrides or method.name == "forward" or ast.get_docstring(method)):
                undocumented.append(f"{method.lineno}: {kind.name}.{method.name}")
    assert undocumented == []


# --- messages -------------------------------------------------------------------------------

LONG_PATTERN = 20
# These contain only names, shapes, settings and commands: 103 written in `match=`, 53 that reach it
# through a parameter. Lower the number when one is removed.
MAX_LONG_PATTERNS = 156
PARAMETERS = """
@pytest.mark.parametrize(%s, [%s])
def test(x, m):
    with pytest.raises(ValueError, match=%s):
        pass
"""


def find_patterns(source: str) -> tuple[list[str], list[str]]:
    """Return the patterns given to `match=`, and those that reach it through a parameter.

    Of f-strings only the constant text; of parameters only constant strings.
    """
    direct, by_parameter = [], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "match":
            parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            direct.append("".join(str(p.value) for p in parts if isinstance(p, ast.Constant)))
        elif isinstance(node, ast.FunctionDef):
            by_parameter += find_parameter_patterns(node)
    return direct, by_parameter


def find_parameter_patterns(test: ast.FunctionDef) -> Iterator[str]:
    """Yield the string values of the parameters of a test that are used in `match=`."""
    keywords = [n for n in ast.walk(test) if isinstance(n, ast.keyword) and n.arg == "match"]
    used = {n.id for one in keywords for n in ast.walk(one.value) if isinstance(n, ast.Name)}
    for call in test.decorator_list:
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize")):
            continue
        names, values = call.args[:2]
        if not isinstance(values, ast.List | ast.Tuple):
            continue
        given = ast.literal_eval(names)
        columns = given.replace(",", " ").split() if isinstance(given, str) else list(given)
        for value in values.elts:
            cells = [value]
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("param"):
                cells = value.args
            elif len(columns) > 1 and isinstance(value, ast.List | ast.Tuple):
                cells = value.elts
            for name, cell in zip(columns, cells, strict=False):
                text = cell.value if isinstance(cell, ast.Constant) else None
                if name in used and isinstance(text, str):
                    yield text


def find_long_patterns(source: str) -> list[str]:
    """Return the patterns with 20 or more characters."""
    return [one for some in find_patterns(source) for one in some if len(one) >= LONG_PATTERN]


def test_tests_match_values_of_messages_instead_of_sentences() -> None:
    long, sentences = [], []
    for path in modules(ROOT / "tests"):
        source, name = path.read_text(), path.relative_to(ROOT)
        long += [f"{name}: {one}" for one in find_long_patterns(source)]
        direct, by_parameter = find_patterns(source)
        # More words in a row are a sentence.
        sentences += [f"{name}: {one}" for one in direct if count_words(one) > 3]
        sentences += [f"{name}: {one}" for one in by_parameter if count_words(one) > 2]
    assert sentences == [], "match the key values and names, joined by `.*`"
    assert len(long) <= MAX_LONG_PATTERNS, "\n".join(long)


def count_words(pattern: str) -> int:
    """Return the largest number of lower-case words in a row."""
    runs = re.findall(r"\b[a-z]+(?: [a-z]+)*\b", pattern)
    return max((len(run.split()) for run in runs), default=0)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('pytest.raises(ValueError, match="a needs the same batch as b")', 1),
        ('pytest.raises(ValueError, match="a needs the " "same batch as b")', 1),
        ('pytest.warns(UserWarning, match=f"{a} needs the same batch as {b}")', 1),
        ('pytest.raises(ValueError, match=r"3 .* 4")', 0),
        ('pytest.raises(ValueError, match=f"{a_long_name_of_a_value}.*4")', 0),
        (PARAMETERS % ("('x', 'm')", "(1, 'a needs the same batch'), (2, '3 .* 4')", "m"), 1),
        (PARAMETERS % ("['x', 'm']", "pytest.param(1, 'a needs the same batch')", "m"), 1),
        (PARAMETERS % ("'m'", "'a needs the same batch', 'b needs the same batch'", "f'{m}'"), 2),
        (PARAMETERS % ("'x, m'", "('a needs the same batch', '3 .* 4')", "m"), 0),
    ],
)
def test_long_patterns_are_counted(source: str, found: int) -> None:
    assert len(find_long_patterns(source)) == found
