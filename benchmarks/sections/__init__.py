"""Sections of `make speed`: each is a function of a `Setting` that fills a `Report`."""

from importlib import import_module

from .report import Section

NAMES = {  # in the order of the table: titles
    "supervision": "1 supervised attention",
    "rollout": "1 rollout",
    "surrogates": "2 surrogate maps",
    "hard": "3 hard attention",
    "captions": "4 CIDEr-D",
    "metrics": "5 metrics",
    "start": "6 start-up",
    "training": "training",
    "monitor": "AttentionMonitor",
    "scenes": "synthetic scenes",
    "compiled": "torch.compile",
    "attribution": "7 attribution",
}


def section(name: str) -> Section:
    """Import and return one section."""
    found: Section = import_module(f".{name}", __name__).section
    return found
