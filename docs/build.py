"""Build the documentation: README.md, other pages of the root, docs/*.md, and the API reference.

    python docs/build.py [SITE] [--version 0.1] [--url https://example.org/overt/]

writes the version in pyproject.toml, or another one, to SITE/0.1/ and, if it is the newest one,
SITE/latest/; other versions in SITE are preserved (docs/versions.py). With the address of the site,
canonical links are absolute, as search engines prefer them.

A version has the layout of the repository, so that links work in both: a link to a page leads to
its HTML, a link to a package to its names, a link to a module to its source, any other file is
copied.
The reference has public names only (docs/reference.py). docs/index.md defines the order and the
groups of the navigation; pages that it does not list come last. The site needs no server and can
be searched from a disk. If internal links are broken, they are printed and the exit code is 1.
"""

import argparse
import html
import json
import os
import posixpath
import re
import shutil
import sys
import tempfile
import textwrap
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
import reference
import versions

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
GUIDE = re.compile(r"README\.md|docs/(?!design/)")  # pages that say what to import
PLAIN, CONSOLE, FORMAT = PythonLexer(), PythonConsoleLexer(), HtmlFormatter(nowrap=True)
SOURCE = PythonLexer(stripnl=False)
EXCERPT = 400  # characters of a section in the search index
GUIDE_EXCERPT = 1600  # of a section of a guide
FENCE = re.compile(r"^```([\w-]+)[^\n`]*$", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
SECTION = re.compile(
    r"^(Args|Raises|Returns|Yields|Examples?):\n((?:(?:[ ]{4}[^\n]*|[ ]*)(?:\n|\Z))+)", re.MULTILINE
)


def pages(root: Path) -> dict[str, str]:
    """Return the path in the site of each page: {"README.md": "index.html"}."""
    folders = ("docs/**", "overt/papers/*", "results")
    found = [*sorted(root.glob("*.md"))]
    found += [path for one in folders for path in sorted(root.glob(f"{one}/*.md"))]
    names = [path.relative_to(root).as_posix() for path in found]
    return {n: "index.html" if n == "README.md" else n.removesuffix(".md") + ".html" for n in names}


@dataclass(frozen=True)
class Group:
    """Pages of one navigation group: (title, path in the site)."""

    title: str
    pages: tuple[tuple[str, str], ...]


def groups(index: str, titles: Mapping[str, str], places: Mapping[str, str]) -> list[Group]:
    """Return the pages in the order and groups of docs/index.md; the others come last."""
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


def names(modules: Iterable[api.Module], public: Iterable[reference.Page]) -> dict[str, str]:
    """Return the address of each dotted name, with and without the prefix `overt.`.

    A public name leads to the reference, any other one to its line in the source.
    """
    found = {}
    modules = list(modules)
    for module in modules:
        found[module.name] = source_place(module)
        for item in module.items:
            for part, name in members(item):
                found[f"{module.name}.{name}"] = f"{source_place(module)}#line-{part.line}"
    for page in public:
        for section in page.sections:
            found[section.home] = f"{page.place}#{section.anchor}"
            for entry in section.entries:
                for part, name in members(entry.item):
                    for path in (section.home, entry.path):
                        found[f"{path}.{name}"] = f"{page.place}#{part.anchor}"
        found[page.name] = page.place
    for _ in range(2):  # a package may re-export re-exported names
        for module in modules:
            for name, home in module.exports:
                if home in found and home != f"{module.name}.{name}":
                    found[f"{module.name}.{name}"] = found[home]
    return found | {name.removeprefix("overt."): place for name, place in found.items()}


def members(item: api.Item) -> Iterator[tuple[api.Item, str]]:
    """Yield an item and its members, each with its name in the module: `Box.side`."""
    yield item, item.name
    yield from ((part, f"{item.name}.{part.name}") for part in item.inside)


def source_place(module: api.Module) -> str:
    """Return the path in the site of the source of a module."""
    return f"source/{module.path.removesuffix('.py')}.html"


def coloured(text: str) -> str:
    """Highlight the Python code of HTML, and mark printed output."""
    return CODE.sub(lambda found: _coloured(found[1], found[2]), text)


def _coloured(language: str, code: str) -> str:
    if language == "output":
        return f'<pre class="printed" aria-label="printed"><code>{code}</code></pre>'
    if language != "python":
        return f'<pre><code class="language-{language}">{code}</code></pre>'
    return f'<pre><code class="language-python">{python(html.unescape(code))}</code></pre>'


def listed_sections(docstring: str) -> str:
    """Return a docstring with its sections as Markdown: arguments and errors become lists."""
    return SECTION.sub(lambda found: _listed_section(found[1], found[2]), docstring)


def _listed_section(name: str, body: str) -> str:
    body = textwrap.dedent(body).strip("\n")
    if name in {"Args", "Raises"}:
        entries = re.split(r"\n(?=\S)", body)  # continued lines are indented
        parts = [" ".join(entry.split()).partition(": ") for entry in entries]
        body = "\n".join(f"- `{one}`: {text}" if text else f"- {one}" for one, _, text in parts)
    return f"**{name}**\n\n{body}\n\n"


def python(code: str) -> str:
    """Return highlighted Python as HTML."""
    return str(highlight(code, CONSOLE if code.startswith(">>>") else PLAIN, FORMAT))


def sections(title: str, place: str, body: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the search entries of a page: (title, heading, address, first words) per section."""
    guide = place.startswith("docs/") and not place.startswith("docs/design/")
    length = GUIDE_EXCERPT if guide else EXCERPT
    heads = list(HEADING.finditer(body))
    ends = [*(found.start() for found in heads[1:]), len(body)]
    for found, end in zip(heads, ends, strict=False):
        words = " ".join(html.unescape(TAGS.sub(" ", body[found.end() : end])).split())
        heading = html.unescape(TAGS.sub("", found[3]))
        address = place if found[1] == "1" else f"{place}#{found[2]}"
        yield title, "" if heading == title else heading, address, words[:length]


def searched(pages: Iterable[tuple[str, str, str]], public: Iterable[reference.Page]) -> str:
    """Return the search index as a script: sections of pages, and documented public names."""
    found = [part for page in pages for part in sections(*page)]
    for page in public:
        for entry in (one for section in page.sections for one in section.entries):
            if entry.item.about:
                first = entry.item.about.split("\n\n")[0].replace("\n", " ")
                address = f"{page.place}#{entry.item.anchor}"
                found.append((entry.item.name, entry.path, address, first[:EXCERPT]))
    return f"const SEARCH = {json.dumps(found, ensure_ascii=False)};\n"


class Links(Treeprocessor):
    """Convert the links of a page to links of the site, and dotted names in code to links."""

    def __init__(self, source: str, place: str, site: "Site") -> None:
        super().__init__()
        self.source, self.place, self.site = source, place, site

    def run(self, root: Element) -> None:
        """Convert the tree of a page; called by Markdown."""
        for element in root.iter():
            for key in ("href", "src"):
                if element.get(key):
                    element.set(key, self.site.lead(element.get(key, ""), self.source, self.place))
        for parent in list(root.iter()):
            if parent.tag not in {"a", "pre"}:
                for child in parent:
                    self.name(child)

    def name(self, element: Element) -> None:
        """Link a name such as `files.writing` in code."""
        known = self.site.names.get((element.text or "").removesuffix("()"))
        if element.tag == "code" and known and "." in (element.text or ""):
            text, element.text, element.tag = element.text, "", "a"
            element.set("href", self.site.link(known, self.place))
            SubElement(element, "code").text = text


class Site:
    """Pages, modules, names and copied files of the site."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = {module.path: module for module in api.read(root / "overt")}
        self.pages = pages(root)
        self.texts = {name: (root / name).read_text(encoding="utf-8") for name in self.pages}
        guides = [text for name, text in self.texts.items() if GUIDE.match(name)]
        self.reference = reference.arrange(self.modules.values(), guides)
        self.names = names(self.modules.values(), self.reference)
        self.copies: set[str] = set()
        self.sources: set[str] = set()  # pages of sources that other pages link to
        self.readers: dict[tuple[str, ...], markdown.Markdown] = {}  # slow to create

    def lead(self, link: str, source: str, place: str) -> str:
        """Convert a link of the page `source` to one of the site; unknown links are unchanged."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or not parts.path:
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(parts.path)))
        dotted = path.replace("/", ".")
        if path in self.pages:
            target = self.pages[path]
        elif path in self.modules:
            target = source_place(self.modules[path])
        elif f"{path}/README.md" in self.pages:
            target = self.pages[f"{path}/README.md"]
        elif path.startswith("overt") and dotted in self.names:
            target = self.names[dotted]
        elif (self.root / path).is_file():
            self.copies.add(path)
            target = path
        else:
            return link
        return self.link(target, place) + (f"#{parts.fragment}" if parts.fragment else "")

    def link(self, target: str, place: str) -> str:
        """Return the link from the page at `place` to `target`, and keep linked sources."""
        if target.startswith("source/"):
            self.sources.add(urldefrag(target).url)
        return relative(target, place)

    def render(self, text: str, source: str, place: str) -> str:
        """Convert Markdown to HTML, with links of the site."""
        text = FENCE.sub(r"```\1", text)  # Markdown accepts one word after the fence
        marks = ("toc",) if source in self.pages else ()  # anchors of headings
        if marks not in self.readers:
            self.readers[marks] = markdown.Markdown(extensions=[*EXTENSIONS, *marks])
        reader = self.readers[marks].reset()
        reader.treeprocessors.register(Links(source, place, self), "links", 1)
        return coloured(reader.convert(text))

    def about(self, docstring: str, home: str, place: str) -> str:
        """Convert a docstring of module `home` to HTML: Markdown, and doctests as code."""
        if not docstring:
            return ""
        text = listed_sections(docstring)
        text = DOCTEST.sub(lambda found: f"```python\n{found[0]}\n```", text)
        return self.render(text, home.replace(".", "/") + ".py", place)

    def source(self, module: api.Module) -> str:
        """Return the source of a module as HTML, with an anchor at each definition."""
        text = (self.root / module.path).read_text(encoding="utf-8")
        starts = {part.line for item in module.items for part, _ in members(item)}
        lines = highlight(text, SOURCE, FORMAT).split("\n")
        marked = (
            f'<span id="line-{number}">{line}</span>' if number in starts else line
            for number, line in enumerate(lines, 1)
        )
        code = "\n".join(marked)
        return f"<h1>{html.escape(module.path)}</h1>\n<pre><code>{code}</code></pre>"


def relative(target: str, place: str) -> str:
    """Return the link from the page at `place` to `target`, both relative to the root."""
    path, mark = urldefrag(target)
    return posixpath.relpath(path, posixpath.dirname(place) or ".") + (f"#{mark}" if mark else "")


def canonical(place: str, url: str) -> str:
    """Return the address of a page in the newest version: the one that search engines list."""
    if url:
        return f"{url.rstrip('/')}/{versions.LATEST}/{place}"
    return relative(f"../{versions.LATEST}/{place}", place)


def title(text: str, name: str) -> str:
    """Return the first heading of a page, or the name of its file."""
    found = re.search(r"^# +(.+)$", text, re.MULTILINE)
    return re.sub(r"[`*]", "", found[1]) if found else Path(name).stem


def template_loader() -> jinja2.Environment:
    """Return the environment that loads the templates of the site."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def build_versions(root: Path, out: Path, version: str, url: str = "") -> None:
    """Write a version of the site to a folder that may have other versions."""
    templates = template_loader()

    def page(name: str, found: list[str]) -> str:
        return templates.get_template(name).render(versions=found, latest=versions.LATEST, url=url)

    versions.add_version(out, version, lambda folder: build(root, folder, version, url), page)


def build(root: Path, out: Path, version: str = "", url: str = "") -> None:
    """Write one version to `out`, which is replaced only when everything is written.

    Without `version` the pages have neither a version nor a canonical link.
    """
    site = Site(root)
    texts = site.texts
    titles = {name: title(texts[name], name) for name in site.pages}
    contents = groups(texts.get("docs/index.md", ""), titles, site.pages)
    order = [page for group in contents for page in group.pages]
    templates = template_loader()
    written: dict[str, str] = {}

    def page(template: str, place: str, **values: object) -> None:
        shared = {
            "groups": contents,
            "reference": site.reference,
            "place": place,
            "link": lambda target: site.link(target, place),
            "about": lambda docstring, home: site.about(docstring, home, place),
            "python": python,
            "before": None,
            "after": None,
            "inside": [],
            "version": version,
            "canonical": canonical(place, url) if version else "",
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
    for each in site.reference:
        inside = [(section.anchor, section.title) for section in each.sections]
        page("reference.html", each.place, title=each.name, page=each, inside=inside)
    page("questions.html", "api/index.html", title="API reference")
    if "index.html" not in written:
        page("questions.html", "index.html", title="overt")
    for module in site.modules.values():
        if source_place(module) in site.sources:
            page("page.html", source_place(module), title=module.path, body=site.source(module))
    written |= {name: (HERE / "templates" / name).read_text(encoding="utf-8") for name in STATIC}
    written["search.js"] = searched(bodies, site.reference)
    save(out, written, {name: root / name for name in site.copies})


def save(out: Path, written: Mapping[str, str], copies: Mapping[str, Path]) -> None:
    """Write pages and files to a new folder, then replace the old one."""
    if out.exists() and any(out.iterdir()) and not (out / "api" / "index.html").exists():
        raise SystemExit(f"{out} is not a site: use an empty or new folder.")
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
    """Collect the links and anchors of an HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.twice: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Handle an opening tag; called by the parser."""
        for key, value in attrs:
            if key == "id" and value:
                (self.twice if value in self.anchors else self.anchors).add(value)
            if key in {"href", "src"} and value:
                self.links.append(value)


def broken(site: Path) -> list[str]:
    """Return internal links that are broken or ambiguous, as `page: link`."""
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
    """Build a version of the site, count its pages and report broken links."""
    parser = argparse.ArgumentParser(description="Build the documentation.")
    parser.add_argument("site", nargs="?", type=Path, default=ROOT / "site", help="folder")
    parser.add_argument("--version", default=versions.version_of(ROOT), help="such as 0.1")
    parser.add_argument("--url", default="", help="address of the site, for canonical links")
    options = parser.parse_args()
    out = options.site.resolve()
    build_versions(ROOT, out, options.version, options.url)
    wrong = broken(out)
    for line in wrong:
        print(f"broken link in {line}")
    count = len(list((out / options.version).rglob("*.html")))
    print(f"{count} pages of version {options.version} in {out}")
    print(f"to read them: {out / 'index.html'}, or python -m http.server --directory {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
