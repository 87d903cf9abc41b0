"""Read modules, functions, classes, signatures and docstrings from the source.

The source is read as a syntax tree, so that the pages need neither torch nor an import, and
signatures show shapes as written.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Item:
    """One name: `anchor` is its name on the page, `code` its signature or value."""

    name: str
    anchor: str
    code: str
    about: str
    line: int
    inside: tuple["Item", ...] = ()


@dataclass(frozen=True)
class Module:
    """One file of the package; `name` is dotted.

    `exports` are re-exported names, each with its full name; `path` is the file from the root.
    """

    name: str
    path: str
    about: str
    items: tuple[Item, ...] = field(default=())
    exports: tuple[tuple[str, str], ...] = field(default=())


def read(package: Path) -> list[Module]:
    """Return every documented module of a package, sorted by name."""
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
            file = path.relative_to(package.parent).as_posix()
            found.append(Module(name, file, about, items, exports))
    return sorted(found, key=lambda module: module.name)


def handed_on(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the public names that a package re-exports, in alphabetical order.

    They are the names in `__all__` if it is a list of strings, otherwise the imported names.
    """
    found = {}
    listed = stated(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overt"):
            for name in node.names:
                called = name.asname or name.name
                if not called.startswith("_") and (listed is None or called in listed):
                    found[called] = f"{node.module}.{name.name}"
    yield from sorted(found.items())


def stated(tree: ast.Module) -> list[str] | None:
    """Return `__all__` of a package, or None if it is absent or computed."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value) if isinstance(node.value, ast.List) else None
    return None


def public(body: list[ast.stmt], source: str, owner: str = "") -> Iterator[Item]:
    """Yield the public names that these statements define, in file order, each once."""
    seen: set[str] = set()
    for item in defined(body, source, owner):
        if item.name not in seen:  # setters, overloads and the branches of an `if` repeat a name
            yield item
        seen.add(item.name)


def defined(body: list[ast.stmt], source: str, owner: str) -> Iterator[Item]:
    """Yield the public names that these statements define, with repetitions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                about = ast.get_docstring(node) or ""
                yield Item(node.name, owner + node.name, signature(node), about, node.lineno)
        elif isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                inside = tuple(public(node.body, source, f"{owner}{node.name}."))
                about = ast.get_docstring(node) or ""
                yield Item(node.name, owner + node.name, heading(node), about, node.lineno, inside)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names and not names[0].startswith("_"):
                yield Item(names[0], owner + names[0], shown(node, source), "", node.lineno)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the `def` line without its body; one argument per line if it is long."""
    marks = [f"@{ast.unparse(mark)}\n" for mark in node.decorator_list]
    start = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{start} {node.name}({ast.unparse(node.args)}){result}"
    if len(line) > 90:
        line = f"{start} {node.name}(\n{''.join(arguments(node.args))}){result}"
    return "".join(marks) + line


def arguments(args: ast.arguments) -> Iterator[str]:
    """Yield each argument on a separate line, with `/` and `*` between them."""
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
    """Return one argument with its default."""
    equal = " = " if arg.annotation else "="
    return f"    {ast.unparse(arg)}{equal + ast.unparse(default) if default else ''},\n"


def heading(node: ast.ClassDef) -> str:
    """Return the `class` line with decorators and bases."""
    marks = [f"@{ast.unparse(mark)}\n" for mark in node.decorator_list]
    bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
    return f"{''.join(marks)}class {node.name}{f'({bases})' if bases else ''}"


def shown(node: ast.Assign | ast.AnnAssign, source: str) -> str:
    """Return the source of a value or field with its comment, cut after a few lines."""
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    lines = inspect.cleandoc("\n".join(lines)).splitlines()
    return "\n".join([*lines[:6], "    ..."] if len(lines) > 6 else lines)
