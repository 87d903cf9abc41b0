"""Choose the names of the API reference and arrange them on pages, one per question.

A name is public if a package exports it (`__all__`), or if a Python block of a guide imports it
from a module. Everything else is internal: links to it lead to its source.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import api

QUESTIONS = {  # the pages of the reference, in the order of a user's questions
    "overt": "What is an attention map?",
    "overt.capture": "What does a model attend to?",
    "overt.attribution": "Which parts of the input explain an output?",
    "overt.viz": "How do I draw a map?",
    "overt.inspect": "How do I look at a model from Python?",
    "overt.metrics": "Is a map right, and does it explain the model?",
    "overt.losses": "How do I train attention?",
    "overt.targets": "What do I train attention towards?",
    "overt.nn": "Which attention modules can I build with?",
    "overt.train": "How do I train, save and resume?",
    "overt.data": "Which data can I read?",
    "overt.experiments": "How do I run my own experiment on the command line?",
    "overt.papers": "Which networks of the papers can I use?",
    "overt.testing": "Is my module or my metric correct?",
}
ACRONYMS = {
    word.lower(): word
    for word in (
        "BLEU CAM CIDEr CLEVR CNN COCO CUB GPU HAT HF IO ROUGE METEOR MIT OSIE RISE ROAR SPICE "
        "STL10 SVHN TREC UIUC VLBERT: VOC VQA VQA:"
    ).split()
}
COMMAND_LINE = "overt.cli"  # used in a terminal, not in Python
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A public name and the package or module to import it from."""

    path: str
    item: api.Item


@dataclass(frozen=True)
class Section:
    """Public names that one module defines."""

    home: str
    about: str
    entries: tuple[Entry, ...]

    @property
    def anchor(self) -> str:
        """Anchor of the section on its page."""
        return f"in-{self.home}"

    @property
    def title(self) -> str:
        """Subject of the section, from the name of its module: "Hard attention: selection"."""
        parts = self.home.split(".")[2:] or self.home.split(".")[1:]
        words = [ACRONYMS.get(word, word) for word in ": ".join(parts).replace("_", " ").split(" ")]
        return words[0][:1].upper() + " ".join(words)[1:]


@dataclass(frozen=True)
class Page:
    """Public names of one package, by the modules that define them."""

    name: str
    question: str
    about: str
    sections: tuple[Section, ...]

    @property
    def place(self) -> str:
        """Path of the page in the site."""
        return f"api/{self.name}.html"


def arrange(modules: Iterable[api.Module], guides: Iterable[str]) -> list[Page]:
    """Return the pages of the reference, given all modules and the Markdown of the guides."""
    known = {module.name: module for module in modules}
    homes = {f"{m.name}.{item.name}": (m, item) for m in known.values() for item in m.items}
    paths = import_paths(known, homes)
    for name in used_names(guides):
        if name in homes and name not in paths and not name.startswith(COMMAND_LINE):
            paths[name] = homes[name][0].name
    found: dict[str, dict[str, list[Entry]]] = {}
    for full, path in paths.items():
        module, item = homes[full]
        page = page_of(module.name, known)
        prefix = path.removeprefix(page).lstrip(".") if path.startswith(page) else ""
        entry = Entry(path, with_prefix(item, f"{prefix}." if prefix else ""))
        found.setdefault(page, {}).setdefault(module.name, []).append(entry)
    order = [*QUESTIONS, *sorted(found.keys() - QUESTIONS.keys())]
    return [make_page(name, found[name], known) for name in order if name in found]


def make_page(
    name: str, by_module: Mapping[str, list[Entry]], known: Mapping[str, api.Module]
) -> Page:
    """Return a page; what is imported from the package itself comes first."""
    depth = {home: min(one.path.count(".") for one in by_module[home]) for home in by_module}
    sections = []
    for home in sorted(by_module, key=lambda home: (depth[home], home)):
        place = {item.name: at for at, item in enumerate(known[home].items)}
        entries = sorted(by_module[home], key=lambda entry: place[entry.item.name])
        sections.append(Section(home, known[home].about, tuple(entries)))
    about = known[name].about if name in known else ""
    question = QUESTIONS.get(name) or about.split("\n")[0] or name
    return Page(name, question, about, tuple(sections))


def import_paths(
    known: Mapping[str, api.Module], homes: Mapping[str, tuple[api.Module, api.Item]]
) -> dict[str, str]:
    """Return the shortest path to import each exported name from, by its full name."""
    found: dict[str, list[str]] = {}
    for module in known.values():
        if module.name == COMMAND_LINE:
            continue
        for name, _ in module.exports:
            for full in definitions(f"{module.name}.{name}", known, homes):
                direct = full.rpartition(".")[2] == name
                found.setdefault(full, []).append(
                    module.name if direct else f"{module.name}.{name}"
                )
    return {full: min(paths, key=lambda path: (len(path), path)) for full, paths in found.items()}


def definitions(
    name: str,
    known: Mapping[str, api.Module],
    homes: Mapping[str, tuple[api.Module, api.Item]],
) -> Iterator[str]:
    """Yield the full names of what an exported name stands for; a module gives all of its names."""
    for _ in range(4):  # a package may export what another one exports
        package, _, last = name.rpartition(".")
        target = dict(known[package].exports).get(last, name) if package in known else name
        if target == name:
            break
        name = target
    if name in homes:
        yield name
    elif name in known and not known[name].exports:  # packages that export have names of their own
        yield from (f"{name}.{item.name}" for item in known[name].items if item.about)


def page_of(name: str, known: Mapping[str, api.Module]) -> str:
    """Return the package whose page shows a name: the first below `overt`, or `overt` itself."""
    top = ".".join(name.split(".")[:2])
    package = any(other.startswith(f"{top}.") for other in known)
    return top if package or (top in known and known[top].exports) else "overt"


def with_prefix(item: api.Item, prefix: str) -> api.Item:
    """Return an item whose anchors, also those of its members, begin with a prefix."""
    inside = tuple(with_prefix(one, prefix) for one in item.inside)
    return replace(item, anchor=prefix + item.anchor, inside=inside)


def used_names(guides: Iterable[str]) -> set[str]:
    """Return the dotted names below `overt` that the Python blocks of guides use."""
    found: set[str] = set()
    for text in guides:
        called = {"overt": "overt"}
        for block in BLOCK.findall(text):
            try:
                tree = ast.parse(block)
            except SyntaxError:  # an excerpt, or a console
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overt"):
                    for one in node.names:
                        called[one.asname or one.name] = f"{node.module}.{one.name}"
                elif isinstance(node, ast.Import):
                    for one in node.names:
                        if one.asname and one.name.startswith("overt"):
                            called[one.asname] = one.name
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute | ast.Name):
                    first, _, rest = ast.unparse(node).partition(".")
                    if first in called:
                        found.add(f"{called[first]}.{rest}" if rest else called[first])
            found.update(called.values())
    return found
