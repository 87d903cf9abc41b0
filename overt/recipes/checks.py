"""What can be said about a device and about data before torch is imported."""

import os
from pathlib import Path

from overt.errors import BadInput
from overt.recipes.recipe import Recipe

DEVICES = ("auto", "cpu", "cuda", "mps")


def device(name: str) -> None:
    """Refuse what is no device's name; whether the device is here is asked of torch, later."""
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and not (kind == "cuda" and number.isdecimal())):
        raise BadInput(f"there is no device {name!r}; choose auto, cpu, cuda, cuda:1 or mps.")


def cores() -> int:
    """How many processors this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def data_root(given: Path | None) -> Path | None:
    """The folder of data sets that `--data` or else OVERT_DATA names; it must be there."""
    named = os.environ.get("OVERT_DATA")
    root = given or (Path(named) if named else None)
    if root is not None and not _is_folder(root):
        who = "--data" if given else "OVERT_DATA"
        raise BadInput(f"{who} names {str(root)!r}, which is not a folder; name one that is there.")
    return root


def data(recipe: Recipe, root: Path | None) -> None:
    """Refuse a recipe whose data set is not below `root`, with the way to get it."""
    from overt.data import sets

    name = getattr(recipe.data, "name", None)
    if name is None:
        return
    chosen = sets.find(name)
    if root is None and name not in sets.PROGRAMS:
        raise BadInput(
            f"{recipe.name} needs the data set {name}: name the folder that holds it with --data "
            "or OVERT_DATA."
        )
    if name not in sets.present(root or Path(os.devnull)):
        where = f" in {root}" if root is not None else ""
        raise BadInput(f"{recipe.name} needs the data set {name}, not found{where}. {chosen.how}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
