"""Check device names and data folders before torch is imported."""

import os
from pathlib import Path

from overt.errors import UserError
from overt.experiments.recipe import Recipe

DEVICES = ("auto", "cpu", "cuda", "mps")


def check_device_name(name: str) -> None:
    """Raise `UserError` unless `name` is a device name; torch later checks that it exists."""
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and not (kind == "cuda" and number.isdecimal())):
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:1 or mps.")


def check_device(name: str) -> None:
    """Raise `UserError` unless this machine has the device; `auto` and `cpu` need no torch."""
    check_device_name(name)
    if name not in ("auto", "cpu"):
        from overt.train import distributed

        distributed.check_device(name)


def resolve_data_root(given: Path | None) -> Path | None:
    """Return the data folder from `--data`, else from OVERT_DATA; it must exist."""
    named = os.environ.get("OVERT_DATA")
    root = given or (Path(named) if named else None)
    if root is not None and not is_folder(root):
        option = "--data" if given else "OVERT_DATA"
        raise UserError(f"{option} must be an existing folder, got {str(root)!r}.")
    return root


def check_dataset(recipe: Recipe, root: Path | None) -> None:
    """Raise `UserError` with instructions if the dataset of a recipe is not in `root`."""
    from overt.data import catalog

    name = getattr(recipe.data, "name", None)
    own = callable(getattr(recipe, "build", None))
    if name is None or (own and name not in [one.name for one in catalog.DATASETS]):
        return
    chosen = catalog.find_dataset(name)
    if root is None and name not in catalog.WITHOUT_FOLDER:
        raise UserError(
            f"{recipe.name} needs the dataset {name}: give its folder with --data or OVERT_DATA."
        )
    if name not in catalog.available_datasets(root or Path(os.devnull)):
        where = f" in {root}" if root is not None else ""
        raise UserError(
            f"{recipe.name} needs the dataset {name}, not found{where}. {chosen.instructions}"
        )


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False for a path that cannot exist."""
    try:
        return path.is_dir()
    # The name is too long, or has a NUL.
    except (OSError, ValueError):
        return False
