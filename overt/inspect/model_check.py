"""`overt doctor MODEL`: list the attention modules of a model and how exactly each is captured.

The model runs on a small synthetic input under `watch`, then again with its other attention
implementation (eager instead of fused, or fused instead of eager), and the weights are compared per
module.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overt.errors import RunError, UserError
from overt.inspect.implementation_check import (
    TOLERANCES,
    ImplementationDifference,
    compare_implementations,
)
from overt.inspect.implementation_switch import Forward, is_switchable, use_implementation
from overt.inspect.inputs import ModelInput, PreparedCall, keyword_call, prepare_call, run_model
from overt.inspect.load_model import load_model, locate_model
from overt.inspect.loaded_model import LoadedModel

if TYPE_CHECKING:
    from torch import nn

    from overt.capture import Call

HEADER = ["", "module", "kind", "captured via", "heads", "sinks", "softcap", "error", "advice"]
TEXT = "a small red ball lies on the green grass"


@dataclass(frozen=True)
class ModuleReport:
    """One attention module: type, capture route, and difference from eager."""

    number: int
    name: str
    kind: str = ""
    route: str = ""
    heads: str = ""
    sinks: str = ""
    softcap: str = ""
    off: float | None = None
    advice: str = ""

    def line(self) -> list[str]:
        """Return the row of the table."""
        off = "" if self.off is None else f"{self.off:.1e}"
        cells = [self.kind, self.route, self.heads, self.sinks, self.softcap, off, self.advice]
        return [str(self.number), self.name, *cells]


@dataclass(frozen=True)
class ModelReport:
    """Report on a model; `problem` describes what is wrong.

    `unweighted` are the modules that mix positions without attention weights, and `differences`
    compares the attention implementations, if that was requested.
    """

    facts: list[list[str]]
    modules: list[ModuleReport]
    tolerance: float
    problem: str = ""
    unweighted: tuple[str, ...] = ()
    differences: tuple[ImplementationDifference, ...] = ()

    def verdict(self) -> str:
        """Return the report as a sentence."""
        ran = [one for one in self.modules if one.route]
        attending = len(self.modules) - len(self.unweighted)
        compared = [one.off for one in ran if one.off is not None]
        sentence = f"{len(ran)} of {attending} attention modules ran and were captured"
        if compared:
            # `max` does not find NaN, which is worse than any number.
            worst = max(compared, key=lambda off: (math.isnan(off), off))
            sentence += f"; {len(compared)} compared with eager, largest error {worst:.1e}"
            sentence += f" (up to {self.tolerance:.0e} is rounding)"
        if self.unweighted:
            count = f"{len(self.unweighted)} module{'s' * (len(self.unweighted) > 1)}"
            sentence += f"; {count} without attention weights"
        return sentence + "."


@dataclass(frozen=True)
class ComparisonOptions:
    """How to compare attention implementations: in which types, and whether compiled as well."""

    dtypes: tuple[str, ...] = ()
    compiled: bool = False

    def __post_init__(self) -> None:
        wrong = [one for one in self.dtypes if one not in TOLERANCES]
        if wrong:
            raise UserError(
                f"unknown floating-point type {wrong[0]!r}: use {', '.join(TOLERANCES)}."
            )


def check_model(
    name: str,
    say: Callable[[str], None] = lambda line: None,
    device: str = "cpu",
    comparison: ComparisonOptions | None = None,
) -> ModelReport:
    """Load a model as `overt look` does, examine it, and compare its implementations if asked."""
    from overt.inspect.look import select_device
    from overt.nn.backbone_attention.attached_model import AttachedAttention

    chosen = select_device(device)
    loaded = load_model(locate_model(name, say), name)
    if isinstance(loaded.model, AttachedAttention):
        raise UserError(f"{name} has attached attention, which needs no capture: use `overt look`.")
    loaded.model.to(chosen)
    found = examine(loaded)
    if comparison is None:
        return found
    if comparison.compiled:
        say("compiling the model, which can take minutes ...")
    return _with_differences(found, loaded, comparison)


def _with_differences(
    found: ModelReport, loaded: LoadedModel, options: ComparisonOptions
) -> ModelReport:
    """Add the comparison of implementations to a report."""
    import torch

    differences = compare_implementations(
        loaded.model,
        make_test_input(loaded)[0].inputs,
        dtypes=[getattr(torch, name) for name in options.dtypes],
        compiler=torch.compile if options.compiled else None,
        forward=_forward(loaded),
    )
    wrong = [one.verdict() for one in differences if one.problems()]
    return replace(found, differences=differences, problem=found.problem or " ".join(wrong))


def _forward(loaded: LoadedModel) -> Forward:
    """Return a function that calls the model, or a copy of it, with the inputs that it takes."""
    if loaded.transform is not None:  # timm
        return lambda model, inputs: model(inputs["pixel_values"])
    takes = inspect.signature(loaded.model.forward).parameters
    free = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    return lambda model, inputs: model(
        **{name: one for name, one in inputs.items() if free or name in takes}
    )


def examine(loaded: LoadedModel) -> ModelReport:
    """Run the model on a synthetic input and report on each attention module."""
    from overt.capture import UncapturedAttentionError, attention_modules
    from overt.capture.discovery import modules_without_weights

    unweighted = modules_without_weights(loaded.model)
    listed = attention_modules(loaded.model)
    found = {name: one for name, one in listed.items() if name not in unweighted}
    prepared, how = make_test_input(loaded)
    problem, calls = "", {}
    try:
        calls = _calls(loaded.model, prepared)
    except (UncapturedAttentionError, RunError) as error:
        if isinstance(error, RunError) and not isinstance(error.__cause__, NotImplementedError):
            raise
        problem = str(error)
        calls = _calls_one_by_one(loaded.model, prepared, found)
    others = _other_calls(loaded.model, prepared) if calls else {}
    names = list(found) + [name for name in calls if name not in found]
    if unweighted:  # between the modules that attend
        together = {*names, *unweighted}
        names = [name for name, _ in loaded.model.named_modules() if name in together]
    modules = [
        _unweighted_report(number, name, unweighted[name])
        if name in unweighted
        else _module_report(number, name, calls.get(name), others.get(name))
        for number, name in enumerate(names)
    ]
    tolerance = _tolerance(loaded.model)
    wrong = _inexact_modules(modules, tolerance)
    if wrong and not problem:
        problem = (
            f"{len(wrong)} attention modules differ from eager by more than {tolerance:.0e}, the "
            f"first of them {wrong[0].name} by {wrong[0].off:.1e}."
        )
    return ModelReport(_facts(loaded, how), modules, tolerance, problem, tuple(unweighted))


def _inexact_modules(modules: list[ModuleReport], tolerance: float) -> list[ModuleReport]:
    """Return the modules whose difference is above the tolerance or NaN."""
    # NaN is not below the tolerance either.
    return [one for one in modules if one.off is not None and not one.off <= tolerance]


def _tolerance(model: Any) -> float:
    """Return the tolerance of the model's floating-point type."""
    kind = next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), "float32")
    return TOLERANCES.get(kind.removeprefix("torch."), 1e-4)


