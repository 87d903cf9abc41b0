"""Write the table of packages and their imports into ARCHITECTURE.md.

    python docs/import_diagram.py

Read from the source: every import of one package of overt by another, function-level ones included.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
ORDER = (
    "errors system io geometry attention capture attribution data losses targets nn metrics train "
    "viz testing experiments papers inspect cli"
).split()


def imports(package: str) -> set[str]:
    """Return the packages that one package imports from."""
    place = ROOT / "overt" / package
    paths = [place.with_suffix(".py")] if not place.is_dir() else sorted(place.rglob("*.py"))
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overt"):
                parts = (node.module or "").split(".")
                names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
                found.update(name for name in names if name in ORDER)
    return found - {package}


def about(package: str) -> str:
    """Return the first line of a package's docstring."""
    place = ROOT / "overt" / package
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "-").splitlines()[0]


def table() -> str:
    """Return the table of packages, one per line, in import order."""
    lines = ["| package | what it is for | imports |", "|---|---|---|"]
    for package in ORDER:
        file = package if (ROOT / "overt" / package).is_dir() else f"{package}.py"
        used = imports(package)
        listed = ", ".join(name for name in ORDER if name in used)
        lines.append(f"| [{package}](overt/{file}) | {about(package)} | {listed} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """Return the page with a new table between its marks."""
    marks = r"(<!-- imports -->\n).*?(<!-- /imports -->)"
    return re.sub(marks, lambda m: f"{m[1]}{table()}\n{m[2]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
