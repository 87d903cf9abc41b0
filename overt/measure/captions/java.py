"""The programs of official evaluation that are written in Java, where a machine has them."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from overt.errors import BadInput


def java() -> str:
    """The path of `java`; a sentence about what to do where there is none."""
    found = shutil.which("java")
    if found is None:
        raise BadInput("This measure runs in Java, and `java` is not on the path: install a JRE.")
    return found


def jar(folder: str, name: str) -> Path:
    """The first jar of pycocoevalcap in `folder` whose name begins with `name`."""
    found = sorted(package(folder).glob(f"{name}*.jar"))
    if not found:
        raise BadInput(
            f"There is no {name}*.jar in {package(folder)}: install pycocoevalcap again."
        )
    return found[0]


def package(folder: str) -> Path:
    """A folder of the package pycocoevalcap, which brings the jars; it is never imported."""
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(
            "This measure uses the Java programs that come with the package pycocoevalcap: "
            "pip install pycocoevalcap."
        )
    return Path(spec.submodule_search_locations[0]) / folder