# Running


def _calls(model: "nn.Module", prepared: PreparedCall) -> dict[str, "Call"]:
    """Return the first call of each module in one run."""
    import torch

    from overt.capture import watch
    from overt.capture.discovery import recurrent_modules

    without = list(recurrent_modules(model))
    if len(without) == 1 and not without[0]:  # the model itself is one
        without = []
    watcher = watch(model, without=without)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), watcher as trace:
        torch.manual_seed(0)  # some models use random numbers in eval mode
        run_model(type(model).__name__, prepared)
    calls: dict[str, Call] = {}
    for call in trace.calls:
        calls.setdefault(call.name, call)
    return calls


def _calls_one_by_one(
    model: "nn.Module", prepared: PreparedCall, modules: Mapping[str, "nn.Module"]
) -> dict[str, "Call"]:
    """Capture each module alone, after capturing all together failed."""
    import torch

    from overt.capture import UncapturedAttentionError, watch

    calls: dict[str, Call] = {}
    for name in modules:
        try:
            with torch.no_grad(), watch(model, layers=[name]) as trace:
                run_model(type(model).__name__, prepared)
        except (UncapturedAttentionError, RunError):
            continue
        calls[name] = trace.calls[0]
    return calls


def _other_calls(model: Any, prepared: PreparedCall) -> dict[str, "Call"]:
    """Run with the other attention implementation; empty if the model has only one."""
    from overt.capture import UncapturedAttentionError, hf_interface

    if is_switchable(model):
        is_eager = model.config._attn_implementation == "eager"
        if is_eager:
            hf_interface.register_interface()
        other = hf_interface.NAME if is_eager else "eager"
    else:  # timm
        fused = any(getattr(one, "fused_attn", None) is True for one in model.modules())
        other = "eager" if fused else "sdpa"
    try:
        with use_implementation(model, other):
            return _calls(model, prepared)
    except (UncapturedAttentionError, ValueError, NotImplementedError, ImportError, RunError):
        return {}


