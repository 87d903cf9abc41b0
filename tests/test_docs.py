"""Documentation: the site builder, links, versions of reference libraries and notebooks."""

import ast
import contextlib
import functools
import html
import http.server
import importlib.util
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> Iterator[ModuleType]:
    path = list(sys.path)
    module = load_script("build")
    yield module
    sys.path[:] = path
    for name in ("build", "reference", "versions", "api"):
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


INIT = '''"""Small things."""
from overt.small import LIMIT, Box, keep
__all__ = ["Box", "LIMIT", "keep"]
'''

INNER = '''"""Internals."""


def sort() -> None:
    """Sort."""


def shuffle() -> None:
    """Shuffle."""
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "overt/__init__.py": INIT,
        "overt/small.py": SOURCE,
        "overt/inner.py": INNER,
        "README.md": "# Small\n[guide](docs/guide.md#two-words) [code](overt/small.py) "
        "[room](overt/) [data](data.json)\n\n```console run with='--x'\n$ overt list\n```\n",
        "data.json": "{}",
        "docs/guide.md": "# Guide\n\n## Two words\n[back](../README.md) `small.keep`",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def visible_text(page: str) -> str:
    """Return the visible text of a page."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.mark.long
def test_the_site_builds_without_broken_links(build: ModuleType, tmp_path: Path) -> None:
    build.build(ROOT, tmp_path / "site")
    assert build.broken(tmp_path / "site") == []
    made = {path.stem for path in (tmp_path / "site/api").glob("*.html")}
    assert made == {"index", *build.reference.QUESTIONS}
    page = (tmp_path / "site/docs/tutorials/score-a-map.html").read_text()
    headings = re.findall(r"<h2>([^<]+)</h2>\n<ul>", page)
    assert headings[:5] == ["Start", "Tutorials", "Guides", "Papers", "Results"]
    assert 'aria-current="page">Score a map</a>' in page and '<pre class="printed"' in page
    assert 'rel="prev" href="align-a-captioner.html"' in page
    known = (tmp_path / "site/search.js").read_text()
    for words in ('["AttentionMap", "overt", "api/overt.html#AttentionMap', '"Score a map"'):
        assert words in known
    for internal in ("overt.cli", "overt.inspect.server", "overt.capture.kernels", "source/"):
        assert f'"{internal}' not in known
    assert len(known) < 700_000
    metrics = (tmp_path / "site/api/overt.metrics.html").read_text()
    section = re.search(r'<section id="pointing_game">(.*?)</section>', metrics, re.DOTALL)
    assert section and "from overt.metrics import pointing_game" in section[1]
    for part in ("Args", "Returns", "Example"):
        assert f"<strong>{part}</strong>" in section[1]
    assert "<strong>Raises</strong>" in metrics
    capture = (tmp_path / "site/api/overt.capture.html").read_text()
    assert 'id="watch"' in capture and "from overt import watch" in capture


GUIDES = {  # what a newcomer types, and the page that should come first
    "heatmap": "docs/visualization.html",
    "heat maps": "docs/visualization.html",
    "CLS token": "docs/attribution.html",
    "bounding box loss": "docs/training-attention.html",
    "integrated gradients": "docs/score-your-model.html",
    "rollout": "docs/attribution.html",
    "grad-cam": "docs/coming-from.html",
    "confidence interval": "docs/tutorials/supervise-your-vit.html",
    "watch": "docs/watch.html",
    "install": "docs/install.html",
    "pointing_game": "api/overt.metrics.html",
    "AttentionMap": "api/overt.html",
}


@pytest.mark.long
def test_the_search_finds_guides_first(build: ModuleType, tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        pytest.skip("no chromium is installed: the search was not tried in a browser")
    build.build(ROOT, tmp_path / "site")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.goto((tmp_path / "site/index.html").as_uri())
        found = {}
        for query in GUIDES:
            page.fill("#site-find", query)
            address = page.locator("#site-found a").first.get_attribute("href") or ""
            found[query] = address.partition("#")[0]
        page.fill("#site-find", "quagga zymurgy")
        assert "No page contains" in page.locator("#site-found").inner_text()
        page.set_viewport_size({"width": 390, "height": 844})
        page.fill("#site-find", "rollout")
        boxes = [page.locator(one).bounding_box() for one in ("#site-find", "#site-found")]
        assert all(box["x"] >= 0 and 300 < box["width"] <= 390 for box in boxes)
        browser.close()
    assert found == GUIDES


def test_links_of_the_repository_work_in_the_site(build: ModuleType, project: Path) -> None:
    site = project / "site"
    build.build(project, site)
    page = (site / "index.html").read_text()
    for link in ("docs/guide.html#two-words", "source/overt/small.html", "api/overt.html"):
        assert f'href="{link}"' in page
    assert (site / "data.json").read_text() == "{}"
    assert "$ overt list" in page and "--x" not in page
    guide = (site / "docs/guide.html").read_text()
    assert 'href="../index.html"' in guide
    assert '<a href="../api/overt.html#keep"><code>small.keep</code></a>' in guide
    assert build.broken(site) == []


def test_names_that_no_guide_imports_lead_to_their_source_only(
    build: ModuleType, project: Path
) -> None:
    (project / "docs/guide.md").write_text(
        "# Guide\n## Two words\n`inner.sort` `inner.shuffle()`\n\n"
        "```python\nfrom overt import inner\ninner.shuffle()\n```\n"
    )
    build.build(project, project / "site")
    page = (project / "site/api/overt.html").read_text()
    assert 'id="inner.shuffle"' in page and "from overt.inner import shuffle" in page
    assert "Sort." not in page
    guide = (project / "site/docs/guide.html").read_text()
    assert 'href="../api/overt.html#inner.shuffle"' in guide
    assert 'href="../source/overt/inner.html#line-4"' in guide
    source = (project / "site/source/overt/inner.html").read_text()
    line = re.search(r'<span id="line-4">(.*?)\n', source)
    assert line and visible_text(line[1]) == "def sort() -> None:"
    search = (project / "site/search.js").read_text()
    assert "Shuffle." in search and "Sort." not in search and "source/" not in search
    assert build.broken(project / "site") == []


def test_a_name_is_shown_where_users_import_it(build: ModuleType, project: Path) -> None:
    files = {
        "__init__.py": "from overt.room import parts\nfrom overt.room.keep import keep\n"
        '__all__ = ["keep", "parts"]',
        "keep.py": 'def keep():\n    """Keep it."""\n\ndef drop():\n    """Drop it."""\n',
        "parts.py": 'def keep():\n    """Keep a part."""\n\nSIZE = 3\n',
    }
    (project / "overt/room").mkdir()
    for name, text in files.items():
        (project / "overt/room" / name).write_text(text)
    modules = build.api.read(project / "overt")
    pages = {page.name: page for page in build.reference.arrange(modules, [])}
    found = {
        name: [(one.path, one.item.anchor) for part in page.sections for one in part.entries]
        for name, page in pages.items()
    }
    assert found == {
        "overt": [("overt", "LIMIT"), ("overt", "keep"), ("overt", "Box")],
        "overt.room": [("overt.room", "keep"), ("overt.room.parts", "parts.keep")],
    }
    assert pages["overt"].question == "What is an attention map?"


def test_the_page_of_a_package_shows_signatures_fields_and_docstrings(
    build: ModuleType, project: Path
) -> None:
    build.build(project, project / "site")
    page = (project / "site/api/overt.html").read_text()
    assert 'id="keep"' in page and 'id="Box.side"' in page and 'id="Box.area"' in page
    assert "LIMIT = 3  # cells" in visible_text(page) and "side: int  # in pixels" in visible_text(
        page
    )
    assert "    /,\n    count: int = LIMIT,\n    *,\n    among: str" in visible_text(page)
    assert '<code class="language-python"><span class="gp">&gt;&gt;&gt; </span>' in page
    assert "[1]" in visible_text(page)
    assert "_HIDDEN" not in page and "_secret" not in page


def test_docstring_sections_become_lists_and_code(build: ModuleType) -> None:
    docstring = (
        "Keep some.\n\nArgs:\n    scores: Of each key,\n        or none.\n    count: How many.\n\n"
        "Returns:\n    A mask.\n\nExample:\n    >>> keep([1])[0](2)\n    [1]"
    )
    assert build.listed_sections(docstring) == (
        "Keep some.\n\n**Args**\n\n- `scores`: Of each key, or none.\n- `count`: How many.\n\n"
        "**Returns**\n\nA mask.\n\n**Example**\n\n>>> keep([1])[0](2)\n[1]\n\n"
    )
    assert build.listed_sections("Args: not a section.") == "Args: not a section."


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


def test_a_folder_that_is_not_a_site_is_not_overwritten(build: ModuleType, project: Path) -> None:
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


def test_versions_stand_side_by_side_and_the_newest_is_latest(
    build: ModuleType, project: Path
) -> None:
    site = project / "site"
    for version, title in (("0.9", "Old"), ("0.10", "New"), ("0.2", "Oldest")):
        (project / "docs/guide.md").write_text(f"# {title}\n## Two words\n[back](../README.md)")
        build.build_versions(project, site, version)
    assert json.loads((site / "versions.json").read_text()) == [
        {"version": "0.10", "latest": True},
        {"version": "0.9", "latest": False},
        {"version": "0.2", "latest": False},
    ]
    titles = {"0.2": "Oldest", "0.9": "Old", "0.10": "New", "latest": "New"}
    for name, title in titles.items():
        page = (site / name / "docs/guide.html").read_text()
        assert f'<h1 id="{title.lower()}">{title}</h1>' in page
        assert '<link rel="canonical" href="../../latest/docs/guide.html">' in page
    assert "url=latest/index.html" in (site / "index.html").read_text()
    assert build.broken(site) == []
    build.build_versions(project, site, "0.9", "https://example.org/overt")
    page = (site / "0.9/docs/guide.html").read_text()
    assert '<link rel="canonical" href="https://example.org/overt/latest/docs/guide.html">' in page
    for path in site.rglob("*.html"):
        found = build.Anchors()
        found.feed(path.read_text())
        assert not [link for link in found.links if link.startswith("/")]


def test_a_version_is_only_added_to_a_site(build: ModuleType, project: Path) -> None:
    with pytest.raises(SystemExit, match="not a site"):
        build.build_versions(project, project / "overt", "0.1")
    with pytest.raises(SystemExit, match=r"0\.1.*'latest'"):
        build.build_versions(project, project / "site", "latest")
    (project / "branch/.git").mkdir(parents=True)  # a work tree of the branch that is hosted
    build.build_versions(project, project / "branch", "0.1")
    assert (project / "branch/.git").exists() and (project / "branch/0.1/index.html").exists()
    (project / "pyproject.toml").write_text('[project]\nversion = "1.12.3"\n')
    assert build.versions.version_of(project) == "1.12"


@pytest.mark.long
def test_versions_work_from_a_file_server_below_a_path(
    build: ModuleType, project: Path, tmp_path: Path
) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        pytest.skip("no chromium is installed: the versions were not tried in a browser")
    site = tmp_path / "hosted/some/where"
    build.build_versions(project, site, "0.1")
    (project / "docs/more.md").write_text("# More")
    build.build_versions(project, site, "0.2")
    with (
        file_server(tmp_path / "hosted", site / "404.html") as address,
        sync_api.sync_playwright() as play,
    ):
        browser = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.goto(f"{address}/some/where/")
        page.wait_for_url("**/some/where/latest/index.html")
        menu = page.locator("#site-versions")
        menu.wait_for()
        options = menu.locator("option").all_inner_texts()
        assert options == ["latest (0.2)", "0.2", "0.1"] and menu.input_value() == "latest"
        page.locator("main a", has_text="guide").first.click()
        menu.select_option("0.1")
        page.wait_for_url("**/some/where/0.1/docs/guide.html#two-words")
        page.goto(f"{address}/some/where/0.2/docs/more.html")
        menu.select_option("0.1")  # which lacks the page
        page.wait_for_url("**/some/where/0.1/index.html")
        page.goto(f"{address}/some/where/0.1/docs/more.html")
        assert page.locator("h1").inner_text() == "Page not found"
        links = page.locator("#links a")
        links.nth(4).wait_for()
        assert links.nth(0).inner_text() == "This page in the latest version"
        for link in links.evaluate_all("all => all.map(one => one.href)"):
            if "docs/index" not in link:  # the small project has no index
                reply = page.goto(link)
                assert (
                    reply and reply.ok and page.locator("h1").first.inner_text() != "Page not found"
                )
        browser.close()


@contextlib.contextmanager
def file_server(folder: Path, missing: Path) -> Iterator[str]:
    """Serve a folder as a static host does, with a page for missing addresses."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def send_error(self, code: int, *_: object, **__: object) -> None:
            text = missing.read_bytes()
            self.send_response(code)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_index_sets_the_order_of_pages(build: ModuleType, project: Path) -> None:
    (project / "docs/index.md").write_text(INDEX)
    (project / "docs/more.md").write_text("# More words")
    build.build(project, project / "site")
    page = (project / "site/docs/guide.html").read_text()
    first, more = re.findall(r"<h2>(First|More)</h2>\n<ul>(.*?)</ul>", page, re.DOTALL)
    assert re.findall(r">([^<]+)</a>", first[1]) == ["Guide"]
    assert re.findall(r">([^<]+)</a>", more[1]) == ["Small", "More words"]
    assert build.broken(project / "site") == []


def test_the_search_index_has_pages_and_functions(build: ModuleType, project: Path) -> None:
    build.build(project, project / "site")
    text = (project / "site/search.js").read_text()
    found = json.loads(text.removeprefix("const SEARCH = ").removesuffix(";\n"))
    assert ["Guide", "Two words", "docs/guide.html#two-words", "back small.keep"] in found
    assert [
        "keep",
        "overt",
        "api/overt.html#keep",
        "Keep the `count` largest.",
    ] in found


def test_a_package_page_shows_its_reexported_names(build: ModuleType, project: Path) -> None:
    (project / "overt/room").mkdir()
    (project / "overt/room/__init__.py").write_text(
        '"""A room."""\nfrom overt.room.keep import keep\nfrom overt.gone import lost\n'
    )
    (project / "overt/room/keep.py").write_text('def keep():\n    """Keep it."""\n')
    (project / "docs/guide.md").write_text("# Guide\n## Two words\n`room.keep` `room.keep()`")
    build.build(project, project / "site")
    page = (project / "site/api/overt.room.html").read_text()
    assert '<a href="#keep"><code>keep</code></a>' in page and "lost" not in page
    guide = (project / "site/docs/guide.html").read_text()
    assert guide.count('href="../api/overt.room.html#keep"') == 2


def test_printed_output_is_marked_differently_from_code(build: ModuleType, project: Path) -> None:
    (project / "docs/guide.md").write_text(
        "# Guide\n## Two words\n```python\nprint('<')\n```\n\n```output within=0.1\n<\n```\n"
    )
    build.build(project, project / "site")
    page = (project / "site/docs/guide.html").read_text()
    assert '<pre class="printed" aria-label="printed"><code>&lt;\n</code></pre>' in page
    assert "print('<')" in visible_text(page) and '<span class="' in page


# --- docstrings of the API reference


def public_entries(build: ModuleType) -> Iterator[tuple[str, ast.stmt, str]]:
    """Yield the full name, the definition and the docstring of each public function and class."""
    site = build.Site(ROOT)
    paths = {module.name: path for path, module in site.modules.items()}
    for page in site.reference:
        for section in page.sections:
            tree = ast.parse((ROOT / paths[section.home]).read_text())
            defined = {getattr(one, "name", ""): one for one in tree.body}
            for entry in section.entries:
                node = defined.get(entry.item.name)
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    yield f"{section.home}.{entry.item.name}", node, entry.item.about


def parameters(node: ast.FunctionDef) -> list[str]:
    """Return the names of the parameters of a function or method, without `self`."""
    args = node.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    named += [one for one in (args.vararg, args.kwarg) if one]
    return [one.arg for one in named if one.arg not in ("self", "cls")]


def constructor_parameters(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass or enum, or the parameters of `__init__`."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return parameters(one)
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    if "dataclass" not in decorators and not any("Enum" in ast.unparse(b) for b in node.bases):
        return []
    fields = [ast.unparse(o.target) for o in node.body if isinstance(o, ast.AnnAssign)]
    members = [ast.unparse(o.targets[0]) for o in node.body if isinstance(o, ast.Assign)]
    return [name for name in fields + members if not name.startswith("_")]


def missing_sections(node: ast.stmt, about: str) -> list[str]:
    """Return what a docstring lacks: sections, and parameters that `Args` does not name."""
    sections = set(re.findall(r"^(Args|Attributes|Returns|Yields):$", about, re.MULTILINE))
    missing = [] if ">>> " in about else ["Example"]
    if isinstance(node, ast.FunctionDef):
        names = parameters(node)
        result = ast.unparse(node.returns) if node.returns else "None"
        if result != "None" and not sections & {"Returns", "Yields"}:
            missing.append("Returns")
    else:
        assert isinstance(node, ast.ClassDef)
        names = constructor_parameters(node)
    if names and not sections & {"Args", "Attributes"}:
        return [*missing, "Args"]
    return missing + [name for name in names if not re.search(rf"^ +\*{{0,2}}{name}:", about, re.M)]


@pytest.mark.long
def test_each_public_name_has_arguments_result_and_example(build: ModuleType) -> None:
    found = list(public_entries(build))
    assert len(found) > 600
    missing = {name: missing_sections(node, about) for name, node, about in found}
    assert {name: parts for name, parts in missing.items() if parts} == {}


def test_missing_parts_of_a_docstring_are_found() -> None:
    node = ast.parse("def keep(scores, *, count: int) -> int: ...").body[0]
    about = "Keep.\n\nArgs:\n    scores: Of keys."
    assert missing_sections(node, about) == ["Example", "Returns", "count"]
    node = ast.parse("@dataclass\nclass Box:\n    side: int\n    _area = 3").body[0]
    assert missing_sections(node, "A box.\n\n>>> Box(1)") == ["Args"]


# --- docs/checked.md: reference libraries of each metric


LIBRARIES = {  # name on the page: pip name and module
    "BertViz": ("bertviz", "bertviz"),
    "Captum": ("captum", "captum"),
    "kvpress": ("kvpress", "kvpress"),
    "networkx": ("networkx", "networkx"),
    "PEFT": ("peft", "peft"),
    "POT": ("pot", "ot"),
    "pycocoevalcap": ("pycocoevalcap", "pycocoevalcap"),
    "pycocotools": ("pycocotools", "pycocotools"),
    "pytorch-grad-cam": ("grad-cam", "pytorch_grad_cam"),
    "Quantus": ("quantus", "quantus"),
    "scikit-image": ("scikit-image", "skimage"),
    "scikit-learn": ("scikit-learn", "sklearn"),
    "SciPy": ("scipy", "scipy"),
    "SHAP": ("shap", "shap"),
    "timm": ("timm", "timm"),
    "torchmetrics": ("torchmetrics", "torchmetrics"),
    "transformers": ("transformers", "transformers"),
}


def checked_rows() -> list[list[str]]:
    """Return the rows of the tables of the page as lists of cells."""
    page = (ROOT / "docs" / "checked.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_versions_on_the_page_match_the_pinned_versions() -> None:
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "Makefile").read_text()
    named = {
        re.sub(r"\[(.*)\].*", r"\1", row[0]): row[1] for row in checked_rows() if len(row) == 3
    }
    assert named.pop("library") == "version"
    assert set(named) == set(LIBRARIES)
    for library, version in named.items():
        pin = f"{LIBRARIES[library][0]}=={version}"
        assert re.search(rf"(?m)(?:^|\s){re.escape(pin)}(?:\s|$)", pins), (
            f"{pin} is not what is pinned"
        )


@pytest.mark.parametrize("row", [row for row in checked_rows() if "(../tests/" in row[-1]])
def test_the_linked_test_of_a_row_uses_its_library(row: list[str]) -> None:
    import overt.losses
    import overt.metrics

    what, library, _, test = row
    place = re.sub(r".*\(\.\./(.*)\)", r"\1", test)
    source = (ROOT / place).read_text()
    for helper in re.findall(r"tests[./]parity[./](\w+)", source):  # run in a subprocess
        source += (ROOT / "tests" / "parity" / f"{helper}.py").read_text()
    named = [name for name in LIBRARIES if name in library]
    assert named or "published" in library, f"{library} is not a library of the page"
    for name in named:
        assert LIBRARIES[name][1] in source, f"{place} does not use {name}"
    for function in re.findall(r"`(?:[A-Z]\w+|[a-z_]+)`", library):
        assert function.strip("`") in source, f"{place} does not call {function}"
    for package, name in re.findall(r"`(metrics|losses)[.](\w+)`", what):
        assert hasattr(getattr(overt, package), name), f"{package}.{name} does not exist"


# --- notebooks of the tutorials


@pytest.fixture(scope="module")
def notebooks() -> Iterator[ModuleType]:
    yield load_script("notebooks")
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


def test_a_notebook_has_text_code_and_output(notebooks: ModuleType) -> None:
    made = json.loads(notebooks.notebook(PAGE))
    text, first, second, rest = made["cells"]
    assert "".join(text["source"]) == "# Title\n\nSome text."
    assert first["source"] == ["print(1)"] and first["outputs"][0]["text"] == ["1\n"]
    assert second["source"] == ["x = 2"] and second["outputs"] == []
    assert "".join(rest["source"]) == "More text.\n\n```console\n$ overt list\n```"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/tutorials").glob("*.md")), ids=lambda p: p.stem
)
def test_notebooks_of_tutorials_are_up_to_date(page: Path, notebooks: ModuleType) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    kept = page.with_suffix(".ipynb")
    assert kept.read_text() == notebooks.notebook(page.read_text()), "run python docs/notebooks.py"
    nbformat.validate(nbformat.read(kept, 4))
