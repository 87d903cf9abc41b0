"""Attention you can see and test: learned, supervised, hard, aligned, measured, visible.

A name is imported when it is first used, so that `import overt` and `overt --help` cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overt import attribution, capture, data, losses, metrics, nn, targets, testing, train, viz
    from overt.attention import (
        AttentionMap,
        Form,
        Kind,
        Layout,
        Span,
        grid,
        regions,
        words,
    )
    from overt.attribution import rollout
    from overt.capture import layout_of, watch
    from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError
    from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry
    from overt.nn.wrappers.wrapped_model import wrap

__all__ = [
    "AttentionMap",
    "CorruptFileError",
    "Form",
    "Kind",
    "Layout",
    "PixelGeometry",
    "RegionGeometry",
    "RunError",
    "RunInterrupted",
    "Span",
    "TextGeometry",
    "UserError",
    "__version__",
    "attribution",
    "capture",
    "data",
    "grid",
    "layout_of",
    "losses",
    "metrics",
    "nn",
    "regions",
    "rollout",
    "targets",
    "testing",
    "train",
    "viz",
    "watch",
    "words",
    "wrap",
]

_PACKAGES = tuple("attribution capture data losses metrics nn targets testing train viz".split())
_HOMES = {
    "attribution": ("rollout",),
    "capture": ("layout_of", "watch"),
    "errors": ("UserError", "CorruptFileError", "RunError", "RunInterrupted"),
    "nn": ("wrap",),
    "geometry": ("PixelGeometry", "RegionGeometry", "TextGeometry"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _PACKAGES:
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
