"""Asking a network of ours anything: a picture, a text or both, with parts of them removed.

Three maps can be had of its answer: its own attention (`raw`), how much the answer hangs on each
cell and word (`gradient`), and its own attention on the masked input on which it is surest of that
answer (`search`). Networks over boxes (`pointing`) and captioners (`telling`) have their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import files
from overt.errors import BadInput
from overt.recipes import pointing, spoken, telling
from overt.recipes.asking import Asked, Given, run
from overt.recipes.feeding import PAIRED, batch_of
from overt.recipes.opening import Subject
from overt.recipes.seeing import Wish

if TYPE_CHECKING:
    from torch import Tensor

    from overt.attention import AttentionMap, Layout
    from overt.data.batch import Batch
    from overt.geometry import RegionGeometry
    from overt.models.output import Output
    from overt.show.panel import Choice, Panel

    View = tuple[list[Panel], list[Choice], list[str], list[tuple[str, float]]]

MAPS = {
    "raw": "the attention of the network itself",
    "gradient": "how much the answer hangs on each cell and word",
    "search": "attention on the masked input on which the network is surest of its answer",
}
PROBES = 50  # of a search
SEARCHED = 4  # cells of a feature map's side that a search removes as one, at most so many a side


@dataclass(frozen=True, eq=False)
class Seen:
    """What a network was given, what it made of it, and what was kept of the input."""

    batch: "Batch"
    features: Any
    output: "Output"
    mask: Mapping[str, "Tensor"] | None


def open_spoken(folder: Path, name: str) -> Subject:
    """The network in a folder with a spoken.json, in eval mode."""
    known = spoken.read(folder)
    model = spoken.networks()[known.network].from_pretrained(folder)
    return Subject(name, model, spoken=known, notes=tuple(_about(folder)))


def _about(folder: Path) -> list[str]:
    """What the run that a network comes from says of itself."""
    results = folder.parent / "results.json"
    if folder.name != "model" or not results.is_file():
        return []
    said = files.read_json(results)
    return [f"From a run of {said.get('recipe')}: {said.get('about')}."]


def maps_for(known: spoken.Spoken) -> dict[str, str]:
    """The maps that can be had of a network, by name, each with what it is."""
    if known.writes:
        return telling.MAPS
    return pointing.MAPS if known.network == PAIRED else MAPS


def view_spoken(subject: Subject, given: Given, wish: Wish) -> "View":
    """A panel for each map, what is drawn large of it, notes, and the answers with their chances.

    A network that attends to nothing has no panel for `raw`. A map without the layer, head or query
    that is wished for is left out, unless none has it.
    """
    known = subject.spoken
    assert known is not None
    offered = maps_for(known)
    if wish.way not in offered:
        raise BadInput(
            f"{subject.name} is a network of overt, which has no map '{wish.way}'; it has "
            f"{', '.join(offered)}."
        )
    if known.writes:
        told = telling.describe(subject, given, wish.way)
        shown = panels_of(told.maps, given, wish)
        return *shown, [*subject.notes, *told.notes], telling.answers(told)
    if known.network == PAIRED and wish.way == "gradient":
        pointing.check(given.text)
    seen = see(subject, given)
    found, notes = maps(subject.model, seen, wish.way)
    chances, more = answers(subject, seen.output, given)
    told_notes = [*subject.notes, *unknown(subject, seen.batch), *notes, *more]
    return *panels_of(found, given, wish), told_notes, chances


def panels_of(
    found: Mapping[str, "AttentionMap"], given: Given, wish: Wish
) -> tuple[list["Panel"], list["Choice"]]:
    """A panel for each map by its title, and what is drawn large of it."""
    from overt.show.panel import boxed, choose, panel

    panels, choices, refused = [], [], []
    for title, attention in found.items():
        photos = {} if given.photo is None else {"image": given.photo, "regions": given.photo}
        count, several = attention.values.shape[1], attention.values.shape[2] > 1
        name = "layer" if several or len(attention.queries) > 1 else "hop"
        layers = [title] if count == 1 else [f"{name} {number}" for number in range(count)]
        keys = [f"box {at}" for at in range(len(attention.keys))] if boxed(attention.keys) else None
        about = _size(attention)
        shown = panel(attention, title, layers, keys=keys, photos=photos, about=about)
        layer = int(wish.layer) if wish.layer and wish.layer.lstrip("-").isdigit() else None
        try:
            choices.append(choose(shown, layer, wish.head, wish.query))
        except BadInput as error:
            refused.append(error)
            continue
        panels.append(shown)
    if refused and not panels:
        raise refused[0]
    return panels, choices


def unknown(subject: Subject, batch: "Batch") -> list[str]:
    """Which words of the text the network has never read, in a sentence."""
    from overt.data.vocabulary import UNKNOWN

    assert subject.spoken is not None
    if batch.tokens is None or batch.text is None or subject.spoken.words is None:
        return []
    said = zip(batch.text.tokens(0), batch.tokens[0].tolist(), strict=True)
    words = list(dict.fromkeys(word for word, number in said if number == UNKNOWN))
    return [f"It does not know {', '.join(words)}."] if words else []


def see(subject: Subject, given: Given) -> Seen:
    """Give a network what is given; what is removed is removed from its features."""
    import torch

    batch = batch_of(subject, given)

    def call(inputs: Mapping[str, Any]) -> Seen:
        with torch.no_grad():
            features = subject.model.encode(inputs["batch"])
            mask = kept(layouts(features, inputs["batch"]), given)
            return Seen(batch, features, subject.model.decide(features, mask or None), mask)

    found = run(subject.name, Asked({"batch": batch}, call, given))
    assert isinstance(found, Seen)
    return found


def answers(
    subject: Subject, output: "Output", given: Given, most: int = 5
) -> tuple[list[tuple[str, float]], list[str]]:
    """The likeliest answers by name, with their probabilities, and what to know of them."""
    known = subject.spoken
    assert known is not None
    chances = output.prediction[0].detach().float().softmax(dim=-1)
    if known.network == PAIRED:
        assert given.text is not None
        return pointing.answers(known, given.text, chances)
    best = chances.topk(min(most, len(chances)))
    names = known.answers
    return [
        (names[at] if at < len(names) else str(at), float(chance))
        for chance, at in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ], []


def layouts(features: Any, batch: "Batch") -> dict[str, "Layout"]:
    """What of the features can be removed, by span name: cells of the picture, words."""
    from overt.attention import regions, words
    from overt.geometry import RegionGeometry
    from overt.models import Asked as Both
    from overt.models import Cells, Levels, Words
    from overt.models.paying.vgg import Progressed
    from overt.models.vlbert.model import Joined

    match features:
        case Joined(words=text, regions=boxes):
            assert batch.boxes is not None
            where = RegionGeometry(batch.boxes)
            return {
                "text": words(text.shape[1], geometry=batch.text),
                "regions": regions(boxes.shape[1], geometry=where),
            }
        case Both(cells=cells, words=text):
            return {**layouts(cells, batch), **layouts(text, batch)}
        case Cells(layout=layout):
            return {"image": layout}
        case Levels(cells=cells):
            return {"image": cells[-1].layout}
        case Progressed(cells=cells):
            return {"image": cells.layout}
        case Words(values=values, geometry=geometry):
            return {"text": words(values.shape[1], geometry=geometry)}
    return {}


def kept(where: Mapping[str, "Layout"], given: Given) -> dict[str, "Tensor"]:
    """1 for every cell, box and word that stays, 0 for those of which half or more was removed."""
    import torch

    from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry

    found = {}
    for name, layout in where.items():
        span = layout.find(name)
        if isinstance(span.geometry, PixelGeometry) and given.without:
            size = span.geometry.size[0].flip(0).double()
            boxes = torch.tensor(given.without, dtype=torch.float64) * size.cpu().repeat(2)
            covered = span.geometry.cover_boxes(
                boxes[None].float().to(span.geometry.size.device), span.shape
            )
            found[name] = (covered.sum(dim=1) < 0.5).float()
        if isinstance(span.geometry, RegionGeometry) and given.without:
            found[name] = (_hidden(span.geometry, given) < 0.5).float()
        if isinstance(span.geometry, TextGeometry) and given.unsaid:
            found[name] = (span.geometry.cover([given.unsaid]) < 0.5).float()
    return found


def _hidden(where: "RegionGeometry", given: Given) -> "Tensor":
    """The share of each box that is removed, where what is removed does not overlap."""
    import torch

    height, width = given.photo.shape[:2]
    size = torch.tensor([width, height] * 2, dtype=torch.float64)
    gone = torch.tensor(given.without, dtype=torch.float64) * size
    ours = where.boxes.cpu().double()[:, :, None]
    low = torch.maximum(ours[..., :2], gone[:, :2])
    high = torch.minimum(ours[..., 2:], gone[:, 2:])
    both = (high - low).clamp_min(0).prod(dim=-1).sum(dim=-1)
    area = (ours[..., 2:] - ours[..., :2]).clamp_min(0).prod(dim=-1)[..., 0]
    return (both / area.clamp_min(1e-12)).to(where.boxes.device)


# --- maps


def maps(model: Any, seen: Seen, way: str) -> tuple[dict[str, "AttentionMap"], list[str]]:
    """The maps of this name by title, and what to know of them; here a name becomes code."""
    from overt.models.vlbert.model import Understood

    if isinstance(seen.output, Understood) and way != "gradient":
        return pointing.pointed(seen.output, seen.batch, way)
    match way:
        case "gradient":
            return slopes(model, seen), [f"Shown: {MAPS[way]}."]
        case "search":
            return searched(model, seen)
    return attended(model, seen), []


def attended(model: Any, seen: Seen) -> dict[str, "AttentionMap"]:
    """The network's own maps by title."""
    from overt.recipes.ltpa.looking import maps_of, own_kinds

    if isinstance(model, own_kinds()):
        return maps_of(model, seen.batch, seen.output)
    titles = {"image": "on the picture", "text": "in the words"}
    return {titles.get(one.keys.spans[0].name, "attention"): one for one in seen.output.attention}


