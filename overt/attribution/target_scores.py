"""Scores that attributions explain: a class, the contrast of two classes, or any function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

Classes = int | Sequence[int] | Int[Tensor, " b"]  # of all samples, or one per sample
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Contrast:
    """Target that asks why one class and not another: the difference of their scores.

    Args:
        classes: The explained class, of all samples or one per sample.
        others: The class it is compared with.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 0.0]])
        >>> score_target(logits, Contrast(1, 0))
        tensor([2.])
    """

    classes: Classes
    others: Classes


# Classes, a contrast, or a function of the model's output that returns one score per row.
Target = Classes | Contrast | Callable[[Any], Float[Tensor, " b"]]


def score_target(
    output: Any,
    target: Target,
    squash: Callable[..., Tensor] | None = None,
    rows: Int[Tensor, " m"] | None = None,
    samples: int | None = None,
) -> Float[Tensor, " n"]:
    """Compute one score per row of a model's output.

    Args:
        output: The output of the model: logits, an object that has them, or anything that the
            target function takes.
        target: The classes, a contrast, or a function of the output.
        squash: Called as `squash(logits, dim=-1)` before a class is selected.
        rows: The sample of each row; None if the rows are the samples.
        samples: How many samples there are; needed with `rows`.

    Returns:
        The scores.

    Raises:
        ValueError: The output has no logits, a class is out of range, or the function returns
            something else.

    Example:
        >>> score_target(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [0, 1])
        tensor([1., 4.])
    """
    if callable(target):
        scores = target(output)
        if not isinstance(scores, Tensor) or scores.ndim != 1:
            raise ValueError(
                "the target function must return one score per sample, a tensor with one axis"
            )
        return scores
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise ValueError(
            "a class as target needs an output or logits (b, classes); for other outputs use a "
            "function"
        )
    logits = logits if squash is None else squash(logits, dim=-1)
    if isinstance(target, Contrast):
        parts = (_select(logits, one, rows, samples) for one in (target.classes, target.others))
        return next(parts) - next(parts)
    return _select(logits, target, rows, samples)


def classes_per_sample(target: Classes, b: int) -> Int[Tensor, " b"]:
    """Return one class per sample; anything but whole numbers raises `ValueError`."""
    try:
        found = torch.as_tensor([target] * b if isinstance(target, int) else target)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.dtype not in INTEGERS:
        kind = type(target).__name__ if found is None else found.dtype
        raise ValueError(
            f"a target must be a class, one class per sample, a Contrast or a function, got {kind}"
        )
    return found.long()  # `gather` takes no smaller ones, and bytes as an index are a mask


def check_classes(chosen: Int[Tensor, " n"], b: int, classes: int) -> Int[Tensor, " n"]:
    """Check class indices; on a GPU the range is not checked, which would synchronize."""
    if tuple(chosen.shape) != (b,):
        raise ValueError(f"target must have the shape {(b,)}, got {tuple(chosen.shape)}")
    if chosen.device.type == "cpu" and bool(((chosen < 0) | (chosen >= classes)).any()):
        wrong = chosen[(chosen < 0) | (chosen >= classes)].unique().tolist()
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        named = ", ".join(map(str, wrong[:5]))
        raise ValueError(f"target must be classes 0 to {classes - 1}, got {named}{more}")
    return chosen


def _select(
    logits: Float[Tensor, "n c"],
    target: Classes,
    rows: Int[Tensor, " m"] | None,
    samples: int | None,
) -> Float[Tensor, " n"]:
    if rows is not None and len(rows) != len(logits):
        raise ValueError(f"the model returned {len(logits)} scores for {len(rows)} rows")
    b = len(logits) if rows is None or samples is None else samples
    chosen = check_classes(classes_per_sample(target, b), b, logits.shape[1]).to(logits.device)
    if rows is not None:
        chosen = chosen[rows.to(chosen.device)]
    return logits.gather(1, chosen[:, None])[:, 0]
