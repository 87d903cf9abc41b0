"""Compare a model's attention implementations: outputs, generated tokens and attention maps.

A Hugging Face model computes the same attention by several implementations (eager, sdpa,
flash-attention), and may be compiled. They round differently, and a faulty one changes answers.
Here the model runs under each of them on the same input, and is compared with the model as loaded.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overt.inspect.implementation_switch import (
    Compiler,
    Forward,
    Task,
    Variant,
    copy_to_dtype,
    describe_error,
    is_switchable,
    name_as_loaded,
    reason_not_to_run,
    restore_hooks,
)
from overt.inspect.output_difference import (
    ModelAnswers,
    answer,
    output_difference,
    token_difference,
)
from overt.inspect.weight_difference import MapDifference, compare_maps

if TYPE_CHECKING:
    import torch
    from torch import nn

HEADER = ["implementation", "type", "compared with", "output off by", "on average"]
HEADER += ["same argmax", "generated", "maps off by", "off returned by", "remark"]
IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2")
# Accumulated rounding over many layers; a wrong mask or bias differs by far more.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_SECOND_RUN = "a second run"


@dataclass(frozen=True)
class ImplementationDifference:
    """Difference of one attention implementation from a reference, on the same input.

    Attributes:
        implementation: Name of the implementation, such as "eager" or "compiled".
        dtype: Floating-point type in which it ran.
        reference: What it is compared with: the implementation as loaded, in the same type; for
            that implementation itself a second run, or in another type the model as loaded.
        reason: Why it cannot run here; empty if it ran.
        output: Name of the compared output.
        output_max: Largest absolute difference of the output.
        output_mean: Mean absolute difference of the output.
        output_scale: Largest absolute value of the output of the reference.
        same_argmax: Share of positions with the same largest logit, all given the same tokens; None
            if the output is not logits.
        tokens: Number of generated tokens that were compared; None if none were.
        first_token: The first generated token that differs, from 0; None if all are equal.
        maps: Number of attention calls that were compared.
        map_max: Largest absolute difference of the attention weights.
        map_module: Module with the largest difference.
        returned_max: Largest difference of the captured weights from those that the model itself
            returns with `output_attentions=True`; None unless it returns them.
        notes: Why parts of the comparison are missing.

    Example:
        >>> found = ImplementationDifference("eager", "float32", "sdpa", maps=2, map_max=3e-7)
        >>> found.verdict()
        'Under eager and sdpa in float32, maps differ by at most 3e-07.'
    """

    implementation: str
    dtype: str
    reference: str = ""
    reason: str = ""
    output: str = ""
    output_max: float | None = None
    output_mean: float | None = None
    output_scale: float | None = None
    same_argmax: float | None = None
    tokens: int | None = None
    first_token: int | None = None
    maps: int = 0
    map_max: float | None = None
    map_module: str = ""
    returned_max: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def tolerance(self) -> float:
        """Largest difference of weights, and of outputs relative to their size, by rounding."""
        return TOLERANCES.get(self.dtype, 1e-4)

    def problems(self) -> list[str]:
        """Return what differs by more than rounding; NaN does.

        Between two types rounding has no known bound, so only NaN is a problem there.
        """
        tolerance = math.inf if " in " in self.reference else self.tolerance
        scaled = None
        if self.output_max is not None:
            # The size of outputs varies between models; small ones have rounding errors as well.
            scaled = self.output_max / max(1.0, self.output_scale or 0.0)
        compared = {
            f"maps of {self.map_module or 'the model'}": self.map_max,
            "returned weights": self.returned_max,
            self.output: scaled,
        }
        return [name for name, one in compared.items() if one is not None and not one <= tolerance]

    def verdict(self) -> str:
        """Return the difference as a sentence."""
        if self.reason:
            return f"{self.implementation} in {self.dtype} cannot run here: {self.reason}."
        parts = [
            f"{name} are equal" if off == 0 else f"{name} differ by at most {off:.0e}"
            for name, off in (("maps", self.map_max), (self.output, self.output_max))
            if off is not None
        ]
        if self.tokens is not None:
            parts.append(f"generated tokens {self._tokens()}")
        *before, last = parts or ["nothing was compared"]
        sentence = f"{', '.join(before)} and {last}" if before else last
        wrong = " and ".join(self.problems())
        return f"{self._pair()}, {sentence}{'; more than rounding: ' if wrong else ''}{wrong}."

    def line(self) -> list[str]:
        """Return the row of the table, with one cell per name in `HEADER`."""
        numbers = (self.output_max, self.output_mean, self.map_max, self.returned_max)
        off, mean, maps, returned = ("" if one is None else f"{one:.1e}" for one in numbers)
        same = "" if self.same_argmax is None else f"{100 * self.same_argmax:.4g} %"
        tokens = "" if self.tokens is None else self._tokens().removeprefix("are ")
        remark = f"cannot run here: {self.reason}" if self.reason else "; ".join(self.notes)
        cells = [self.reference, off, mean, same, tokens, maps, returned, remark]
        return [self.implementation, self.dtype, *cells]

    def _tokens(self) -> str:
        if self.first_token is None:
            return "are equal"
        return f"differ from token {self.first_token + 1} of {self.tokens} on"

    def _pair(self) -> str:
        if self.reference == _SECOND_RUN:
            return f"In two runs of {self.implementation} in {self.dtype}"
        other = self.reference
        if " in " in other:  # another type
            return f"Under {self.implementation} in {self.dtype} and {other}"
        return f"Under {self.implementation} and {other} in {self.dtype}"


def compare_implementations(
    model: "nn.Module",
    inputs: Mapping[str, Any],
    implementations: Sequence[str] = IMPLEMENTATIONS,
    dtypes: Sequence["torch.dtype"] = (),
    compiler: Compiler | None = None,
    forward: Forward | None = None,
    new_tokens: int = 16,
) -> tuple[ImplementationDifference, ...]:
    """Run a model under each attention implementation and compare with the model as loaded.

    Outputs are compared on the same tokens, and tokens that the model generates greedily, if it
    has `generate`. Maps are captured by `watch` and compared in blocks of rows: of the reference,
    only queries and keys are kept, or eager maps of as many layers as fit into 256 MiB; of the
    other, one layer. Padding is left out. The model is left as it was: implementation, mode,
    hooks, gradients and random numbers.

    `watch` runs flash-attention by SDPA, so maps under it show its inputs and not its kernel.

    Args:
        model: A Hugging Face model, a timm model (switched by `fused_attn`), or any other, which
            has its own implementation only.
        inputs: Arguments of the model by name.
        implementations: Names of implementations; also registered ones.
        dtypes: More floating-point types, in which a copy of the model runs. Buffers that are not
            saved, such as rotary frequencies, keep their type, as after `from_pretrained`.
        compiler: Compiles the model as it is loaded, such as `torch.compile`, which is slow.
        forward: Calls the model as `forward(model, inputs)`; `model(**inputs)` by default.
        new_tokens: Number of tokens to generate; 0 for none.

    Returns:
        One difference per implementation and type, with the reason for those that cannot run.

    Raises:
        ValueError: If there is no such implementation, or an argument is out of range.
        RunError: If the model as loaded fails on this input.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
        >>> config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
        >>> model = GPT2LMHeadModel(config).eval()
        >>> inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
        >>> (found,) = compare_implementations(model, inputs, ["eager"], new_tokens=4)
        >>> found.map_max < 1e-6, found.same_argmax, found.first_token
        (True, 1.0, None)
    """
    import torch

    from overt.capture.eval_mode import eval_mode

    _check_arguments(model, inputs, implementations, dtypes, new_tokens)
    task = Task(inputs, forward or _call_by_keywords, new_tokens)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    # `torch.manual_seed` sets the state of every GPU.
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        undo.enter_context(torch.random.fork_rng(devices=list(gpus)))
        undo.enter_context(restore_hooks(model))
        undo.enter_context(eval_mode(model))
        loaded = Variant(model, name_as_loaded(model))
        names = dict.fromkeys(implementations)
        found = _compare_in_one_dtype(loaded, names, compiler, task)
        for dtype in dict.fromkeys(dtypes):
            if str(dtype) != f"torch.{loaded.dtype}":
                found += _compare_in_other_dtype(loaded, dtype, names, compiler, task)
    return tuple(found)


def _call_by_keywords(model: "nn.Module", inputs: Mapping[str, Any]) -> Any:
    return model(**inputs)


def _check_arguments(
    model: Any, inputs: Any, implementations: Any, dtypes: Any, new_tokens: int
) -> None:
    import torch
    from torch import nn

    from overt.capture import hf_interface

    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs must be the arguments of the model by name, got {type(inputs).__name__}: "
            'use {"input_ids": tokens}'
        )
    if isinstance(implementations, str):
        raise TypeError(f"implementations must be a list: use [{implementations!r}]")
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtypes must be floating-point types of torch, got {dtype!r}")
    if new_tokens < 0:
        raise ValueError(f"new_tokens must be 0 or more, got {new_tokens}")
    for name in implementations:
        if "/" in str(name):
            raise ValueError(f"{name!r} is code on the Hub, which is not loaded: use a local name")
        known = name in IMPLEMENTATIONS
        if not known and not (is_switchable(model) and hf_interface.registered(name)):
            raise ValueError(
                f"unknown attention implementation {name!r}: use {', '.join(IMPLEMENTATIONS)}, or "
                "register it with transformers.AttentionInterface"
            )


def _compare_in_one_dtype(
    loaded: Variant, names: Mapping[str, None], compiler: Compiler | None, task: Task
) -> list[ImplementationDifference]:
    """Compare implementations with the model as loaded."""
    others = [Variant(loaded.model, name, switch=name != loaded.name) for name in names]
    if compiler is not None:
        others.append(Variant(loaded.model, "compiled", compiler=compiler))
    return _compare(loaded, others, task)


def _compare_in_other_dtype(
    loaded: Variant,
    dtype: "torch.dtype",
    names: Mapping[str, None],
    compiler: Compiler | None,
    task: Task,
) -> list[ImplementationDifference]:
    """Compare a copy in another type with the model as loaded, and its implementations with it."""
    others = [name for name in names if name != loaded.name]
    try:
        there = task.to(dtype)
        again = Variant(copy_to_dtype(loaded.model, dtype), loaded.name, task=there)
        (first,) = _compare(loaded, [again], task)
        if first.reason:
            return [first]
        rest = _compare_in_one_dtype(again, dict.fromkeys(others), compiler, there)
    except Exception as error:  # quantized weights, no memory, kernels that lack this type
        short, reason = str(dtype).removeprefix("torch."), describe_error(error)
        return [ImplementationDifference(name, short, reason=reason) for name in names]
    return [first, *rest]


def _compare(
    reference: Variant, others: Sequence[Variant], task: Task
) -> list[ImplementationDifference]:
    """Compare variants with a reference, each on its own inputs."""
    expected = answer(reference, task)
    found = [_compare_answers(reference, expected, other, task) for other in others]
    del expected
    ran = [other for other, one in zip(others, found, strict=True) if not one.reason]
    compared = iter(compare_maps(reference, ran, task))
    return [one if one.reason else _with_maps(one, next(compared)) for one in found]


def _compare_answers(
    reference: Variant, expected: ModelAnswers, other: Variant, task: Task
) -> ImplementationDifference:
    against = reference.name
    if other.dtype != reference.dtype:
        against += f" in {reference.dtype}"
    elif other.name == reference.name:
        against = _SECOND_RUN
    found = ImplementationDifference(other.name, other.dtype, against)
    if reason := reason_not_to_run(other):
        return replace(found, reference="", reason=reason)
    try:
        given = answer(other, other.task or task)
    except Exception as error:
        return replace(found, reference="", reason=describe_error(error))
    notes = tuple(dict.fromkeys([*expected.notes, *given.notes]))
    found = replace(found, notes=notes, output=expected.name)
    if expected.output.shape != given.output.shape:
        sizes = f"{tuple(given.output.shape)} and {tuple(expected.output.shape)}"
        return replace(found, output_max=math.nan, notes=(*notes, f"output sizes are {sizes}"))
    found = replace(found, **output_difference(expected, given))
    if expected.tokens is None or given.tokens is None:
        return found
    count, first = token_difference(expected.tokens, given.tokens)
    return replace(found, tokens=count, first_token=first)


def _with_maps(found: ImplementationDifference, maps: MapDifference) -> ImplementationDifference:
    return replace(
        found,
        maps=maps.maps,
        map_max=maps.largest,
        map_module=maps.module,
        returned_max=maps.returned,
        notes=(*found.notes, *dict.fromkeys(maps.notes)),
    )