def slopes(model: Any, seen: Seen) -> dict[str, "AttentionMap"]:
    """How fast the score of the answer falls as a cell or a word fades: gradients by the mask.

    Only what speaks for the answer is shown.
    """
    import torch

    from overt.attention import AttentionMap, Kind

    where = layouts(seen.features, seen.batch)
    answer = int(seen.output.prediction[0].argmax())
    found = {}
    with torch.enable_grad():
        mask = {}
        for name, layout in where.items():
            start = None if seen.mask is None else seen.mask.get(name)
            count = len(layout.find(name))
            start = torch.ones(1, count) if start is None else start
            mask[name] = start.detach().clone().requires_grad_()
        score = model.decide(seen.features, mask).prediction[0, answer]
        slope: tuple[Tensor | None, ...] = (None,) * len(mask)
        if score.requires_grad:
            slope = torch.autograd.grad(score, list(mask.values()), allow_unused=True)
    for (name, layout), one in zip(where.items(), slope, strict=True):
        if one is None:
            continue
        slope_of, layout = _of_words(seen, name, one.detach().clamp_min(0), layout)
        given = AttentionMap.from_cells(slope_of, layout.alone(name))
        title = "the words, by gradient" if name == "text" else "the picture, by gradient"
        found[title] = replace(given, kind=Kind.AMOUNT)
    if not found:
        raise BadInput("no gradient reaches the input of this network; ask for another map.")
    return found


