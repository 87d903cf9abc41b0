"""The pages build, links lead somewhere, and what the builder promises holds on a small project."""

import html
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> Iterator[ModuleType]:
    path = list(sys.path)
    module = load("build")
    yield module
    sys.path[:] = path
    for name in ("build", "api"):
        sys.modules.pop(name, None)


SOURCE = '''"""A small module, see `small.keep` and `overt.small.Box.side`."""

from dataclasses import dataclass

LIMIT = 3  # cells
_HIDDEN = 4


def keep(
    scores: Float[Tensor, "b k"], /, count: int = LIMIT, *, among: str = "a long word or two"
) -> Bool[Tensor, "b k"]:
    """Keep the `count` largest.

    >>> keep([1])
    [1]

    And more.
    """


@dataclass(frozen=True)
class Box:
    """A box."""

    side: int  # in pixels

    @property
    def area(self) -> int:
        """Its <area>."""

    def _secret(self): ...
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "overt/__init__.py": "",
        "overt/small.py": SOURCE,
        "README.md": "# Small\n[guide](docs/guide.md#two-words) [code](overt/small.py) "
        "[room](overt/) [data](data.json)\n\n```console run with='--x'\n$ overt list\n```\n",
        "data.json": "{}",
        "docs/guide.md": "# Guide\n\n## Two words\n[back](../README.md) `small.keep`",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def words_of(page: str) -> str:
    """What a reader sees of a page."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def test_our_pages_build_without_broken_links(build: ModuleType, tmp_path: Path) -> None:
    build.build(ROOT, tmp_path / "site")
    assert build.broken(tmp_path / "site") == []
    assert (tmp_path / "site/api/overt.attention.html").exists()
    page = (tmp_path / "site/docs/tutorials/score-a-map.html").read_text()
    headings = re.findall(r"<h2>([^<]+)</h2>\n<ul>", page)
    assert headings[:5] == ["Start", "Tutorials", "Guides", "Papers", "Reference"]
    assert 'aria-current="page">Score a map</a>' in page and '<pre class="printed"' in page
    assert 'rel="prev" href="align-a-captioner.html"' in page
    known = (tmp_path / "site/search.js").read_text()
    for words in ('["AttentionMap", "overt.attention", "api/overt.attention.html', '"Score a map"'):
        assert words in known
    assert len(known) < 1_000_000


def test_links_of_the_repository_work_in_the_site(build: ModuleType, project: Path) -> None:
    site = project / "site"
    build.build(project, site)
    page = (site / "index.html").read_text()
    for link in ("docs/guide.html#two-words", "api/overt.small.html", "api/overt.html"):
        assert f'href="{link}"' in page
    assert (site / "data.json").read_text() == "{}"
    assert "$ overt list" in page and "--x" not in page
    guide = (site / "docs/guide.html").read_text()
    assert 'href="../index.html"' in guide
    assert '<a href="../api/overt.small.html#keep"><code>small.keep</code></a>' in guide
    assert build.broken(site) == []


def test_a_module_page_shows_signatures_fields_and_docstrings(
    build: ModuleType, project: Path
) -> None:
    build.build(project, project / "site")
    page = (project / "site/api/overt.small.html").read_text()
    assert 'id="keep"' in page and 'id="Box.side"' in page and 'id="Box.area"' in page
    assert "LIMIT = 3  # cells" in words_of(page) and "side: int  # in pixels" in words_of(page)
    assert "    /,\n    count: int = LIMIT,\n    *,\n    among: str" in words_of(page)
    assert '<code class="language-python"><span class="gp">&gt;&gt;&gt; </span>' in page
    assert "[1]" in words_of(page)
    assert "_HIDDEN" not in page and "_secret" not in page


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[x](gone.md)", "docs/more.html: gone.md"),
        ("[x](guide.md#gone)", "docs/more.html: guide.html#gone"),
        ("[x](#gone)", "docs/more.html: #gone"),
        ("![x](gone.png)", "docs/more.html: gone.png"),
        ("[x](../../outside.md)", "docs/more.html: ../../outside.md"),
        ("<h2 id='a'>x</h2>\n<h2 id='a'>y</h2>", "docs/more.html: #a twice"),
    ],
)
def test_broken_links_are_found(build: ModuleType, project: Path, text: str, wrong: str) -> None:
    (project / "docs/more.md").write_text(text)
    build.build(project, project / "site")
    assert build.broken(project / "site") == [wrong]


def test_a_folder_that_is_no_site_is_left_alone(build: ModuleType, project: Path) -> None:
    with pytest.raises(SystemExit, match="not a site"):
        build.build(project, project / "overt")
    assert (project / "overt/small.py").exists()
    build.build(project, project / "site")
    (project / "docs/guide.md").unlink()
    (project / "README.md").write_text("# Small")
    build.build(project, project / "site")
    assert not (project / "site/docs/guide.html").exists()


INDEX = """# Pages
## First
| page | about |
|---|---|
| [Guide](guide.md) | what [more](more.md) there is |
"""


def test_the_index_says_in_which_order_pages_stand(build: ModuleType, project: Path) -> None:
    (project / "docs/index.md").write_text(INDEX)
    (project / "docs/more.md").write_text("# More words")
    build.build(project, project / "site")
    page = (project / "site/docs/guide.html").read_text()
    first, more = re.findall(r"<h2>(First|More)</h2>\n<ul>(.*?)</ul>", page, re.DOTALL)
    assert re.findall(r">([^<]+)</a>", first[1]) == ["Guide"]
    assert re.findall(r">([^<]+)</a>", more[1]) == ["Small", "More words"]
    assert build.broken(project / "site") == []


def test_everything_can_be_found(build: ModuleType, project: Path) -> None:
    build.build(project, project / "site")
    text = (project / "site/search.js").read_text()
    found = json.loads(text.removeprefix("const SEARCH = ").removesuffix(";\n"))
    assert ["Guide", "Two words", "docs/guide.html#two-words", "back small.keep"] in found
    assert [
        "keep",
        "overt.small",
        "api/overt.small.html#keep",
        "Keep the `count` largest.",
    ] in found


def test_a_package_names_what_it_hands_on_and_where_that_is(
    build: ModuleType, project: Path
) -> None:
    (project / "overt/room").mkdir()
    (project / "overt/room/__init__.py").write_text(
        '"""A room."""\nfrom overt.room.keep import keep\nfrom overt.gone import lost\n'
    )
    (project / "overt/room/keep.py").write_text('def keep():\n    """Keep it."""\n')
    (project / "docs/guide.md").write_text("# Guide\n## Two words\n`room.keep` `room.keep()`")
    build.build(project, project / "site")
    page = (project / "site/api/overt.room.html").read_text()
    assert '<a href="overt.room.keep.html#keep"><code>keep</code></a>' in page
    assert "<li><code>lost</code></li>" in page
    guide = (project / "site/docs/guide.html").read_text()
    assert guide.count('href="../api/overt.room.keep.html#keep"') == 2


def test_what_code_printed_is_told_from_code(build: ModuleType, project: Path) -> None:
    (project / "docs/guide.md").write_text(
        "# Guide\n## Two words\n```python\nprint('<')\n```\n\n```output within=0.1\n<\n```\n"
    )
    build.build(project, project / "site")
    page = (project / "site/docs/guide.html").read_text()
    assert '<pre class="printed" aria-label="printed"><code>&lt;\n</code></pre>' in page
    assert "print('<')" in words_of(page) and '<span class="' in page


# --- docs/checked.md: whom each number is held to


LIBRARIES = {  # as the page calls it: the name that pip has, and what is imported
    "BertViz": ("bertviz", "bertviz"),
    "Captum": ("captum", "captum"),
    "networkx": ("networkx", "networkx"),
    "POT": ("pot", "ot"),
    "pycocoevalcap": ("pycocoevalcap", "pycocoevalcap"),
    "pycocotools": ("pycocotools", "pycocotools"),
    "pytorch-grad-cam": ("grad-cam", "pytorch_grad_cam"),
    "Quantus": ("quantus", "quantus"),
    "scikit-image": ("scikit-image", "skimage"),
    "scikit-learn": ("scikit-learn", "sklearn"),
    "SciPy": ("scipy", "scipy"),
    "timm": ("timm", "timm"),
    "torchmetrics": ("torchmetrics", "torchmetrics"),
    "transformers": ("transformers", "transformers"),
}


def checks() -> list[list[str]]:
    """The rows of the page's tables, a list of cells each."""
    page = (ROOT / "docs" / "checked.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_versions_on_the_page_are_those_that_are_installed_for_tests() -> None:
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "Makefile").read_text()
    named = {re.sub(r"\[(.*)\].*", r"\1", row[0]): row[1] for row in checks() if len(row) == 3}
    assert named.pop("library") == "version"
    assert set(named) == set(LIBRARIES)
    for library, version in named.items():
        pin = f"{LIBRARIES[library][0]}=={version}"
        assert re.search(rf"(?m)(?:^|\s){re.escape(pin)}(?:\s|$)", pins), (
            f"{pin} is not what is pinned"
        )


@pytest.mark.parametrize("row", [row for row in checks() if "(../tests/" in row[-1]])
def test_the_test_that_a_row_names_asks_the_library_that_it_names(row: list[str]) -> None:
    import overt.measure
    import overt.supervise

    what, whom, _, test = row
    place = re.sub(r".*\(\.\./(.*)\)", r"\1", test)
    asked = (ROOT / place).read_text()
    for helper in re.findall(r"tests[./]parity[./](\w+)", asked):  # run in a process of its own
        asked += (ROOT / "tests" / "parity" / f"{helper}.py").read_text()
    named = [name for name in LIBRARIES if name in whom]
    assert named or "published" in whom, f"{whom} is none of the libraries of the page"
    for name in named:
        assert LIBRARIES[name][1] in asked, f"{place} does not ask {name}"
    for function in re.findall(r"`(?:[A-Z]\w+|[a-z_]+)`", whom):
        assert function.strip("`") in asked, f"{place} does not call {function}"
    for room, name in re.findall(r"`(measure|supervise)[.](\w+)`", what):
        assert hasattr(getattr(overt, room), name), f"{room}.{name} is not there"


# --- notebooks of the tutorials


@pytest.fixture(scope="module")
def notebooks() -> Iterator[ModuleType]:
    yield load("notebooks")
    sys.modules.pop("notebooks", None)


PAGE = """# Title

Some text.

```python needs=torch
print(1)
```

```output within=0.1
1
```

```python
x = 2
```

More text.

```console
$ overt list
```
"""


def test_a_notebook_has_the_text_the_code_and_what_it_printed(notebooks: ModuleType) -> None:
    made = json.loads(notebooks.notebook(PAGE))
    text, first, second, rest = made["cells"]
    assert "".join(text["source"]) == "# Title\n\nSome text."
    assert first["source"] == ["print(1)"] and first["outputs"][0]["text"] == ["1\n"]
    assert second["source"] == ["x = 2"] and second["outputs"] == []
    assert "".join(rest["source"]) == "More text.\n\n```console\n$ overt list\n```"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/tutorials").glob("*.md")), ids=lambda p: p.stem
)
def test_the_notebook_beside_a_tutorial_is_made_of_it(page: Path, notebooks: ModuleType) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    kept = page.with_suffix(".ipynb")
    assert kept.read_text() == notebooks.notebook(page.read_text()), "run python docs/notebooks.py"
    nbformat.validate(nbformat.read(kept, 4))
