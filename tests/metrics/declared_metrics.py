"""All declared metrics, as listed in the table of the documentation."""

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"


def metric_table() -> ModuleType:
    """Load the script that writes the table of metrics."""
    spec = importlib.util.spec_from_file_location("metric_table", DOCS / "metric_table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FUNCTIONS = {function.info.key: function for function in metric_table().declared_metrics()}
