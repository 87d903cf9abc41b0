"""Rich output of maps, scorecards and head views in a notebook with a real kernel."""

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytestmark = pytest.mark.long

CELLS = [
    """
import torch
import overt
from overt import metrics, viz
from overt.testing import PlantedCell, toy_batch

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
with torch.no_grad(), overt.watch(model) as trace:
    model(torch.randn(1, 9, 16))
trace.map()
""",
    "viz.head_view(trace, tokens=list('abcdefghi'), token='c')",
    "viz.view(trace.map(), tokens=list('abcdefghi'))",
    """
from dataclasses import replace

planted, batch = PlantedCell(cell=5, gain=40.0).eval(), toy_batch(8)


class Planted:
    name, split = "planted", "test"

    def __len__(self):
        return len(batch)

    def batch(self, indices):
        rows = torch.tensor(list(indices))
        return replace(batch.select(rows), target=planted.truth(batch).select(rows))

    def digest(self):
        return "planted by hand"


metrics.scorecard(planted, Planted(), measures=["cc", "entropy"])
""",
]
LIVE = "viz.head_view(trace).live()"


def run_cells(cells: list[str]) -> list[dict[str, object]]:
    """The last output of each cell, by kind."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return [cell.outputs[-1]["data"] for cell in notebook.cells]


def test_objects_have_html_output_in_a_notebook() -> None:
    attention, heads, view, card = run_cells(CELLS)
    assert "<b>AttentionMap</b> of 1 samples, 2 layers, 2 heads" in str(attention["text/html"])
    for frame, script in ((heads, "drawHeads"), (view, "drawPanels")):
        assert str(frame["text/html"]).startswith('<iframe sandbox="allow-scripts"')
        assert script in str(frame["text/html"])
    assert "<table" in str(card["text/html"]) and "uniform" in str(card["text/html"])


def test_live_view_is_a_widget() -> None:
    pytest.importorskip("anywidget", reason="anywidget is not installed")
    *_, live = run_cells([CELLS[0], LIVE])
    assert "application/vnd.jupyter.widget-view+json" in live
