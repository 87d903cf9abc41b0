"""`overt doctor MODEL`: which attention modules a model has, and how exactly each can be seen.

The model runs for real on a small made-up input, watched as it is. Then it runs again with its own
arithmetic written out (eager), or fused if it was written out before, and the weights of the two
are compared module by module.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput, Failed
from overt.recipes.asking import Asked, Given, ask, keyword_call, run
from overt.recipes.opening import Subject, locate, open_model, quiet

if TYPE_CHECKING:
    from torch import nn

    from overt.capture import Call

HEADER = ["", "module", "kind", "seen by", "heads", "sinks", "softcap", "off eager by", "to do"]
TEXT = "a small red ball lies on the green grass"
# What rounding adds up to over many layers; a mask or a bias gone wrong is off by far more.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Module:
    """One attention module: what it does, how it was seen, and how far that is from eager."""

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
        """A row of the table."""
        off = "" if self.off is None else f"{self.off:.1e}"
        cells = [self.kind, self.route, self.heads, self.sinks, self.softcap, off, self.advice]
        return [str(self.number), self.name, *cells]


@dataclass(frozen=True)
class Checkup:
    """What was found out about a model; `problem` is what is wrong with it, in a sentence."""

    facts: list[list[str]]
    modules: list[Module]
    tolerance: float
    problem: str = ""

    def verdict(self) -> str:
        """Everything in a sentence."""
        ran = [one for one in self.modules if one.route]
        compared = [one.off for one in ran if one.off is not None]
        sentence = f"{len(ran)} of {len(self.modules)} attention modules ran and were seen"
        if compared:
            worst = max(compared, key=lambda off: (math.isnan(off), off))
            sentence += f"; {len(compared)} compared with eager, off by {worst:.1e} at most"
            sentence += f" (up to {self.tolerance:.0e} is rounding)"
        return sentence + "."


def model(name: str, say: Callable[[str], None] = lambda line: None) -> Checkup:
    """Open a model as `overt look` does, and examine it."""
    from overt.models.attaching.attached import Attached

    subject = open_model(locate(name, say), name)
    if isinstance(subject.model, Attached):
        raise BadInput(f"{name} has attached attention, which needs no watching: `overt look` it.")
    return examine(subject)


def examine(subject: Subject) -> Checkup:
    """Run the model on a made-up input, and say of each attention module what was seen."""
    from overt.capture import Unseen, attention_modules

    found = attention_modules(subject.model)
    asked, how = made_up(subject)
    problem, calls = "", {}
    try:
        calls = _calls(subject.model, asked)
    except Unseen as error:
        problem = str(error)
        calls = _one_by_one(subject.model, asked, found)
    others = _otherwise(subject.model, asked) if calls else {}
    names = list(found) + [name for name in calls if name not in found]
    modules = [
        _module(number, name, calls.get(name), others.get(name))
        for number, name in enumerate(names)
    ]
    tolerance = _tolerance(subject.model)
    wrong = _disagreeing(modules, tolerance)
    if wrong and not problem:
        problem = (
            f"{len(wrong)} attention modules differ from eager by more than {tolerance:.0e}, the "
            f"first of them {wrong[0].name} by {wrong[0].off:.1e}."
        )
    return Checkup(_facts(subject, how), modules, tolerance, problem)


def _disagreeing(modules: list[Module], tolerance: float) -> list[Module]:
    """The modules too far from eager; what is not a number is too far from anything."""
    return [one for one in modules if one.off is not None and not one.off <= tolerance]


def _tolerance(model: Any) -> float:
    """How far two ways to compute the same weights may be apart in the model's number format."""
    kind = next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), "float32")
    return TOLERANCES.get(kind.removeprefix("torch."), 1e-4)


# Running


def _calls(model: "nn.Module", asked: Asked) -> dict[str, "Call"]:
    """The first call of each module in one run."""
    import torch

    from overt.capture import watch

    with torch.no_grad(), torch.random.fork_rng(devices=[]), watch(model) as seen:
        torch.manual_seed(0)  # some models draw even when they do not train
        run(type(model).__name__, asked)
    calls: dict[str, Call] = {}
    for call in seen.calls:
        calls.setdefault(call.name, call)
    return calls


def _one_by_one(
    model: "nn.Module", asked: Asked, modules: Mapping[str, "nn.Module"]
) -> dict[str, "Call"]:
    """What each module shows by itself, after they could not all be seen together."""
    import torch

    from overt.capture import Unseen, watch

    calls: dict[str, Call] = {}
    for name in modules:
        try:
            with torch.no_grad(), watch(model, layers=[name]) as seen:
                run(type(model).__name__, asked)
        except Unseen:
            continue
        calls[name] = seen.calls[0]
    return calls


