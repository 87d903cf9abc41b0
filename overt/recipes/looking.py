"""`overt look`: a model, a picture or a text or both, and a view of where the model looks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput
from overt.recipes.asking import (
    WRITERS,
    Asked,
    Given,
    Piece,
    ask,
    hidden,
    is_picture,
    photo,
    read,
    run,
)
from overt.recipes.attached import view_attached
from overt.recipes.opening import Subject, locate, open_model, quiet
from overt.recipes.own import view_spoken
from overt.recipes.seeing import (
    EXPLAINING,
    MAPS,
    THROUGH,
    Names,
    Wish,
    derived,
    explained,
    groups,
    layouts_for,
    panel_of,
)

if TYPE_CHECKING:
    from overt.show.panel import Choice, Panel

__all__ = [
    "Given",
    "Viewed",
    "Wish",
    "answers",
    "check",
    "locate",
    "look",
    "open_model",
    "photo",
    "place",
    "read",
    "summary",
    "view",
    "write",
]  # the lines of Python that a page shows need no other name
KINDS = (".png", ".svg", ".html", ".htm")


@dataclass(frozen=True, eq=False)
class Viewed:
    """What was seen, ready to be drawn: panels, a choice of each, what a reader should know.

    `answers` are what the model answers, the likeliest first, with probabilities where it has any.
    `origin` says which characters of the text that was given those of the text that is shown stand
    for; None is each for itself.
    """

    title: str
    panels: tuple["Panel", ...]
    choices: tuple["Choice", ...]
    notes: tuple[str, ...] = ()
    answers: tuple[tuple[str, float], ...] = ()
    origin: tuple[Piece, ...] | None = None


def check(out: Path, inputs: Sequence[str], wish: Wish) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    if out.suffix.lower() not in KINDS:
        raise BadInput(f"{out} is no kind of view: its name ends in .png, .svg or .html.")
    if out.is_dir():
        raise BadInput(f"{out} is a folder; name the file of the view.")
    if wish.way not in MAPS:
        raise BadInput(f"there is no map '{wish.way}'; there are {', '.join(MAPS)}.")
    if wish.way in THROUGH and (wish.layer is not None or wish.head is not None):
        raise BadInput(
            f"the map '{wish.way}' goes through all layers and heads; leave out --layer and --head."
        )
    pictures = [word for word in inputs if is_picture(word)]
    if not inputs:
        raise BadInput("there is nothing to look at; name a picture, a text in quotes, or both.")
    if len(pictures) > 1:
        raise BadInput(f"{len(pictures)} pictures were given; a view is of one.")
    if len(inputs) - len(pictures) > 1:
        raise BadInput(
            f"{len(inputs) - len(pictures)} texts were given; put one text into quotes, as in "
            '"a dog on the grass".'
        )


def look(
    name: str,
    inputs: Sequence[str],
    out: Path,
    wish: Wish,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
) -> Viewed:
    """Run the model on the inputs and write the view; what was seen is returned."""
    check(out, inputs, wish)
    folder = locate(name, say)
    given = read(inputs)
    subject = open_model(folder, name)
    subject.model.to(place(device))
    viewed = view(subject, given, wish)
    write(out, viewed)
    return viewed


def place(name: str) -> Any:
    """The device of this name, which has to be here; `auto` is a card if there is one."""
    import torch

    from overt.train.processes import check_device

    if name != "auto":
        check_device(name)
        return torch.device(name)
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def summary(shown: "Panel", choice: "Choice") -> str:
    """What is drawn large of a panel, and where it looks most, in a phrase."""
    from overt.show.look import strongest
    from overt.show.panel import caption, row

    return f"{caption(shown, choice)}; {strongest(shown, row(shown, choice))}"


def write(out: Path | str, viewed: Viewed) -> None:
    """The view as a file of the kind that its name says."""
    from overt import files
    from overt.show import browse
    from overt.show import look as drawing

    out = Path(out)
    if out.suffix.lower() in (".html", ".htm"):
        page = browse.page(viewed.panels, viewed.choices, viewed.title, viewed.notes)
        files.write_text(out, page)
    else:
        drawing.save(out, viewed.panels, viewed.choices)


def view(subject: Subject, given: Given, wish: Wish = Wish()) -> Viewed:  # noqa: B008  # frozen
    """Watch the model on what is given, and make panels of what was seen.

    A part of the model that has no such layer, head or query is left out, unless none has it. What
    is removed of the input is hidden from the features of a network of ours, and covered up for
    any other (`hidden`).
    """
    import torch

    from overt.capture import Unseen, watch
    from overt.models.attaching.attached import Attached
    from overt.recipes.ltpa.looking import own_kinds, view_own

    if subject.spoken is not None:
        panels, choices, told, chances = view_spoken(subject, given, wish)
        said = _sentence(chances, subject.spoken.writes)
        return _viewed(subject, panels, choices, [*told, said], chances)
    given, covered = hidden(subject, given)
    if isinstance(subject.model, Attached):
        return _viewed(subject, *view_attached(subject, given, wish))
    if isinstance(subject.model, own_kinds()):
        return _viewed(subject, *view_own(subject, given, wish))
    with quiet():  # a long text is cut, and we say so ourselves
        asked = ask(subject, given, wish.work)
        layouts, problem = layouts_for(subject, asked)
    try:
        with torch.set_grad_enabled(wish.way in EXPLAINING), watch(subject.model) as seen:
            output = run(subject.name, asked)
    except Unseen as error:
        raise BadInput(f"{subject.name}: {error}") from error
    chances = answers(subject, output, asked)
    notes = [*subject.notes, *covered, *asked.notes, _sentence(chances), _alike(output, asked)]
    if problem:
        notes.append(f"What each position is could not be told: {problem}.")
    target = explained(subject, output) if wish.way in EXPLAINING else None
    source = partial(derived, way=wish.way, model=subject.model, target=target)
    names = Names(subject.tokenizer, asked, layouts, subject.model)
    panels, choices, refused = [], [], []
    for group in groups(seen):
        try:
            shown, choice = panel_of(group, names, given, wish, source)
        except BadInput as error:
            refused.append(error)
            continue
        panels.append(shown)
        choices.append(choice)
    if not panels:
        raise refused[0]
    return replace(_viewed(subject, panels, choices, notes, chances), origin=asked.origin)


def _viewed(
    subject: Subject,
    panels: list["Panel"],
    choices: list["Choice"],
    notes: list[str],
    chances: Sequence[tuple[str, float]] = (),
) -> Viewed:
    title = f"Where {_short(subject.name)} ({type(subject.model).__name__}) looks"
    said = tuple(note for note in notes if note)
    return Viewed(title, tuple(panels), tuple(choices), said, tuple(chances))


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", maxsplit=1)[-1]


def answers(subject: Subject, output: Any, asked: Asked, most: int = 5) -> list[tuple[str, float]]:
    """What the model answers, likeliest first: classes, captions, next words, or what it writes.

    A text that it writes has no probability: that is nan. Of a language model the answers are the
    tokens that may come next, of one that compares pictures with texts the captions that it was
    given. A model without answers gives none, nor does one whose logits are not numbers.
    """
    if asked.captions:
        return sorted(asked.captions, key=lambda one: -one[1])[:most]
    if asked.wrote is not None:
        return [(asked.wrote, math.nan)]
    logits = getattr(output, "logits", None)
    labels = getattr(getattr(subject.model, "config", None), "id2label", None) or {}
    if logits is not None and logits.ndim == 3 and is_language_model(subject):
        logits = logits[:, -1]
        labels = Tokens(subject.tokenizer)
    elif logits is None or logits.ndim != 2 or logits.shape[1] != len(labels):
        return []
    chances = logits[0].detach().float().softmax(dim=-1)
    if bool(chances.isnan().any()):
        return []
    best = chances.topk(min(most, len(chances)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(str(labels.get(at, at)), chance) for at, chance in pairs]


def is_language_model(subject: Subject) -> bool:
    """Whether what comes after the last word is what a model answers."""
    return subject.tokenizer is not None and type(subject.model).__name__.endswith(WRITERS)


class Tokens:
    """The tokens of a tokenizer as names of classes: each in quotes, as it would be written."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def get(self, at: int, default: Any = None) -> str:
        """The token of a number."""
        return f"next: “{self.tokenizer.decode([at]).strip()}”"


def _alike(output: Any, asked: Asked) -> str:
    """How alike a picture and its only caption are, where a model compares them; else nothing."""
    picture, text = (getattr(output, name, None) for name in ("image_embeds", "text_embeds"))
    if asked.captions or picture is None or text is None or picture.shape != text.shape:
        return ""
    cosine = float((picture.detach() * text.detach()).sum() / (picture.norm() * text.norm()))
    return (
        f"Picture and text are alike by {cosine:.2f} (the cosine of what stands for each). Write "
        "several captions, a line each, and it says which fits best."
    )


def _sentence(chances: Sequence[tuple[str, float]], writes: bool = False) -> str:
    """The first answer as a sentence; nothing where there is none."""
    if not chances:
        return ""
    name, chance = chances[0]
    if writes or math.isnan(chance):
        return f"It writes: {name}" if name.strip() else "It writes nothing that can be read."
    return f"It answers {name} ({chance:.0%})."
