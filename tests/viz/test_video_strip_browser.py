"""A video on the page in a real browser: frames side by side, one scale, sinks left out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overt.attention import AttentionMap, Layout, Span, words
from overt.geometry import TextGeometry
from overt.viz.attention_figure import save_panels
from overt.viz.panel import Choice, make_panel
from overt.viz.video_strip import split_frames

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.long
FRAMES = [np.full((60, 80, 3), 60 + 40 * at, np.uint8) for at in range(3)]


def video_panel() -> Any:
    """Two words over three frames of 2 x 2 cells; cell 0 of frame 1 is a sink of both words.

    Of the rest, the first word attends to frame 2 and the second to frame 3.
    """
    keys = split_frames(Layout((Span("video", (3, 2, 2), slice(0, 12)),), 12))
    text = TextGeometry(("it moves",), torch.tensor([[[0, 2], [3, 8]]]))
    weights = torch.full((2, 12), 0.01)
    weights[:, 0] = 0.6
    weights[0, 5], weights[1, 10] = 0.3, 0.3
    values = weights.expand(1, 1, 2, 2, 12).clone()
    attention = AttentionMap(values, keys, words(2, geometry=text))
    photos = {span.name: photo for span, photo in zip(keys.spans, FRAMES, strict=True)}
    panel = make_panel(attention, "the answer", queries=["it", "moves"], photos=photos)
    return replace(panel, sinks=((0,),), chances=(0.5, 0.25))


@pytest.mark.parametrize("width", [1280, 390])
def test_frames_share_a_scale_and_sinks_are_left_out(
    tmp_path: Path, open_page: Callable[..., Any], width: int
) -> None:
    page = open_page(save_panels(tmp_path / "v.html", [video_panel()], [Choice(0, 0)]), width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figures = page.locator(".strip figure")
    tops = [figures.nth(at).bounding_box()["y"] for at in range(3)]
    assert figures.count() == 3 and tops[0] == tops[1]  # side by side, also on a phone
    told = page.locator(".strip .told")
    page.locator(".token.written").first.click()
    assert "(60 %)" in page.locator(".now").inner_text()
    assert told.nth(0).inner_text().startswith("frame 1: 63.0 %")
    assert page.locator(".strip .sink").count() == 1
    before = heat(page)
    page.locator(".leave").check()
    assert (
        page.locator(".now")
        .inner_text()
        .startswith("“it” attends most to frame 2, row 1, column 2")
    )
    assert told.nth(0).inner_text().startswith("frame 1: 7.5 %")  # three cells of .01 of .40
    after = heat(page)
    assert before[0] > before[1] > before[2]  # one scale for all frames
    assert after[1] > before[1]  # it ends at the largest weight that is left
    assert after[1] > 3 * after[2]
    page.locator(".token.written").nth(1).click()
    page.mouse.move(0, 0)
    assert heat(page)[2] > 3 * heat(page)[1]


def heat(page: Any) -> list[int]:
    """The largest opacity of the heat over each frame."""
    found: list[int] = page.evaluate(
        """[...document.querySelectorAll(".strip canvas.heat")].map((canvas) => {
             const copy = document.createElement("canvas"), { width, height } = canvas;
             Object.assign(copy, { width, height });
             const context = copy.getContext("2d", { willReadFrequently: true });
             context.drawImage(canvas, 0, 0);
             const data = context.getImageData(0, 0, width, height).data;
             return data.reduce((top, value, n) => (n % 4 === 3 ? Math.max(top, value) : top), 0);
           })"""
    )
    return found
