"""Arrange versions of the documentation as one site that any file server can host.

    SITE/0.1/            the pages of a version, replaced by each build of this version
    SITE/latest/         the same files as those of the newest version
    SITE/versions.json   the versions, newest first: the menu of every page reads it
    SITE/index.html      leads to latest/
    SITE/404.html        finds the root of the site from any address below it

All links are relative, so that the site works at any address, also below a path.
"""

import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

LATEST = "latest"
VERSIONS = "versions.json"
ROOT_FILES = ("index.html", "404.html", VERSIONS, ".nojekyll")
NAME = re.compile(r"\d+(\.\d+)*")


def version_of(project: Path) -> str:
    """Return the documented version, major and minor: "0.1" of 0.1.0, from pyproject.toml."""
    found = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    return ".".join(str(found["project"]["version"]).split(".")[:2])


def order(version: str) -> tuple[int, ...]:
    """Return the sort key of a version: 0.10 is newer than 0.9."""
    return tuple(map(int, version.split(".")))


def versions(site: Path) -> list[str]:
    """Return the versions in a site, newest first."""
    found = [path.name for path in site.glob("*/") if NAME.fullmatch(path.name)]
    return sorted(found, key=order, reverse=True)


def check_site(site: Path) -> None:
    """Raise SystemExit if a folder has files and is not a site, so that none is lost."""
    others = [path for path in site.glob("*") if path.name != ".git"]
    if others and not (site / VERSIONS).is_file():
        raise SystemExit(f"{site} is not a site: use an empty or new folder.")


def add_version(
    site: Path, version: str, write: Callable[[Path], None], page: Callable[[str, list[str]], str]
) -> None:
    """Add or replace a version of a site, and update the files that lead to it.

    `write(folder)` writes the pages of the version to an empty folder; `page(name, versions)`
    returns `index.html` and `404.html` of the root.
    """
    if not NAME.fullmatch(version):
        raise SystemExit(f"expected a version such as 0.1, got {version!r}.")
    check_site(site)
    site.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=site.parent, prefix=f".{site.name}-") as fresh:
        write(Path(fresh) / "pages")
        replace(Path(fresh) / "pages", site / version)
        found = versions(site)
        shutil.copytree(site / found[0], Path(fresh) / LATEST)
        replace(Path(fresh) / LATEST, site / LATEST)
    entries = [{"version": one, "latest": one == found[0]} for one in found]
    texts = {VERSIONS: json.dumps(entries, indent=2) + "\n", ".nojekyll": ""}
    texts |= {name: page(name, found) for name in ("index.html", "404.html")}
    for name, text in texts.items():
        (site / name).write_text(text, encoding="utf-8")


def replace(fresh: Path, folder: Path) -> None:
    """Move a new folder to the place of an old one."""
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(fresh, folder)
