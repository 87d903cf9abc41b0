"""Build the pages: README.md, the other pages of the root, docs/*.md and one page a module.

    python docs/build.py [SITE]

The site has the layout of the repository, so that a link that works there works here: a link to a
page leads to its HTML, a link to a module to what its docstrings say, any other file is copied.
docs/index.md says in which order and under which headings pages stand beside each other; what it
does not list comes last. The site needs no server and asks none: it can be searched from a disk.
Ends with 1 and names them when links inside the site lead nowhere.
"""

import html
import json
import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit
from xml.etree.ElementTree import Element, SubElement

import jinja2
import markdown
from markdown.treeprocessors import Treeprocessor
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonConsoleLexer, PythonLexer

sys.path.insert(0, str(Path(__file__).resolve().parent))
import api

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
STATIC = ("site.css", "site.js")
LISTED = re.compile(
    r"^\|\s*\[[^\]]+\]\(([^)#\s]+)\)", re.MULTILINE
)  # first cells of a table's rows
CODE = re.compile(r'<pre><code class="language-([\w-]+)">(.*?)</code></pre>', re.DOTALL)
TAGS = re.compile(r"<[^>]+>")
HEADING = re.compile(r'<h([123]) id="([^"]+)">(.*?)</h\1>', re.DOTALL)
EXTENSIONS = ("fenced_code", "tables", "sane_lists")
PLAIN, CONSOLE, FORMAT = PythonLexer(), PythonConsoleLexer(), HtmlFormatter(nowrap=True)
EXCERPT = 400  # letters of a section that can be searched
FENCE = re.compile(r"^```([\w-]+)[^\n`]*$", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def pages(root: Path) -> dict[str, str]:
    """Each page of the repository and where it stands in the site: {"README.md": "index.html"}."""
    found = [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]
    names = [path.relative_to(root).as_posix() for path in found]
    return {n: "index.html" if n == "README.md" else n.removesuffix(".md") + ".html" for n in names}


@dataclass(frozen=True)
class Group:
    """Pages that stand together in the navigation: (title, place in the site)."""

    title: str
    pages: tuple[tuple[str, str], ...]


def groups(index: str, titles: Mapping[str, str], places: Mapping[str, str]) -> list[Group]:
    """The pages in the order and under the headings of docs/index.md; the others come last."""
    found, seen = [], {"docs/index.md"}
    for part in re.split(r"^## +", index, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        names = [posixpath.normpath(posixpath.join("docs", link)) for link in LISTED.findall(body)]
        names = [name for name in names if name in places and name not in seen]
        seen.update(names)
        if names:
            pages = tuple((titles[name], places[name]) for name in names)
            found.append(Group(heading.strip(), pages))
    rest = tuple((titles[name], places[name]) for name in places if name not in seen)
    return [*found, Group("More", rest)] if rest else found


def names(modules: Iterable[api.Module]) -> dict[str, str]:
    """Each dotted public name and its place in the site, with and without the leading `overt.`."""
    found = {}
    modules = list(modules)
    for module in modules:
        found[module.name] = module.page
        for item in module.items:
            for part in (item, *item.inside):
                found[f"{module.name}.{part.anchor}"] = f"{module.page}#{part.anchor}"
    for _ in range(2):  # a package may hand on what another one hands on
        for module in modules:
            for name, home in module.exports:
                if home in found and home != f"{module.name}.{name}":
                    found[f"{module.name}.{name}"] = found[home]
    return found | {name.removeprefix("overt."): place for name, place in found.items()}


def coloured(text: str) -> str:
    """HTML with its Python in colours, and what code printed marked as such."""
    return CODE.sub(lambda found: _coloured(found[1], found[2]), text)


def _coloured(language: str, code: str) -> str:
    if language == "output":
        return f'<pre class="printed" aria-label="printed"><code>{code}</code></pre>'
    if language != "python":
        return f'<pre><code class="language-{language}">{code}</code></pre>'
    return f'<pre><code class="language-python">{python(html.unescape(code))}</code></pre>'


def python(code: str) -> str:
    """Python as HTML, its words marked by their kind."""
    return str(highlight(code, CONSOLE if code.startswith(">>>") else PLAIN, FORMAT))


def sections(title: str, place: str, body: str) -> Iterator[tuple[str, str, str, str]]:
    """What can be found of a page: (title, heading, address, first words) of each section."""
    heads = list(HEADING.finditer(body))
    ends = [*(found.start() for found in heads[1:]), len(body)]
    for found, end in zip(heads, ends, strict=False):
        words = " ".join(html.unescape(TAGS.sub(" ", body[found.end() : end])).split())
        heading = html.unescape(TAGS.sub("", found[3]))
        address = place if found[1] == "1" else f"{place}#{found[2]}"
        yield title, "" if heading == title else heading, address, words[:EXCERPT]


def searched(pages: Iterable[tuple[str, str, str]], modules: Iterable[api.Module]) -> str:
    """The script that holds all that can be searched: sections of pages, and public names."""
    found = [part for page in pages for part in sections(*page)]
    for module in modules:
        for item in module.items:
            first = item.about.split("\n\n")[0].replace("\n", " ")
            address = f"{module.page}#{item.anchor}"
            found.append((item.name, module.name, address, first[:EXCERPT]))
    return f"const SEARCH = {json.dumps(found, ensure_ascii=False)};\n"


class Links(Treeprocessor):
    """Turn the links of one page into links of the site, and dotted names in code into links."""

    def __init__(self, source: str, place: str, site: "Site") -> None:
        super().__init__()
        self.source, self.place, self.site = source, place, site

    def run(self, root: Element) -> None:
        """Called by Markdown with the tree of the page."""
        for element in root.iter():
            for key in ("href", "src"):
                if element.get(key):
                    element.set(key, self.site.lead(element.get(key, ""), self.source, self.place))
        for parent in list(root.iter()):
            if parent.tag not in {"a", "pre"}:
                for child in parent:
                    self.name(child)

    def name(self, element: Element) -> None:
        """`files.writing` in code becomes a link to it."""
        known = self.site.names.get((element.text or "").removesuffix("()"))
        if element.tag == "code" and known and "." in (element.text or ""):
            text, element.text, element.tag = element.text, "", "a"
            element.set("href", relative(known, self.place))
            SubElement(element, "code").text = text


class Site:
    """What the pages need to know of each other, and the files they ask for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = api.read(root / "overt")
        self.pages = pages(root)
        self.names = names(self.modules)
        self.copies: set[str] = set()
        self.readers: dict[tuple[str, ...], markdown.Markdown] = {}  # slow to make

    def lead(self, link: str, source: str, place: str) -> str:
        """A link of the page `source` as a link of the site; what is unknown stays as it is."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or not parts.path:
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(parts.path)))
        dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if path in self.pages:
            target = self.pages[path]
        elif path.startswith("overt") and dotted in self.names:
            target = self.names[dotted]
        elif (self.root / path).is_file():
            self.copies.add(path)
            target = path
        else:
            return link
        return relative(target, place) + (f"#{parts.fragment}" if parts.fragment else "")

    def render(self, text: str, source: str, place: str) -> str:
        """Markdown to HTML, links led to where they are in the site."""
        text = FENCE.sub(r"```\1", text)  # Markdown knows one word after the fence
        marks = ("toc",) if source in self.pages else ()  # headings one can link to
        if marks not in self.readers:
            self.readers[marks] = markdown.Markdown(extensions=[*EXTENSIONS, *marks])
        reader = self.readers[marks].reset()
        reader.treeprocessors.register(Links(source, place, self), "links", 1)
        return coloured(reader.convert(text))

    def about(self, docstring: str, module: api.Module) -> str:
        """A docstring to HTML: Markdown, and doctests as code."""
        if not docstring:
            return ""
        text = DOCTEST.sub(lambda found: f"```python\n{found[0]}\n```", docstring)
        return self.render(text, module.name.replace(".", "/") + ".py", module.page)


