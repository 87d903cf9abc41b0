"""Make the pictures of the tutorials: run their code and keep what it draws beside the pages.

    python docs/pictures.py [PAGE ...]

Pictures are brought to the width of a page and to a palette, so that each stays small. Tests hold
that the code of a page writes every picture the page shows.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent / "tutorials"
CODE = re.compile(r"^```python[^\n`]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"!\[[^\]]+\]\(([^)]+\.png)\)")
WIDTH, COLOURS = 1100, 256


def run(page: Path) -> str:
    """Run the code blocks of a page in the current folder and return their output."""
    script = Path("page.py")
    script.write_text("\n".join(CODE.findall(page.read_text(encoding="utf-8"))), encoding="utf-8")
    done = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def keep(source: Path, target: Path) -> None:
    """Save a picture at page width with a palette."""
    picture = Image.open(source).convert("RGB")
    picture.thumbnail((WIDTH, 4 * WIDTH), Image.Resampling.LANCZOS)
    picture.quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE).save(target, optimize=True)


def main() -> int:
    """Create the pictures of the given pages, or of all pages."""
    pages = [Path(name).resolve() for name in sys.argv[1:]] or sorted(HERE.glob("*.md"))
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            print(f"--- {page.name}", run(page), sep="\n")
            for name in SHOWN.findall(page.read_text(encoding="utf-8")):
                keep(Path(name), page.parent / name)
                print(f"{name}: {(page.parent / name).stat().st_size:,} bytes")
            os.chdir(HERE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
