"""Packaging: dependencies, pinned versions, the wheel, the Makefile and the citation."""

import ast
import email
import functools
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE = ROOT / "overt"
GENERATED = {"__pycache__"}

# Extras not installed together with the pinned torch: see the comment at each.
UNPINNED = {"timm"}  # installs torchvision, whose build on PyPI needs CUDA


def declared(extra: str | None = None) -> set[str]:
    """Return the distributions of the core, or of one extra with its nested extras."""
    if extra is None:
        return {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    found = set()
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == "overt":
            found |= {name for other in requirement.extras for name in declared(other)}
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def closure(name: str, extras: frozenset[str], seen: set[tuple[str, str]]) -> Iterator[str]:
    """Yield a distribution and all its dependencies on this machine."""
    for extra in ("", *sorted(extras)):
        if (canonicalize_name(name), extra) in seen:
            continue
        seen.add((canonicalize_name(name), extra))
        yield canonicalize_name(name)
        for requirement in map(Requirement, metadata.requires(name) or []):
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": extra}):
                yield from closure(requirement.name, frozenset(requirement.extras), seen)


def test_constraints_pin_exactly_the_dev_dependencies() -> None:
    needed = set(closure("overt", frozenset({"dev"}), set())) - {"overt"}
    # Another Python or torch with CUDA needs more; on the pinned set they are equal.
    assert set(pins()) == {name for name in needed if not name.startswith(("nvidia", "triton"))}


def test_the_installed_versions_are_the_pinned_ones() -> None:
    there = {name: metadata.version(name).partition("+")[0] for name in pins()}
    assert there == pins()


def test_pins_are_inside_the_declared_ranges() -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name not in UNPINNED | {"overt"}:
            assert requirement.specifier.contains(pins()[name]), requirement


# --- imports --------------------------------------------------------------------------------


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each third-party package that a file imports, and whether at module level."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            top = name.split(".", maxsplit=1)[0]
            if top not in sys.stdlib_module_names and top != "overt":
                yield top, node in tree.body


def third_party_imports() -> list[tuple[Path, str, bool]]:
    """Return every third-party import; those of `inspect/server` count as not at module level."""
    apart = PACKAGE / "inspect" / "server"  # imported only by `overt serve`, which needs its extra
    return [
        (path, top, at_top and apart not in path.parents)
        for path in sorted(PACKAGE.rglob("*.py"))
        for top, at_top in imports(path)
    ]


providers = functools.cache(
    metadata.packages_distributions
)  # reads the file lists of all installed packages


def distributions(top: str) -> set[str]:
    names = providers().get(top, [top])
    return {canonicalize_name(name) for name in names}


# Subclasses of classes of transformers; their packages import them inside of functions.
SUBCLASSES = {
    PACKAGE / "nn/cache_eviction/evicted_layer.py",
    PACKAGE / "nn/token_pruning/pruned_cache_layer.py",
}


@pytest.mark.long
def test_every_import_is_declared() -> None:
    extras = {name for e in PROJECT["optional-dependencies"] if e != "dev" for name in declared(e)}
    # Optional packages with guarded imports that belong to no extra.
    optional = {"torchvision", "triton", "pandas", "lightning"}
    # torch installs markupsafe, so these can be imported without their extra. `overt.cli` cannot.
    with_torch = {folder: {"markupsafe"} for folder in ("overt/viz", "overt/data/scenes")}
    with_torch["overt/cli"] = declared("cli")
    wrong = [
        f"{path.relative_to(ROOT)} imports {top}"
        for path, top, at_top in third_party_imports()
        if top not in optional
        and not distributions(top)
        & (
            declared()
            | with_torch.get(path.parent.relative_to(ROOT).as_posix(), set())
            | (set() if at_top and path not in SUBCLASSES else extras)
        )
    ]
    assert wrong == []


@pytest.mark.long
def test_every_core_dependency_is_used() -> None:
    used = {name for _, top, _ in third_party_imports() for name in distributions(top)}
    assert declared() - used == set()


def test_slow_packages_are_imported_inside_functions() -> None:
    slow = {"scipy", "matplotlib", "transformers", "skimage", "sklearn", "ot", "tensorboard"}
    slow |= {"torchmetrics", "numba", "timm", "fastapi", "uvicorn"}
    assert [
        (str(path), top)
        for path, top, at_top in third_party_imports()
        if at_top and top in slow and path not in SUBCLASSES
    ] == []
    code = (
        "import sys, overt.nn.cache_eviction, overt.nn.token_pruning.pruned_decoder\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def clean_environment() -> dict[str, str]:
    """Return the environment without the paths of this checkout."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}


def run_in(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_core_has_at_most_six_small_packages() -> None:
    assert {"torch", "numpy"} <= declared() and len(declared() - {"torch", "numpy"}) <= 6


@pytest.mark.long
def test_no_other_package_is_needed_to_import_the_library() -> None:
    """Everything else is an extra, imported by the functions that use it."""
    rest = {name for extra in PROJECT["optional-dependencies"] for name in declared(extra)}
    modules = {"scikit-learn": "sklearn", "pot": "ot", "easy-vqa": "easy_vqa"}
    hidden = {modules.get(name, name.replace("-", "_")) for name in rest - declared()}
    hidden -= {"jinja2", "markupsafe", "setuptools"}  # torch requires them
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(hidden)!r}))\n"
        "import overt\n"
        "for name in overt.__all__:\n"
        "    value = getattr(overt, name)\n"
        "    [getattr(value, one) for one in getattr(value, '__all__', [])]\n"
        "print('whole')"
    )
    done = run_in(Path(sys.executable), ROOT, "-c", code)
    assert done.stdout == "whole\n", done.stderr


def test_the_command_line_without_its_extra_names_it() -> None:
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['overt', 'list']\n"
        "from overt.__main__ import _run_command; sys.exit(_run_command())"
    )
    done = run_in(Path(sys.executable), ROOT, "-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    line = "overt: this needs the package typer: pip install typer (part of overt[cli]).\n"
    assert done.stderr == line


# --- the wheel ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what is packaged, so that the checkout is unchanged."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(PACKAGE, copy / "overt", ignore=shutil.ignore_patterns(*GENERATED))
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel."""
    copy = source
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(out), str(copy)], check=True)
    return next(out.glob("*.whl"))


