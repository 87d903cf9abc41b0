"""Contract of decoders with incremental state."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.nn.output import Output
from overt.testing.models import (
    Failure,
    ModelCase,
    differs,
    maps_are_valid,
    output_is_an_output,
    prediction_is_finite,
    select,
)


def check_decoder(
    make_model: Callable[[], nn.Module],
    batch: Batch,
    tokens: Int[Tensor, "b n"],
    tolerance: float = 1e-5,
) -> None:
    """Check the contract of a decoder.

    Each step returns a valid `Output` and does not modify its state, so that it can be repeated; a
    reordered state continues like its samples, also if one is repeated; samples are independent.

    Args:
        make_model: Builds a new model.
        batch: The batch to decode.
        tokens: The tokens to feed, one column per step.
        tolerance: The tolerance of comparisons.

    Raises:
        AssertionError: A check failed; the message names the step and the check.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> batch = toy_batch(3)
        >>> check_decoder(Copier, batch, batch.tokens)  # passes
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = make_model().eval()
        whole = _decode(model, batch, tokens)
        for number, (state, output) in enumerate(whole):
            case = ModelCase(make_model, model, batch, None, output, (), tolerance)
            for check in (output_is_an_output, prediction_is_finite, maps_are_valid):
                _raise_failure(f"step {number}, {check.__name__}", check(case))
            # the same state again: a step that changed it in place would differ
            again, _ = model.step(state, tokens[:, number])  # type: ignore[operator]
            _raise_failure(f"step {number} repeated", differs(again, output, 0.0))
            # reversed, with the first sample twice, as beam search may need it
            rows = torch.tensor([*reversed(range(len(batch))), 0])
            turned = state.reorder(rows)
            found, _ = model.step(turned, tokens[rows, number])  # type: ignore[operator]
            expected = select(output, rows)
            _raise_failure(f"step {number} reordered", differs(found, expected, tolerance))
        alone = _decode(model, batch.select(torch.tensor([0])), tokens[:1])
        for number, ((_, output), (_, single)) in enumerate(zip(whole, alone, strict=True)):
            first = select(output, torch.tensor([0]))
            _raise_failure(f"step {number} of a sample alone", differs(single, first, tolerance))


def _decode(model: Any, batch: Batch, tokens: Tensor) -> list[tuple[Any, Output]]:
    """Return every state with its output."""
    state, steps = model.start(model.encode(batch)), []
    for token in tokens.unbind(dim=1):
        output, after = model.step(state, token)
        steps.append((state, output))
        state = after
    return steps


def _raise_failure(where: str, failure: Failure) -> None:
    if failure is not None:
        raise AssertionError(f"{where}: {failure}")
