"""What the source says of itself: modules, functions, classes, their signatures and docstrings.

Read by syntax tree, so that the pages need neither torch nor a working import, and a signature
shows the shapes as they were written.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Item:
    """One public name: `anchor` is its name on the page, `code` its signature or value."""

    name: str
    anchor: str
    code: str
    about: str
    inside: tuple["Item", ...] = ()


@dataclass(frozen=True)
class Module:
    """One file of the package; `name` is dotted.

    `exports` are the names that a package hands on from elsewhere, each with its full name there.
    """

    name: str
    about: str
    items: tuple[Item, ...] = field(default=())
    exports: tuple[tuple[str, str], ...] = field(default=())

    @property
    def page(self) -> str:
        """Where its page stands in the site."""
        return f"api/{self.name}.html"


def read(package: Path) -> list[Module]:
    """Every module of a package that has something to say, by name."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[-1] == "__main__" or any(part.startswith("_") for part in parts[:-1]):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        items = tuple(public(tree.body, source))
        about = ast.get_docstring(tree) or ""
        if items or about or parts[-1] == "__init__":
            exports = tuple(handed_on(tree)) if parts[-1] == "__init__" else ()
            found.append(Module(name, about, items, exports))
    return sorted(found, key=lambda module: module.name)


def handed_on(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The public names that a package imports from its modules, in the order of the alphabet."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overt"):
            for name in node.names:
                if not (name.asname or name.name).startswith("_"):
                    found[name.asname or name.name] = f"{node.module}.{name.name}"
    yield from sorted(found.items())


def public(body: list[ast.stmt], source: str, owner: str = "") -> Iterator[Item]:
    """The public names that these statements define, in the order of the file, each once."""
    seen: set[str] = set()
    for item in defined(body, source, owner):
        if item.name not in seen:  # a property's setter, an overload, the other half of an `if`
            yield item
        seen.add(item.name)


def defined(body: list[ast.stmt], source: str, owner: str) -> Iterator[Item]:
    """The public names that these statements define, as often as they do."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                about = ast.get_docstring(node) or ""
                yield Item(node.name, owner + node.name, signature(node), about)
        elif isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                inside = tuple(public(node.body, source, f"{owner}{node.name}."))
                about = ast.get_docstring(node) or ""
                yield Item(node.name, owner + node.name, heading(node), about, inside)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names and not names[0].startswith("_"):
                yield Item(names[0], owner + names[0], shown(node, source), "")


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The `def` line without its body; one argument a line when it is long."""
    marks = [f"@{ast.unparse(mark)}\n" for mark in node.decorator_list]
    start = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{start} {node.name}({ast.unparse(node.args)}){result}"
    if len(line) > 90:
        line = f"{start} {node.name}(\n{''.join(arguments(node.args))}){result}"
    return "".join(marks) + line


def arguments(args: ast.arguments) -> Iterator[str]:
    """Each argument on a line of its own, with the `/` and `*` that stand between them."""
    places = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(places) - len(args.defaults)) + args.defaults
    for number, (arg, default) in enumerate(zip(places, defaults, strict=True), 1):
        yield one(arg, default)
        if number == len(args.posonlyargs):
            yield "    /,\n"
    if args.vararg:
        yield f"    *{ast.unparse(args.vararg)},\n"
    elif args.kwonlyargs:
        yield "    *,\n"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield one(arg, default)
    if args.kwarg:
        yield f"    **{ast.unparse(args.kwarg)},\n"


def one(arg: ast.arg, default: ast.expr | None) -> str:
    """One argument with its default."""
    equal = " = " if arg.annotation else "="
    return f"    {ast.unparse(arg)}{equal + ast.unparse(default) if default else ''},\n"


def heading(node: ast.ClassDef) -> str:
    """The `class` line with its decorators and bases."""
    marks = [f"@{ast.unparse(mark)}\n" for mark in node.decorator_list]
    bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
    return f"{''.join(marks)}class {node.name}{f'({bases})' if bases else ''}"


def shown(node: ast.Assign | ast.AnnAssign, source: str) -> str:
    """A value or a field as it stands in the file, its comment included, cut after a few lines."""
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    lines = inspect.cleandoc("\n".join(lines)).splitlines()
    return "\n".join([*lines[:6], "    ..."] if len(lines) > 6 else lines)