def relative(target: str, place: str) -> str:
    """The link from the page at `place` to `target`, both from the top of the site."""
    path, mark = urldefrag(target)
    return posixpath.relpath(path, posixpath.dirname(place) or ".") + (f"#{mark}" if mark else "")


def title(text: str, name: str) -> str:
    """The first heading of a page, or its file's name."""
    found = re.search(r"^# +(.+)$", text, re.MULTILINE)
    return re.sub(r"[`*]", "", found[1]) if found else Path(name).stem


def build(root: Path, out: Path) -> None:
    """Write the whole site into `out`, which is replaced only when all of it is written."""
    site = Site(root)
    texts = {name: (root / name).read_text(encoding="utf-8") for name in site.pages}
    titles = {name: title(texts[name], name) for name in site.pages}
    contents = groups(texts.get("docs/index.md", ""), titles, site.pages)
    order = [page for group in contents for page in group.pages]
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written: dict[str, str] = {}

    def page(template: str, place: str, **values: object) -> None:
        shared = {
            "groups": contents,
            "modules": site.modules,
            "rooms": rooms(site.modules),
            "place": place,
            "link": lambda target: relative(target, place),
            "about": site.about,
            "python": python,
            "names": site.names,
            "before": None,
            "after": None,
            "inside": [],
        }
        written[place] = templates.get_template(template).render(shared | values)

    bodies = []
    for name, place in site.pages.items():
        body = site.render(texts[name], name, place)
        bodies.append((titles[name], place, body))
        at = next((n for n, (_, other) in enumerate(order) if other == place), None)
        page(
            "page.html",
            place,
            title=titles[name],
            body=body,
            inside=[(m[2], TAGS.sub("", m[3])) for m in HEADING.finditer(body) if m[1] == "2"],
            before=order[at - 1] if at else None,
            after=order[at + 1] if at is not None and at + 1 < len(order) else None,
        )
    for module in site.modules:
        page("module.html", module.page, title=module.name, module=module)
    page("modules.html", "api/index.html", title="All modules")
    if "index.html" not in written:
        page("modules.html", "index.html", title="overt")
    written |= {name: (HERE / "templates" / name).read_text(encoding="utf-8") for name in STATIC}
    written["search.js"] = searched(bodies, site.modules)
    save(out, written, {name: root / name for name in site.copies})


