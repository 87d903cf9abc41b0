"""Checks of the inputs of attention over cells, with a sentence that says how to give them."""

from torch import Tensor

from overt.attention import Layout


def check_cells(
    cells: Tensor,
    question: Tensor,
    layout: Layout,
    width: int | None = None,
    question_width: int | None = None,
) -> None:
    """Raise unless cells are (b, k, d), with a question per sample and k positions.

    A feature map is not flattened silently: (b, d, y, x) and (b, y, x, d) look alike.

    Args:
        cells: features of the cells.
        question: features of the question.
        layout: layout of the cells.
        width: expected features of a cell; any by default.
        question_width: expected features of the question; any by default.

    Raises:
        TypeError: The layout is not a `Layout`.
        ValueError: A shape does not fit.
    """
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout must be the layout of the cells, such as overt.grid(8, 8), got {layout!r}"
        )
    shape = tuple(cells.shape)
    wanted = f"(b, k, {width or 'd'})"
    if cells.ndim == 4:
        raise ValueError(
            f"cells must have shape {wanted}, got {shape}: flatten a feature map (b, d, y, x) with "
            "cells.flatten(2).transpose(1, 2), and pass grid(y, x) as the layout"
        )
    if cells.ndim != 3 or (width is not None and shape[2] != width):
        raise ValueError(f"cells must have shape {wanted}, got {shape}")
    if question.ndim != 2 or len(question) != len(cells):
        raise ValueError(
            f"the question must have shape (b, e) with one row per sample, {len(cells)} here, got "
            f"{tuple(question.shape)}"
        )
    if question_width is not None and question.shape[1] != question_width:
        raise ValueError(
            f"the question must have {question_width} features, got {question.shape[1]}"
        )
    if len(layout) != shape[1]:
        raise ValueError(f"the layout has {len(layout)} positions, but there are {shape[1]} cells")