@pytest.mark.long
def test_the_wheel_contains_every_file_of_the_package(wheel: Path) -> None:
    ours = [p for p in PACKAGE.rglob("*") if p.is_file() and not GENERATED & set(p.parts)]
    ours = [p for p in ours if p.suffix != ".md"]  # results and logs are not packaged
    wanted = {p.relative_to(ROOT).as_posix() for p in ours}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert wanted - names == set()
    assert {name for name in names if not name.startswith("overt-")} == wanted
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.long
def test_the_unpacked_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)  # an archive of this test
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import overt; print(overt.__file__);"
        "sys.argv[0] = 'overt'; from overt.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, printed = done.stdout.strip().split("\n")
    assert Path(where).is_relative_to(tmp_path)
    assert PROJECT["version"] in printed


MAX_MEGABYTES = 8  # of which the small models are 3.5


@pytest.mark.long
def test_the_wheel_has_its_metadata_and_is_small(wheel: Path) -> None:
    assert wheel.name == f"overt-{PROJECT['version']}-py3-none-any.whl"
    assert wheel.stat().st_size < MAX_MEGABYTES * 2**20
    with zipfile.ZipFile(wheel) as archive:
        info = f"overt-{PROJECT['version']}.dist-info"
        text = email.message_from_string(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    needs = [Requirement(line) for line in text.get_all("Requires-Dist") or []]
    core = {canonicalize_name(one.name) for one in needs if "extra" not in str(one.marker)}
    assert core == declared()
    assert set(text.get_all("Provides-Extra") or []) == set(PROJECT["optional-dependencies"])
    assert text["Requires-Python"] == PROJECT["requires-python"]
    assert text["License-Expression"] == PROJECT["license"]
    assert text["Description-Content-Type"] == "text/markdown"
    assert text.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert "overt = overt.__main__:main" in scripts


@pytest.mark.long
def test_the_source_distribution_builds_the_same_wheel(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.stat().st_size < MAX_MEGABYTES * 2**20
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "sdist", filter="data")
    (folder,) = (tmp_path / "sdist").iterdir()
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path / "again"), str(folder)], check=True)
    (again,) = (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        files = {one.filename: one.CRC for one in first.infolist()}
        assert {one.filename: one.CRC for one in second.infolist()} == files


@pytest.fixture(scope="module")
def core_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment that has the core dependencies only.

    They are linked from the environment of the tests, which needs no network; return its Python.
    """
    place = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = place / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", where], text=True).strip())
    needed = {name for one in declared() for name in closure(one, frozenset(), set())}
    for name in needed:
        found = metadata.distribution(name)
        tops = {file.parts[0] for file in found.files or [] if ".." not in file.parts}
        for top in tops - GENERATED:
            there = Path(str(found.locate_file(top)))
            if there.exists() and not (site / top).exists():
                (site / top).symlink_to(there)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-deps"]
    subprocess.run([*command, str(wheel)], check=True, cwd=place, env=clean_environment())
    return python


@pytest.mark.long
def test_the_core_runs_in_an_environment_with_its_dependencies_only(
    core_only: Path, tmp_path: Path
) -> None:
    """Capture, losses and metrics, an example of the README, and errors that name the extras."""
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    example = next(one for one in blocks if "losses.cross_entropy" in one)
    (tmp_path / "core.py").write_text(
        "import torch, overt, importlib.util\n"
        "assert importlib.util.find_spec('matplotlib') is None\n"
        "layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)\n"
        "x = torch.randn(1, 5, 8)\n"
        "with overt.watch(layer) as trace:\n"
        "    layer(x, x, x)\n"
        "wanted = layer(x, x, x, average_attn_weights=False)[1]\n"
        "torch.testing.assert_close(trace.map().weights[:, 0], wanted)\n"
        f"{example}\n"
        "overt.io.write_tensors(__import__('pathlib').Path('x.safetensors'), {'x': x})\n"
        "print(overt.__version__, overt.__file__)\n"
        "try:\n"
        "    overt.viz.figure.new_figure(1.0, 1.0)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = run_in(core_only, tmp_path, "core.py")
    assert done.returncode == 0, done.stderr
    version, failed = done.stdout.splitlines()[-2:]
    assert version.startswith(PROJECT["version"]) and str(core_only.parents[1]) in version
    assert failed.startswith("PackageError this needs the package matplotlib")
    assert "overt[viz]" in failed

    done = run_in(core_only, tmp_path, "-m", "overt", "--help")
    assert done.returncode == 2 and "overt[cli]" in done.stderr and "Trace" not in done.stderr
    done = run_in(core_only, tmp_path, "-m", "overt", "--version")
    assert done.stdout == f"overt {PROJECT['version']}\n"


def test_the_version_is_written_once() -> None:
    assert metadata.version("overt") == PROJECT["version"]
    pattern = re.compile(rf"""["']{re.escape(PROJECT["version"])}["']""")
    assert [p for p in PACKAGE.rglob("*.py") if pattern.search(p.read_text())] == []
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"[{PROJECT['version']}]" in changes or "[Unreleased]" in changes


def test_the_license_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_an_old_python_fails_with_the_required_version(tmp_path: Path) -> None:
    """`make` with a too old Python fails before files are written."""
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(
        ["make", f"PYTHON={old}", ".venv/.made"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr and not (tmp_path / ".venv").exists()


def test_every_make_target_has_a_description() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in "demo test test-long lint speed docs clean help".split():
        assert re.search(rf"^{target} +\S+", done.stdout, re.MULTILINE), target


# --- citation -------------------------------------------------------------------------------


def test_the_citation_lists_the_five_papers_with_their_pages() -> None:
    """According to version 1.2.0 of the Citation File Format."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["license"] == PROJECT["license"]
    papers = cited["references"]
    assert [Path(paper["notes"]).parent.name for paper in papers] == [
        "ltpa",
        "ssa",
        "han",
        "vgp",
        "a2",
    ]
    for paper in papers:
        page = (ROOT / paper["notes"]).read_text()
        families = [author["family-names"] for author in paper["authors"]]
        assert str(paper["year"]) in page and families[0] in page and families[-1] in page
