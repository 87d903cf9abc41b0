"""Build the pages: README.md, the other pages of the root, docs/*.md and one page a module.

    python docs/build.py [SITE]

The site has the layout of the repository, so that a link that works there works here: a link to a
page leads to its HTML, a link to a module to what its docstrings say, any other file is copied.
Ends with 1 and names them when links inside the site lead nowhere.
"""

import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit
from xml.etree.ElementTree import Element, SubElement

import jinja2
import markdown
from markdown.treeprocessors import Treeprocessor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import api

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```([\w-]+)[^\n`]*$", re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def pages(root: Path) -> dict[str, str]:
    """Each page of the repository and where it stands in the site: {"README.md": "index.html"}."""
    found = [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]
    names = [path.relative_to(root).as_posix() for path in found]
    return {n: "index.html" if n == "README.md" else n.removesuffix(".md") + ".html" for n in names}


def names(modules: Iterable[api.Module]) -> dict[str, str]:
    """Each dotted public name and its place in the site, with and without the leading `overt.`."""
    found = {}
    for module in modules:
        found[module.name] = module.page
        for item in module.items:
            for part in (item, *item.inside):
                found[f"{module.name}.{part.anchor}"] = f"{module.page}#{part.anchor}"
    return found | {name.removeprefix("overt."): place for name, place in found.items()}


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
        marks = ["toc"] if source in self.pages else []  # headings one can link to
        reader = markdown.Markdown(extensions=["fenced_code", "tables", "sane_lists", *marks])
        reader.treeprocessors.register(Links(source, place, self), "links", 1)
        return reader.convert(text)

    def about(self, docstring: str, module: api.Module) -> str:
        """A docstring to HTML: Markdown, and doctests as code."""
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
    contents = [(title(texts[name], name), place) for name, place in site.pages.items()]
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written: dict[str, str] = {}

    def page(template: str, place: str, **values: object) -> None:
        shared = {
            "pages": contents,
            "modules": site.modules,
            "place": place,
            "link": lambda target: relative(target, place),
            "about": site.about,
        }
        written[place] = templates.get_template(template).render(shared | values)

    for name, place in site.pages.items():
        body = site.render(texts[name], name, place)
        page("page.html", place, title=title(texts[name], name), body=body)
    for module in site.modules:
        page("module.html", module.page, title=module.name, module=module)
    page("modules.html", "api/index.html", title="All modules")
    if "index.html" not in written:
        page("modules.html", "index.html", title="overt")
    save(out, written, {name: root / name for name in site.copies})


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
    seen: dict[Path, Anchors] = {}
    for path in sorted(site.rglob("*.html")):
        seen[path] = Anchors()
        seen[path].feed(path.read_text(encoding="utf-8"))
    wrong = []
    for path, found in seen.items():
        wrong += [f"{path.relative_to(site).as_posix()}: #{name} twice" for name in found.twice]
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target.is_file() and target.is_relative_to(site.resolve())
            lost = parts.fragment and target in seen and parts.fragment not in seen[target].anchors
            if not there or lost:
                wrong.append(f"{path.relative_to(site).as_posix()}: {link}")
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
