"""Make a notebook of every tutorial: its text, its code, and what the page says that it prints.

    python docs/notebooks.py [FOLDER]

The pages are what is written and tested; notebooks are made of them, and a test holds the ones that
are kept beside the pages to what this makes. Nothing is run here.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).resolve().parent / "tutorials"
FENCE = re.compile(r"^```(?P<kind>\w*)[^\n`]*\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)


def cells(page: str) -> Iterator[dict[str, Any]]:
    """Yield text, code and printed output of a page as notebook cells, in order."""
    at, waiting = 0, None
    for found in FENCE.finditer(page):
        kind, text = found["kind"], page[at : found.start()].strip()
        if kind not in ("python", "output"):
            continue  # a command line stays part of the text
        if text or kind == "python":
            if waiting is not None:
                yield waiting
                waiting = None
            if text:
                yield {"cell_type": "markdown", "metadata": {}, "source": lines(text)}
        if kind == "python":
            waiting = code(found["body"])
        elif waiting is not None:
            waiting["outputs"] = [
                {"name": "stdout", "output_type": "stream", "text": lines(found["body"])}
            ]
        at = found.end()
    if waiting is not None:
        yield waiting
    if page[at:].strip():
        yield {"cell_type": "markdown", "metadata": {}, "source": lines(page[at:].strip())}


def code(body: str) -> dict[str, Any]:
    """Return a code cell without output."""
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": lines(body.rstrip()),
    }


def lines(text: str) -> list[str]:
    """Split text into lines with line ends, as in notebooks."""
    return text.splitlines(keepends=True)


def notebook(page: str) -> str:
    """Return the notebook of a page as file content."""
    made = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells(page))]
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main(folder: Path) -> None:
    """Write the notebook of every tutorial into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(TUTORIALS.glob("*.md")):
        made = folder / f"{page.stem}.ipynb"
        made.write_text(notebook(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(made)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TUTORIALS)
