"""The sections of `make bench`: each a function of a `Setting` that fills a `Report`."""

from importlib import import_module

from .report import Section

NAMES = {  # in the order of the table; what each is about
    "supervision": "1 supervised attention",
    "rollout": "1 rollout",
    "surrogates": "2 surrogate maps",
    "hard": "3 hard attention",
    "captions": "4 CIDEr-D",
    "measures": "5 measures",
    "start": "6 starting",
    "training": "training",
    "monitor": "watching while training",
    "scenes": "the world",
    "compiled": "the same, compiled",
}


def section(name: str) -> Section:
    """One section, imported when it is asked for."""
    found: Section = import_module(f".{name}", __name__).section
    return found
