"""Versions of metric definitions in results.

Results contain the `version` of every metric; results from before versions existed have 1. Numbers
of different versions are not comparable: tables keep them in separate columns, and comparisons
leave them out.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from overt.metrics.localization import mass_inside, pointing_game
from overt.metrics.segmentation import jaccard

# names in results.json are a metric's name with words before or after it
_ANYWHERE = {"pointing": pointing_game.info, "mass_inside": mass_inside.info}
_IN_FRONT = {"mass": mass_inside.info, "gain": mass_inside.info, "jaccard": jaccard.info}


def version_of(entry: Mapping[str, Any]) -> int:
    """Return the version of a result; 1 where none is written."""
    found = entry.get("version", 1)
    return found if isinstance(found, int) and not isinstance(found, bool) else 1


def current_version(name: str) -> int:
    """Return the version that this release computes for a metric name; 1 for other names.

    >>> current_version("mass_inside_held_out"), current_version("accuracy")
    (2, 1)
    """
    name = name.replace(" ", "_")
    for stem, known in _ANYWHERE.items():
        if name == stem or name.startswith(f"{stem}_") or name.endswith(f"_{stem}"):
            return known.version
    for stem, known in _IN_FRONT.items():
        if name == stem or name.startswith(f"{stem}_"):
            return known.version
    return 1


def newest_version(name: str, results: Iterable[Mapping[str, Mapping[str, Any]]]) -> int:
    """Return the newest version of a metric among the results of several runs.

    A run without a version is older than all runs with one, and is compared with the version that
    this release computes. The pointing game of phrase grounding is also called `pointing` and
    appears with `grounding_accuracy`; it has had only one definition.
    """
    found = 1
    for ours in results:
        if name not in ours:
            continue
        said = "version" in ours[name] or (name == "pointing" and "grounding_accuracy" in ours)
        found = max(found, version_of(ours[name]) if said else current_version(name))
    return found


def label_with_version(name: str, version: int, newest: int) -> str:
    """Add the version to a metric's name unless it is the newest one.

    >>> label_with_version("pointing", 1, 2), label_with_version("pointing", 2, 2)
    ('pointing (definition 1)', 'pointing')
    """
    return name if version == newest else f"{name} (definition {version})"
