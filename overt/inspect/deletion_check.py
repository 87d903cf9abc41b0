"""Deletion of the cells that a map of a word shows, against the deletion of random cells.

A weight is not an effect: the photo is covered where the map of a word is largest, and the
probability of the word is compared with its probability when as many random cells are covered.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from overt.errors import UserError
from overt.inspect.inputs import PreparedCall, check_cost, cover_removed
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.written_answer import prepare_written_call, score_words

if TYPE_CHECKING:
    import numpy as np

    from overt.viz.panel import Choice, DeletionCheck, Panel

SHARE = 0.2  # of the cells of the image
DRAWS = 10  # of random cells


def check_deletion(
    loaded: LoadedModel,
    prepared: PreparedCall,
    shown: "Panel",
    choice: "Choice",
    max_flops: float = math.inf,
) -> "DeletionCheck":
    """Cover the strongest cells of each word's map, and random cells, and score the words again.

    Args:
        loaded: The model.
        prepared: Its input, without removed parts, and its answer.
        shown: The panel with a row per word of the answer.
        choice: The layer and head whose maps are checked.
        max_flops: The most floating-point operations of all runs together.

    Returns:
        The probabilities of the words. The random cells of all words are the same. Cells of equal
        weight are in a random order, so that a constant map covers random cells.

    Raises:
        UserError: If the image has no cells, or the runs need too many operations.
    """
    import numpy as np

    from overt.viz.panel import (
        DeletionCheck,
        describe_choice,
        grid_spans,
        grid_weights,
        pixel_geometry,
        weight_row,
    )

    model_input, answer = prepared.model_input, prepared.answer
    assert answer is not None
    if model_input.photo is None:
        raise UserError("Deletion is not available for a video: leave out --deletion.")
    check_cost(loaded, prepared.inputs, max_flops / (len(answer.words) + DRAWS))
    spans = [span for span in grid_spans(shown.attention.keys) if pixel_geometry(span)]
    if not spans:
        raise UserError("Deletion needs a map on cells of an image, and this model has none.")
    span = max(spans, key=len)  # of several views of the image, the one with most cells
    geometry = pixel_geometry(span)
    assert geometry is not None
    height, width = model_input.photo.shape[:2]
    boxes = geometry.cells(span.shape)[0].double().numpy() / [width, height, width, height]
    there = np.flatnonzero((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1]))
    count = max(1, round(SHARE * len(there)))
    rng = np.random.default_rng(0)

    def scores(cells: Sequence[int]) -> tuple[float, ...]:
        removed = tuple(
            (float(left), float(top), float(right), float(bottom))
            for left, top, right, bottom in boxes[list(cells)].clip(0, 1)
        )
        covered, _ = cover_removed(loaded, replace(model_input, removed_boxes=removed))
        return score_words(loaded, prepare_written_call(loaded, covered, answer=answer))

    mapped = []
    for word in range(len(answer.words)):
        weights = grid_weights(span, weight_row(shown, replace(choice, query=word))).ravel()
        mapped.append(scores(strongest_cells(weights, there, count, seed=word))[word])
    random = tuple(
        scores(sorted(rng.choice(there, count, replace=False).tolist())) for _ in range(DRAWS)
    )
    source = describe_choice(shown, replace(choice, query=None)).removesuffix(
        ", mean of all queries"
    )
    return DeletionCheck(source, count, tuple(mapped), random)


def strongest_cells(weights: "np.ndarray", there: "np.ndarray", count: int, seed: int) -> list[int]:
    """Return the `count` of the cells `there` with the largest weights, ties in random order.

    In the order of the cells, a map with ties would always cover the top of the photo.
    """
    import numpy as np

    mixed = np.random.default_rng((1, seed)).permutation(there)
    order = np.argsort(-weights[mixed], kind="stable")
    return sorted(mixed[order[:count]].tolist())