def _unweighted_report(number: int, name: str, module: "nn.Module") -> ModuleReport:
    from overt.capture.discovery import is_recurrent

    if is_recurrent(module):
        advice = f"nothing: no attention weights, watch(model, without=[{name!r}])"
        return ModuleReport(number, name, "recurrence", advice=advice)
    return ModuleReport(number, name, "convolution", advice="nothing: no attention weights")


def _module_report(
    number: int, name: str, call: "Call | None", other: "Call | None"
) -> ModuleReport:
    from overt.capture.call import MaterializedCall, QKCall

    if call is None:
        return ModuleReport(number, name, advice="did not run or was not captured")
    both = [one.source for one in (call, other) if one is not None]
    sinks = any(
        one.sinks is not None if isinstance(one, QKCall) else one.dropped > 0 for one in both
    )
    caps = [one.softcap for one in both if isinstance(one, QKCall) and one.softcap]
    off, advice = None, ""
    if other is not None and other.shape == call.shape:
        off = float((call.weights() - other.weights()).detach().abs().max())
    elif isinstance(call.source, MaterializedCall):
        advice = "none: the model computes the weights itself"
    else:
        advice = "no eager implementation to compare with"
    return ModuleReport(
        number,
        name,
        "cross" if call.cross else "causal" if call.causal else "self",
        call.route.value,
        str(call.shape[1]),
        "learned" if sinks else "",
        f"{caps[0]:g}" if caps else "",
        off,
        advice,
    )


def _facts(loaded: LoadedModel, how: str) -> list[list[str]]:
    model, config = loaded.model, getattr(loaded.model, "config", None)
    size = sum(p.numel() for p in model.parameters())
    kind = next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), "")
    facts = [
        ["model", type(model).__name__],
        ["parameters", f"{size:,} in {kind.removeprefix('torch.')}"],
        ["attention", str(getattr(config, "_attn_implementation", None) or "of the model's code")],
        ["test input", how],
        ["registers", str(_registers(model, config))],
        ["tokenizer", "none" if loaded.tokenizer is None else type(loaded.tokenizer).__name__],
        ["image processor", _image_processor(loaded)],
    ]
    return facts + [["note", note] for note in loaded.notes]


def _image_processor(loaded: LoadedModel) -> str:
    if loaded.image_processor is None and loaded.transform is None:
        return "none"
    return type(loaded.image_processor or loaded.transform).__name__


def _registers(model: Any, config: Any) -> int:
    """Return the number of register tokens."""
    for part in (config, getattr(config, "vision_config", None)):
        found = getattr(part, "num_register_tokens", None)
        if found is not None:
            return int(found)
    token = getattr(model, "reg_token", None)  # timm
    return 0 if token is None else int(token.shape[1])


# Input


def make_test_input(loaded: LoadedModel) -> tuple[PreparedCall, str]:
    """Return an input of noise and a few words, by the model's own processors if it has any."""
    import numpy as np

    photo = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    tried = [ModelInput(TEXT, photo), ModelInput(None, photo), ModelInput(TEXT)]
    for model_input in tried:
        try:
            prepared = prepare_call(loaded, model_input)
        except UserError:
            continue
        parts = ["a text"] * (model_input.text is not None) + ["noise"] * (
            model_input.photo is not None
        )
        return prepared, " and ".join(parts) + ", through its own processors"
    return _input_from_config(loaded), "random numbers, by config"


def _input_from_config(loaded: LoadedModel) -> PreparedCall:
    """Return random token ids and pixels of the sizes in the config."""
    import torch

    model, config = loaded.model, loaded.model.config
    draw = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    words = getattr(config, "text_config", config)
    sight = getattr(config, "vision_config", config)
    size = getattr(sight, "image_size", None)
    if getattr(words, "vocab_size", None):
        inputs["input_ids"] = torch.randint(0, words.vocab_size, (1, 12), generator=draw)
    if size:
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        channels = getattr(sight, "num_channels", 3)
        inputs["pixel_values"] = torch.randn(1, channels, height, width, generator=draw)
    if getattr(config, "is_encoder_decoder", False) and "input_ids" in inputs:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :5]
    wanted = getattr(model, "main_input_name", "input_ids")
    # A model with image tokens needs them in the text, where random ids do not have them.
    if wanted not in inputs or {"vision_config", "image_token_id"} <= set(dir(config)):
        raise UserError(
            f"{loaded.name} has no usable processor, and its config does not define the size of "
            f"{wanted}."
        )
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs = {
        name: value.to(model.device, kind) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return PreparedCall(inputs, keyword_call(model), ModelInput())
