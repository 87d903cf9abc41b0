"""Every model type of the installed transformers: exact weights, or an error that names a module.

Types are not listed. The weights that a type returns with `output_attentions=True` under eager
attention must be among the captured weights, the outputs must not change, and no hook may remain.
"""

import contextlib
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import overt

transformers = pytest.importorskip("transformers")

from tests.parity import tiny_types  # noqa: E402

SECONDS = 60  # for one type; a type that is slower is skipped
CLOSE = 1e-4
LEAST = 250  # types that must be captured, so that a builder that fails cannot empty the test

# Types whose returned `attentions` are not the weights that were used.
RETURN_SOMETHING_ELSE = {
    "squeezebert": "returns scores before the softmax",
    "prophetnet": "returns scores before the softmax where n-grams are predicted",
    "wavlm": "returns the mean over heads, repeated for each head",
    "cpmant": "returns the weights without its prompt",
    "t5gemma2": "returns one softmax over two sequences in two parts",
    "longt5": "returns blocks of local attention on a separate axis",
    "hiera": "returns windows on a separate axis, and not those of every layer",
}


class TooSlow(Exception):
    """Raised when the alarm fires."""


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow

    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def run(model: Any, given: dict[str, Any], **more: bool) -> Any:
    """Run a forward pass; some models draw random numbers even in evaluation mode."""
    torch.manual_seed(2)
    return model(**given, **more)


def try_build(kind: str) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """Return a model that runs, and its inputs; None if the type cannot be built this way."""
    for attention in ("sdpa", "eager"):
        try:
            model = tiny_types.build(kind, attention)
            given = tiny_types.inputs(model)
            with torch.no_grad():
                run(model, given)
        except TooSlow:
            raise
        except Exception:  # a shrunk config may raise any error
            continue
        return model, given
    return None


def wrong_weights(kind: str, model: Any, given: dict[str, Any], found: list[torch.Tensor]) -> str:
    """Say how captured weights differ from those that the eager model returns."""
    if kind in RETURN_SOMETHING_ELSE:
        return ""
    try:
        eager = tiny_types.build(kind, "eager")
        eager.load_state_dict(model.state_dict())
        with torch.no_grad():
            wanted = tiny_types.returned_weights(run(eager, given, output_attentions=True))
    except TooSlow:
        raise
    except Exception:  # this type returns no weights, or has no eager attention
        return ""
    for one in wanted:
        like = [other.reshape(one.shape) for other in found if other.numel() == one.numel()]
        nearest = min((float((one - other).abs().max()) for other in like), default=None)
        if nearest is None:
            return f"no captured map has the size of {tuple(one.shape)}"
        if nearest > CLOSE:
            return f"captured weights are off by {nearest:.2g}"
    return ""


def outcome(kind: str) -> tuple[str, str]:
    """Return the result of a type, and its problem."""
    pair = try_build(kind)
    if pair is None:
        return "not built", ""
    model, given = pair
    with torch.no_grad():
        before = run(model, given)
        try:
            with overt.watch(model) as trace:
                after = run(model, given)
            found = [call.weights().float() for call in trace.calls]
        except (ValueError, NotImplementedError) as error:
            names = [name for name, _ in model.named_modules() if name]
            names += [type(one).__name__ for one in model.modules()]
            message = str(error)
            return "rejected", "" if any(
                one in message for one in names
            ) else f"names no module: {message}"
    hooks = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
    if hooks:
        return "captured", f"{hooks} hooks remain"
    pairs = zip(
        *(list(tiny_types.tensors([*one.values()])) for one in (before, after)), strict=True
    )
    if not all(torch.allclose(one, two, atol=1e-5, equal_nan=True) for one, two in pairs):
        return "captured", "outputs differ from those without capture"
    return "captured", wrong_weights(kind, model, given, found)


@pytest.mark.long
def test_every_model_type_is_captured_exactly_or_rejected_by_name() -> None:
    transformers.logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    wrong = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in tiny_types.types():
            try:
                with limit(SECONDS):
                    result, problem = outcome(kind)
            except TooSlow:
                result, problem = "too slow", ""
            counts[result] += 1
            if problem:
                wrong[kind] = problem
    print(dict(counts))
    assert not wrong
    assert counts["captured"] >= LEAST
