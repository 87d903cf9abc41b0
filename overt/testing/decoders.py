"""The contract of a decoder: steps that leave their state as it was, in any order."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.models.output import Output
from overt.testing.models import (
    Case,
    Complaint,
    differs,
    maps_keep_their_promise,
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
    """Raise an AssertionError that names the promise a decoder breaks when it is fed `tokens`.

    Each step gives an `Output` that keeps its promises; a step leaves its state as it was, so that
    it can be taken again; a reordered state goes on as its samples would, also when one sample is
    named twice; and no sample depends on another.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = make_model().eval()
        whole = _decode(model, batch, tokens)
        for number, (state, output) in enumerate(whole):
            case = Case(make_model, model, batch, None, output, (), tolerance)
            for check in (output_is_an_output, prediction_is_finite, maps_keep_their_promise):
                _complain(f"step {number}, {check.__name__}", check(case))
            again, _ = model.step(state, tokens[:, number])  # type: ignore[operator]
            _complain(f"step {number} taken again", differs(again, output, 0.0))
            rows = torch.tensor([*reversed(range(len(batch))), 0])
            turned = state.reorder(rows)
            found, _ = model.step(turned, tokens[rows, number])  # type: ignore[operator]
            expected = select(output, rows)
            _complain(f"step {number} reordered", differs(found, expected, tolerance))
        alone = _decode(model, batch.select(torch.tensor([0])), tokens[:1])
        for number, ((_, output), (_, single)) in enumerate(zip(whole, alone, strict=True)):
            first = select(output, torch.tensor([0]))
            _complain(f"step {number} of a sample alone", differs(single, first, tolerance))


def _decode(model: Any, batch: Batch, tokens: Tensor) -> list[tuple[Any, Output]]:
    """Every state, and what was written from it."""
    state, steps = model.start(model.encode(batch)), []
    for token in tokens.unbind(dim=1):
        output, after = model.step(state, token)
        steps.append((state, output))
        state = after
    return steps


def _complain(where: str, complaint: Complaint) -> None:
    if complaint is not None:
        raise AssertionError(f"{where}: {complaint}")
