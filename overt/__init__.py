"""Attention you can see and test: learned, supervised, hard, aligned, measured, visible.

A name is imported when it is first used, so that `import overt` and `overt --help` cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overt import capture, data, measure, models, show, supervise, testing, train
    from overt.attention import (
        AttentionMap,
        Form,
        Kind,
        Layout,
        Span,
        grid,
        regions,
        rollout,
        words,
    )
    from overt.capture import watch
    from overt.errors import BadInput, Damaged, Failed, Stopped
    from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry
    from overt.models.adopting.adopted import adopt

__all__ = [
    "AttentionMap",
    "BadInput",
    "Damaged",
    "Failed",
    "Form",
    "Kind",
    "Layout",
    "PixelGeometry",
    "RegionGeometry",
    "Span",
    "Stopped",
    "TextGeometry",
    "__version__",
    "adopt",
    "capture",
    "data",
    "grid",
    "measure",
    "models",
    "regions",
    "rollout",
    "show",
    "supervise",
    "testing",
    "train",
    "watch",
    "words",
]

_ROOMS = ("capture", "data", "measure", "models", "show", "supervise", "testing", "train")
_HOMES = {
    "capture": ("watch",),
    "errors": ("BadInput", "Damaged", "Failed", "Stopped"),
    "models": ("adopt",),
    "geometry": ("PixelGeometry", "RegionGeometry", "TextGeometry"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _ROOMS:
        return import_module(f"overt.{name}")
    if name in __all__:
        home = next((home for home, names in _HOMES.items() if name in names), "attention")
        return getattr(import_module(f"overt.{home}"), name)
    raise AttributeError(f"module 'overt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("overt")
    except PackageNotFoundError:  # a copy of the source that was never installed
        return "0+unknown"