def _of_words(
    seen: Seen, name: str, slope: "Tensor", layout: "Layout"
) -> tuple["Tensor", "Layout"]:
    """Slopes without those of the marks around captions, which say nothing."""
    from overt.models.vlbert.model import Joined

    if name != "text" or not isinstance(seen.features, Joined):
        return slope, layout
    rows = seen.features.words[0].nonzero()[:, 0]
    return slope[:, rows], pointing.words_of(seen.batch, rows)


def searched(model: Any, seen: Seen) -> tuple[dict[str, "AttentionMap"], list[str]]:
    """The network's attention on the masked input on which it is surest of its answer."""
    import math

    import torch

    from overt.supervise.surrogate import Grids, WithoutWords, asking, refine, search

    attending = {one.keys.spans[0].name for one in seen.output.attention}
    where = {n: one for n, one in layouts(seen.features, seen.batch).items() if n in attending}
    if not where:
        raise BadInput("this network attends to nothing, so no map can be searched for.")
    label = seen.output.prediction.argmax(dim=-1)
    found, notes = {}, []
    for name, layout in where.items():
        with asking(model, replace(seen.batch, labels=label), [name]) as look:
            if seen.mask:
                look = look.holding({n: m for n, m in seen.mask.items() if n in attending})
            if name == "image":
                side = max(layout.find(name).shape)
                best = refine(look, Grids(scale=max(1, math.ceil(side / SEARCHED))), PROBES)
            else:
                best = search(look, WithoutWords((1, 2), count=PROBES))
        title = "the picture, by search" if name == "image" else "the words, by search"
        found[title] = best.maps[name].detach()
        before, after = (float(torch.exp(one[0])) for one in (best.base, best.best))
        notes.append(
            f"Search over the {'picture' if name == 'image' else 'words'}: {int(best.probes[0])} "
            f"masks were tried, and the best raises the answer from {before:.0%} to {after:.0%}."
        )
    return found, notes


def _size(attention: "AttentionMap") -> str:
    """What the keys are, in a few words; of a hard map, how many were kept."""
    from overt.show.panel import is_hard

    span = attention.keys.spans[0]
    if len(span.shape) != 2:
        return f"{len(span)} {'boxes' if span.name == 'regions' else 'words'}."
    rows, columns = span.shape
    if is_hard(attention):
        kept = int(attention.weights.sum())
        return f"{kept} of {rows} x {columns} cells are kept; the others are not looked at."
    return f"{rows} x {columns} cells."
