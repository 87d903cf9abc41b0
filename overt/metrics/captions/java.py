"""Locate Java and the Java programs of the official caption evaluation."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from overt.errors import UserError


def find_java() -> str:
    """Return the path of `java`; raise `UserError` if it is not installed."""
    found = shutil.which("java")
    if found is None:
        raise UserError("This metric needs Java, and `java` is not on the path: install a JRE.")
    return found


def find_jar(folder: str, name: str) -> Path:
    """Return the first jar of pycocoevalcap in `folder` whose name begins with `name`."""
    found = sorted(package_folder(folder).glob(f"{name}*.jar"))
    if not found:
        raise UserError(
            f"{package_folder(folder)} has no {name}*.jar: install pycocoevalcap again."
        )
    return found[0]


def package_folder(folder: str) -> Path:
    """Return a folder of the package pycocoevalcap, which contains the jars; it is not imported."""
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "This metric uses the Java programs of pycocoevalcap: pip install pycocoevalcap."
        )
    return Path(spec.submodule_search_locations[0]) / folder