def rooms(modules: Iterable[api.Module]) -> dict[str, list[api.Module]]:
    """Modules by the room they stand in: the first word after `overt`."""
    found: dict[str, list[api.Module]] = {}
    for module in modules:
        found.setdefault(".".join(module.name.split(".")[:2]), []).append(module)
    return found


def save(out: Path, written: Mapping[str, str], copies: Mapping[str, Path]) -> None:
    """Put pages and files into a new folder, then let it take the place of the old one."""
    if out.exists() and any(out.iterdir()) and not (out / "api" / "index.html").exists():
        raise SystemExit(f"{out} is not a site built earlier: name an empty or a new folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    for name, text in written.items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).write_text(text, encoding="utf-8")
    for name, source in copies.items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, fresh / name)
    fresh.chmod(0o755)
    if out.exists():
        shutil.rmtree(out)
    os.replace(fresh, out)


class Anchors(HTMLParser):
    """The links and the anchors of one HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.twice: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser with each opening tag."""
        for key, value in attrs:
            if key == "id" and value:
                (self.twice if value in self.anchors else self.anchors).add(value)
            if key in {"href", "src"} and value:
                self.links.append(value)


def broken(site: Path) -> list[str]:
    """Every link inside the site that leads nowhere or to two places, as `page: link`."""
    there = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    seen: dict[str, Anchors] = {}
    for name in sorted(there):
        if name.endswith(".html"):
            seen[name] = Anchors()
            seen[name].feed((site / name).read_text(encoding="utf-8"))
    wrong = []
    for name, found in seen.items():
        wrong += [f"{name}: #{anchor} twice" for anchor in found.twice]
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = posixpath.normpath(
                posixpath.join(posixpath.dirname(name), unquote(parts.path))
            )
            target = target if parts.path else name
            lost = parts.fragment and target in seen and parts.fragment not in seen[target].anchors
            if target not in there or lost:
                wrong.append(f"{name}: {link}")
    return wrong


def main() -> int:
    """Build, count, and say which links are broken."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()
    build(ROOT, out)
    wrong = broken(out)
    for line in wrong:
        print(f"broken link in {line}")
    print(f"{len(list(out.rglob('*.html')))} pages in {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