def _otherwise(model: Any, asked: Asked) -> dict[str, "Call"]:
    """The same in the other way: written out (eager), or fused for a model that is written out.

    Empty for a model that has one way only.
    """
    from overt.capture import Unseen

    try:
        with _switched(model) as changed:
            return _calls(model, asked) if changed else {}
    except (Unseen, ValueError, NotImplementedError, Failed):
        return {}


@contextmanager
def _switched(model: Any) -> Iterator[bool]:
    """The model with its other implementation of attention, if it has one, and back again."""
    from overt.capture import interface

    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    fusing = [one for one in model.modules() if isinstance(getattr(one, "fused_attn", None), bool)]
    if before is not None and hasattr(model, "set_attn_implementation"):
        if before == "eager":
            interface.register()
        try:
            with quiet():
                model.set_attn_implementation(interface.NAME if before == "eager" else "eager")
            yield model.config._attn_implementation != before
        finally:
            with quiet():
                model.set_attn_implementation(before)
    else:  # timm's switch
        for module in fusing:
            module.fused_attn = not module.fused_attn
        try:
            yield bool(fusing)
        finally:
            for module in fusing:
                module.fused_attn = not module.fused_attn


def _module(number: int, name: str, call: "Call | None", other: "Call | None") -> Module:
    from overt.capture.call import Projected, Written

    if call is None:
        return Module(number, name, advice="did not run, or was not seen")
    both = [one.source for one in (call, other) if one is not None]
    sinks = any(
        one.sinks is not None if isinstance(one, Projected) else one.dropped > 0 for one in both
    )
    caps = [one.softcap for one in both if isinstance(one, Projected) and one.softcap]
    off, advice = None, ""
    if other is not None and other.shape == call.shape:
        off = float((call.weights() - other.weights()).detach().abs().max())
    elif isinstance(call.source, Written):
        advice = "nothing: the weights are the model's own"
    else:
        advice = "no eager way to compare with"
    return Module(
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


def _facts(subject: Subject, how: str) -> list[list[str]]:
    model, config = subject.model, getattr(subject.model, "config", None)
    size = sum(p.numel() for p in model.parameters())
    kind = next((str(p.dtype) for p in model.parameters() if p.is_floating_point()), "")
    facts = [
        ["model", type(model).__name__],
        ["parameters", f"{size:,} in {kind.removeprefix('torch.')}"],
        ["attention", str(getattr(config, "_attn_implementation", None) or "its own")],
        ["tried on", how],
        ["registers", str(_registers(model, config))],
        ["reads", "text" if subject.tokenizer is not None else "no tokenizer beside it"],
        ["looks at", _pictures(subject)],
    ]
    return facts + [["note", note] for note in subject.notes]


def _pictures(subject: Subject) -> str:
    if subject.image_processor is None and subject.transform is None:
        return "no image processor beside it"
    return type(subject.image_processor or subject.transform).__name__


def _registers(model: Any, config: Any) -> int:
    """How many register tokens stand beside the patches."""
    for part in (config, getattr(config, "vision_config", None)):
        found = getattr(part, "num_register_tokens", None)
        if found is not None:
            return int(found)
    token = getattr(model, "reg_token", None)  # timm
    return 0 if token is None else int(token.shape[1])


# An input


def made_up(subject: Subject) -> tuple[Asked, str]:
    """An input of noise and a few words, made by the model's own processors where it has some."""
    import numpy as np

    photo = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    tried = [Given(TEXT, photo), Given(None, photo), Given(TEXT)]
    for given in tried:
        try:
            asked = ask(subject, given)
        except BadInput:
            continue
        parts = ["a text"] * (given.text is not None) + ["noise"] * (given.photo is not None)
        return asked, " and ".join(parts) + ", through its own processors"
    return _from_config(subject), "random numbers, by its config"


def _from_config(subject: Subject) -> Asked:
    """Random token ids and pixels of the sizes that a config names."""
    import torch

    model, config = subject.model, subject.model.config
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
    if wanted not in inputs or {"vision_config", "image_token_id"} <= set(dir(config)):
        raise BadInput(
            f"{subject.name} has no processor beside it that can be used here, and its config does "
            f"not say how to make up its {wanted}."
        )
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs = {
        name: value.to(model.device, kind) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return Asked(inputs, keyword_call(model), Given())
