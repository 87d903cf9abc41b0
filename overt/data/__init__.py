"""Files on disk become a `Batch`: one data set a file, nothing imported until it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overt.data.batch import Batch
    from overt.data.cifar import Cifar10, Cifar100
    from overt.data.easyvqa import EasyVqa
    from overt.data.features import Cached, FeatureCache, Key
    from overt.data.images import open_image
    from overt.data.resident import Resident, crop_and_flip, vary
    from overt.data.scenes.store import Scenes
    from overt.data.sets import root_of
    from overt.data.source import Source
    from overt.data.splits import Labels, Split
    from overt.data.trec import Trec
    from overt.data.vocabulary import HubTokenizer, Vocabulary

__all__ = [
    "Batch",
    "Cached",
    "Cifar10",
    "Cifar100",
    "EasyVqa",
    "FeatureCache",
    "HubTokenizer",
    "Key",
    "Labels",
    "Resident",
    "Scenes",
    "Source",
    "Split",
    "Trec",
    "Vocabulary",
    "crop_and_flip",
    "open_image",
    "root_of",
    "vary",
]

_HOMES = {
    "batch": ("Batch",),
    "cifar": ("Cifar10", "Cifar100"),
    "easyvqa": ("EasyVqa",),
    "features": ("Cached", "FeatureCache", "Key"),
    "images": ("open_image",),
    "resident": ("Resident", "crop_and_flip", "vary"),
    "scenes.store": ("Scenes",),
    "sets": ("root_of",),
    "source": ("Source",),
    "splits": ("Labels", "Split"),
    "trec": ("Trec",),
    "vocabulary": ("HubTokenizer", "Vocabulary"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"overt.data.{home}"), name)
    raise AttributeError(f"module 'overt.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
