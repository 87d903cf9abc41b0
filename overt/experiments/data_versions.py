"""Versions of generated datasets in results.

The hash of a dataset is known once it is built; its version can be compared before. It is raised
when models see the same items differently, so that old and new runs cannot be in one row.
"""

from collections.abc import Mapping
from typing import Any

# 2: words of questions have the numbers of the same words in captions
VERSIONS = {"scenes-caption-pairs": 2}


def data_version(name: str) -> int:
    """Return the version of a dataset in this release; 1 for other names.

    >>> data_version("scenes-caption-pairs"), data_version("trec")
    (2, 1)
    """
    return VERSIONS.get(name, 1)


def outdated_parts(results: Mapping[str, Any], columns: tuple[str, ...]) -> list[str]:
    """List the datasets of a run, and those of its metrics in `columns`, of an older version.

    The pointing game of phrase grounding has had only one definition.
    """
    from overt.metrics.versions import current_version, version_of  # imports torch

    data = [one for one in results.get("data") or () if version_of(one) < data_version(one["name"])]
    found = list(dict.fromkeys(f"data {one['name']}" for one in data))
    ours = results.get("ours") or {}
    for name in columns:
        only = name == "pointing" and "grounding_accuracy" in ours
        if name in ours and not only and version_of(ours[name]) < current_version(name):
            found.append(f"metric {name}")
    return found
