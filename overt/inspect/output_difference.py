"""Compare the outputs of a model, and the tokens that it generates, under two implementations."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overt.errors import RunError
from overt.inspect.implementation_switch import Compiler, Task, Variant, describe_error, run_task
from overt.inspect.load_model import quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 22  # numbers that are compared at a time


@dataclass(frozen=True, eq=False)
class ModelAnswers:
    """The main output of a model, and the tokens that it generates."""

    name: str
    output: "Tensor"
    tokens: "Tensor | None"
    notes: tuple[str, ...]


def answer(variant: Variant, task: Task) -> ModelAnswers:
    """Run a variant once, and generate tokens with it."""
    name = type(variant.model).__name__
    with variant.in_use() as model:
        output_name, output = _main_output(name, run_task(name, model, task))
        output = _without_padding(variant.model, output, task.inputs)
    if not _can_generate(variant.model) or not task.new_tokens:
        return ModelAnswers(output_name, output, None, ())
    try:
        tokens, notes = _generate(variant, task), ()
    except Exception as error:
        return ModelAnswers(
            output_name, output, None, (f"no tokens generated: {describe_error(error)}",)
        )
    return ModelAnswers(output_name, output, tokens, notes)


def _main_output(name: str, output: Any) -> tuple[str, "Tensor"]:
    """Return the logits, else the last hidden state, else the first tensor of numbers."""
    import torch

    if isinstance(output, torch.Tensor):
        return "outputs", output
    if isinstance(output, (tuple, list)):
        output = dict(enumerate(output))
    named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    tensors = {
        str(key): one
        for key, one in named.items()
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.ndim
    }
    for key in ("logits", "last_hidden_state", *tensors):
        if key in tensors:
            return {"last_hidden_state": "last hidden states"}.get(key, key), tensors[key]
    raise RunError(f"{name} returns no tensor of floating-point numbers to compare.")


def _without_padding(model: Any, output: "Tensor", inputs: Mapping[str, Any]) -> "Tensor":
    """Select the positions that are not padding, at which implementations may differ freely."""
    import torch

    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    mask = inputs.get("decoder_attention_mask" if decodes else "attention_mask")
    if isinstance(mask, torch.Tensor) and output.ndim == 3 and mask.shape == output.shape[:2]:
        return output[mask.to(output.device).bool()]
    return output


def output_difference(expected: ModelAnswers, given: ModelAnswers) -> dict[str, Any]:
    """Compare outputs in blocks of rows."""
    import torch

    width = expected.output.shape[-1]
    first = expected.output.reshape(-1, width)
    second = given.output.reshape(-1, width).to(first.device)
    largest, scale, total, same = [0.0], [0.0], 0.0, 0
    for at in row_blocks(first.shape[0], width):
        one, other = (
            x[at].to(torch.promote_types(x.dtype, torch.float32)) for x in (first, second)
        )
        off = torch.where(one == other, 0, (one - other).abs())  # infinite logits may be equal
        largest.append(float(off.max()))
        scale.append(float(one[one.isfinite()].abs().max()) if one.isfinite().any() else 0.0)
        total += float(off.sum(dtype=torch.float64))
        same += int((one.argmax(-1) == other.argmax(-1)).sum())
    is_logits = "logits" in expected.name and width > 1
    return {
        "output_max": worst(largest),
        "output_mean": total / max(1, first.numel()),
        "output_scale": max(scale),
        "same_argmax": same / max(1, first.shape[0]) if is_logits else None,
    }


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of rows of which one has at most `BLOCK` numbers."""
    step = max(1, BLOCK // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def worst(values: Sequence[float]) -> float:
    """Return the largest difference, NaN if there is one."""
    return max(values, key=badness)


def badness(off: float) -> tuple[bool, float]:
    """Return a key that orders differences; NaN, which `max` does not find, is the largest."""
    return math.isnan(off), off


def _can_generate(model: Any) -> bool:
    can = getattr(model, "can_generate", None)
    return bool(callable(can) and can())


def _generate(variant: Variant, task: Task) -> "Tensor":
    """Generate tokens greedily; return only the new ones."""
    import torch

    model: Any = variant.model
    left_out = ("labels", "use_cache", "return_dict", "output_attentions", "output_hidden_states")
    given = {
        name: one
        for name, one in task.inputs.items()
        if not name.startswith("decoder_") and name not in left_out
    }
    prompt, decodes = given.get("input_ids"), model.config.is_encoder_decoder
    count = task.new_tokens
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(prompt, torch.Tensor) and isinstance(limit, int) and not decodes:
        count = min(count, limit - prompt.shape[1])
        if count < 1:
            raise ValueError(f"the input fills all {limit} positions of the model")
    torch.manual_seed(0)
    with variant.in_use(), _compiled_forward(model, variant.compiler), quiet_transformers():
        written = model.generate(**given, max_new_tokens=count, do_sample=False, num_beams=1)
    tokens: Tensor = written if isinstance(written, torch.Tensor) else written.sequences
    if isinstance(prompt, torch.Tensor) and not decodes:
        start = prompt.shape[1]
        repeated = tokens.shape[1] >= start and torch.equal(tokens[:, :start], prompt)
        return tokens[:, start:] if repeated else tokens
    return tokens[:, 1:] if decodes else tokens  # without the start token


@contextmanager
def _compiled_forward(model: Any, compiler: Compiler | None) -> Iterator[None]:
    """Compile the forward that `generate` calls, for the block."""
    if compiler is None:
        yield
        return
    own = vars(model).get("forward")
    model.forward = compiler(model.forward)
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def token_difference(expected: "Tensor", given: "Tensor") -> tuple[int, int | None]:
    """Return the number of tokens, and the first that differs in any sample, None if none does."""
    count = max(expected.shape[1], given.shape[1])
    both = min(expected.shape[1], given.shape[1])
    given = given.to(expected.device)
    differs = (expected[:, :both] != given[:, :both]).any(dim=0).nonzero()
    if len(differs):
        return count, int(differs[0])
    return count, None if count == both else both  # one of them has ended before
