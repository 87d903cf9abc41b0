"""How a captioner is judged: by its captions, by its masks, and by where its words look.

Captions are written by five beams, and greedily, and compared with those of people. BLEU and METEOR
of a set are no means of captions, so their intervals are drawn over pictures anew.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from overt import measure
from overt.attention import AttentionMap, Layout, words
from overt.data.batch import Batch
from overt.data.vocabulary import Vocabulary
from overt.measure import wording
from overt.measure.captions import CaptionScores, Consensus, caption_scores, caption_words
from overt.measure.measured import Measure
from overt.models.captioning.captioner import Captioner, Memory
from overt.models.captioning.decoding import Rules, Texts, beam, greedy
from overt.models.output import Decoder
from overt.recipes.a2.data import Parts, Pictures, one_each
from overt.recipes.a2.networks import AlignedCaptioner, Net
from overt.recipes.evaluation import Noted, noted, on_photo, regions_of, valued
from overt.recipes.experiment import Evaluation, Value
from overt.show.sample import Sample
from overt.supervise.reward import log_probabilities

BEAMS = 5
PORTION = 512  # captions that are written at a time: each token of them is a hundred launches
ASKED = 64  # pictures whose words are looked into, since removal asks once a region
SHOWN = 12
DRAWS, DRAWN = 500, 7  # of the interval of BLEU and METEOR, and its seed

NAMES = {
    "BLEU-1": "bleu_1",
    "BLEU-2": "bleu_2",
    "BLEU-3": "bleu_3",
    "BLEU-4": "bleu_4",
    "METEOR (words and stems)": "meteor",
    "ROUGE-L": "rouge_l",
    "CIDEr-D": "cider_d",
}
CIDER = Measure("CIDEr-D", "score", True, 0.0, 10.0)
ROUGE = Measure("ROUGE-L", "share", True, 0.0, 1.0)
LENGTH = Measure("words", "words", None, low=0.0)
MASK = Measure("mean mask", "share", None, 0.0, 1.0)
SPREAD = Measure("spread of masks", "share", None, 0.0, 1.0)
TAU = wording.effect_agreement.measure
APART = wording.alignment_divergence.measure
MASS = measure.mass_inside.measure
POINTING = measure.pointing_game.measure

Write = Callable[[Decoder, Batch], Texts]


# --- captions


@torch.no_grad()
def written(
    model: Decoder, data: Pictures, write: Write, each: int = 1
) -> Iterator[tuple[Batch, Texts]]:
    """What a captioner writes about every picture, a portion at a time.

    `each` is how many captions of a picture are followed at once.
    """
    portion = max(1, PORTION // each)
    for start in range(0, len(data), portion):
        batch = data.pictures(range(start, min(start + portion, len(data))))
        yield batch, write(model, batch)


def texts_of(
    model: Net, data: Pictures, reader: Vocabulary, write: Write, each: int = 1
) -> list[str]:
    """A caption of every picture, in words."""
    return [
        " ".join(reader.decode(ids))
        for _, found in written(model, data, write, each)
        for ids in found.ids()
    ]


class Scorer:
    """CIDEr-D against references whose words are counted once, for validation again and again."""

    def __init__(self, references: Sequence[Sequence[str]]) -> None:
        self.ids: dict[str, int] = {}
        self.consensus = Consensus([[self._read(text) for text in many] for many in references])

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """The score of each text, the n-th about picture n."""
        return self.consensus([self._read(text) for text in texts])

    def _read(self, text: str) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in caption_words(text)]


def spoken(scores: CaptionScores, split: str, before: str = "") -> dict[str, Value]:
    """Every measure of captions as a value, with an interval over pictures."""
    generator = torch.Generator().manual_seed(DRAWN)
    rows = torch.randint(len(scores), (DRAWS, len(scores)), generator=generator)
    whole = scores.table()
    several = [scores.select(one).table() for one in rows]
    found = {}
    for name in whole:
        values = np.array([one[name] for one in several])
        low, high = np.quantile(values, [0.025, 0.975])
        unit = "score" if name == "CIDEr-D" else "share"
        found[before + NAMES[name]] = Value(
            whole[name], unit, "higher", split, len(scores), float(low), float(high)
        )
    return found


def evaluated(model: Net, parts: Parts, rules: Rules, device: torch.device) -> Evaluation:
    """Every number of a captioner on the test, and its CIDEr-D on validation."""
    split, data = str(parts.test.split), parts.test

    def usual(model: Decoder, batch: Batch) -> Texts:
        return greedy(model, batch, rules)

    said = {
        "": texts_of(model, data, parts.words, lambda m, b: beam(m, b, BEAMS, rules), BEAMS),
        "greedy_": texts_of(model, data, parts.words, usual),
    }
    scores = {name: caption_scores(texts, data.references) for name, texts in said.items()}
    ours: dict[str, Value] = {}
    samples: dict[str, np.ndarray] = {
        "id": np.array(data.ids),
        "prediction": np.array(said[""]),
        "greedy_prediction": np.array(said["greedy_"]),
    }
    for name, one in scores.items():
        ours |= spoken(one, split, name)
        samples[f"{name}cider_d"] = one.cider_d.numpy().astype(np.float32)
        samples[f"{name}rouge_l"] = one.rouge_l.numpy().astype(np.float32)
    samples["words"] = np.array([len(caption_words(text)) for text in said[""]], np.float32)
    ours["words"] = valued(LENGTH, samples["words"], split)
    held = texts_of(model, parts.val, parts.words, usual)
    ours["val_cider_d"] = valued(CIDER, Scorer(parts.val.references)(held), str(parts.val.split))
    ours |= {f"val_{name}": one for name, one in pointed(model, parts, device).items()}
    found = Evaluation(ours, samples, gallery=list(shown(model, parts, rules)))
    return looked_into(found, model, parts, device)


# --- words


def looked_into(found: Evaluation, model: Net, parts: Parts, device: torch.device) -> Evaluation:
    """The evaluation with what masks are and where words look, of captions that people wrote.

    Of each picture the first caption, or on scenes all five, whose truth is known. `groups` has
    the numbers layer by layer.
    """
    count = min(ASKED, len(parts.test))
    layers: dict[str, list[Tensor]] = {}

    def portions() -> Iterator[Noted]:
        for start in range(0, count, 16):
            chosen = range(start, min(start + 16, count))
            batch = parts.test.batch(chosen)
            if parts.truth is None:
                batch = _first_captions(batch)
            else:
                batch = replace(batch, target=parts.truth.batch(chosen).to(device).target)
            for name, one in of_words(model, batch).items():
                layers.setdefault(name, []).append(one.cpu())
            yield {name: (_MEANING[name], one.nanmean(dim=1)) for name, one in last(layers)}

    def last(kept: dict[str, list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, many[-1]) for name, many in kept.items())

    more = noted(portions())
    split = str(parts.test.split)
    ours = dict(found.ours)
    for name, (declared, values) in more.items():
        if not values.isnan().all():
            ours[name] = valued(declared, values, split)
    groups = {
        name: {
            f"layer {layer + 1}": {"value": float(one), "n": len(torch.cat(many))}
            for layer, one in enumerate(torch.cat(many).nanmean(dim=0).tolist())
        }
        for name, many in layers.items()
    }
    elsewhere = {name: values.numpy() for name, (_, values) in more.items()}
    return replace(found, ours=ours, groups={**found.groups, **groups}, elsewhere=elsewhere)


def pointed(model: Net, parts: Parts, device: torch.device) -> dict[str, Value]:
    """Where words look on validation, by which settings may be chosen; nothing without a truth."""
    if parts.val_truth is None:
        return {}
    found: dict[str, list[Tensor]] = {}
    for start in range(0, min(ASKED, len(parts.val)), 16):
        chosen = range(start, min(start + 16, ASKED, len(parts.val)))
        target = parts.val_truth.batch(chosen).to(device).target
        assert target is not None
        after = _told(model, parts.val.batch(chosen)).maps["after"]
        for name, one in _held_against(after, wording.of_next(target), "").items():
            found.setdefault(name, []).append(one.nanmean(dim=1).cpu())
    split = str(parts.val.split)
    return {name: valued(_MEANING[name], torch.cat(many), split) for name, many in found.items()}


def _first_captions(batch: Batch) -> Batch:
    of = batch.image_index
    first = torch.ones_like(of, dtype=torch.bool)
    first[1:] = of[1:] != of[:-1]
    return batch.select(first.nonzero()[:, 0])


_MEANING = {
    "mask_mean": MASK,
    "mask_spread": SPREAD,
    "divergence": APART,
    "tau_removal": TAU,
    "tau_removal_before": TAU,
    "tau_removal_masks": TAU,
    "tau_gradient": TAU,
    "tau_gradient_before": TAU,
    "tau_gradient_masks": TAU,
    "mass_inside": MASS,
    "mass_inside_before": MASS,
    "pointing": POINTING,
    "pointing_before": POINTING,
}


@dataclass(frozen=True, eq=False)
class _Told:
    """Captions of people before a captioner: words it is given, words to come, which are there.

    `maps` are what its words look at, without padding: `after`, and of an aligned model also
    `before` and `masks`.
    """

    plain: Captioner
    memory: Memory
    tokens: Tensor
    wanted: Tensor
    rows: Tensor
    maps: dict[str, AttentionMap]


@torch.no_grad()
def _told(model: Net, batch: Batch) -> _Told:
    assert batch.tokens is not None and batch.token_mask is not None
    pictures, of = one_each(batch)
    plain = model.captioner if isinstance(model, AlignedCaptioner) else model
    memory = plain.encode(pictures).select(of)
    wide = int(batch.token_mask.sum(dim=1).max())  # a batch is as wide as any caption of the set
    tokens, wanted = batch.tokens[:, : wide - 1], batch.tokens[:, 1:wide]
    rows = batch.token_mask[:, 1:wide]
    layout = (words(tokens.shape[1]), memory.layout)
    maps = _maps(model, plain, memory, tokens, rows, layout)
    return _Told(plain, memory, tokens, wanted, rows, maps)


def of_words(model: Net, batch: Batch) -> dict[str, Tensor]:
    """Numbers of captions (rows) and layers (columns): masks, agreement, truth.

    `before` is attention as it would be by itself in the same pass, the other what was made of it.
    """
    told = _told(model, batch)
    plain, memory, maps = told.plain, told.memory, told.maps

    def run(given: Memory) -> Tensor:
        def tell() -> Tensor:
            return log_probabilities(plain.write(given, told.tokens).logits, told.wanted)

        if not isinstance(model, AlignedCaptioner):
            return tell()
        with model.aligned():
            return tell()

    found = dict(_of_masks(maps.get("masks"), told.rows))
    if batch.target is not None:
        truth = wording.of_next(batch.target)
        for name, kind in (("after", ""), ("before", "_before")):
            if name in maps:
                found |= _held_against(maps[name], truth, kind)
    if "before" in maps:
        found["divergence"] = wording.alignment_divergence(maps["before"], maps["after"])
    ways = {
        "removal": wording.region_effects(
            wording.hiding(plain, partial(run, memory)), maps["after"]
        ),
        "gradient": wording.region_gradients(
            lambda states: run(replace(memory, states=states)), memory.states, maps["after"]
        ),
    }
    for way, effect in ways.items():
        for name, kind in (("after", ""), ("before", "_before"), ("masks", "_masks")):
            if name in maps:
                found[f"tau_{way}{kind}"] = wording.effect_agreement(maps[name], effect)
    return {name: one.detach().cpu() for name, one in found.items()}


@torch.no_grad()
def _maps(
    model: Net,
    plain: Captioner,
    memory: Memory,
    tokens: Tensor,
    rows: Tensor,
    layout: tuple[Layout, Layout],
) -> dict[str, AttentionMap]:
    """What words looked at, without padding: `after`, and of an aligned model `before`, `masks`."""
    if not isinstance(model, AlignedCaptioner):
        return {"after": wording.spoken(plain.write(memory, tokens).attention, rows)}
    with model.aligned() as seen:
        plain.write(memory, tokens)
    found = {
        "before": seen.before(layout),
        "after": seen.after(layout),
        "masks": seen.disturbance(layout),
    }
    return {name: wording.spoken(one, rows) for name, one in found.items()}


def _of_masks(disturbance: AttentionMap | None, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The mean of masks, and how far those of one word differ, a caption and layer."""
    if disturbance is None:
        return
    masks, seen = 1 - disturbance.values, disturbance.visible[:, None, None]
    count = seen.sum(dim=-1).clamp_min(1)
    mean = masks.where(seen, 0).sum(dim=-1) / count
    square = ((masks - mean[..., None]) ** 2).where(seen, 0).sum(dim=-1) / count
    there = rows[:, None, None].to(mean.device).expand_as(mean)
    for name, one in (("mask_mean", mean), ("mask_spread", square.sqrt())):
        yield name, wording.over_words(torch.where(there, one, torch.nan))


def _held_against(attention: AttentionMap, truth: AttentionMap, kind: str) -> dict[str, Tensor]:
    """Mass on the regions a word speaks of, and whether it looks there most; heads averaged."""
    mean = attention.over_heads()
    return {
        f"{name}{kind}": wording.over_words(wording.row_by_row(compare, mean, truth))
        for name, compare in (
            ("mass_inside", measure.mass_inside),
            ("pointing", measure.pointing_game),
        )
    }


# --- pictures for the page


@torch.no_grad()
def shown(model: Net, parts: Parts, rules: Rules) -> Iterator[Sample]:
    """Some test pictures with their captions, and where each word looked (figures 1 and 7)."""
    batch = parts.test.pictures(range(min(SHOWN, len(parts.test))))
    found = greedy(model, batch, rules)
    looked = found.attention[0].over_layers().over_heads()
    for row in range(len(batch)):
        ids = found.tokens[row][found.mask[row]].tolist()
        names = parts.words.decode([token for token in ids if token != rules.end])
        pixels, grids = _drawn(parts, batch, looked, row, len(names))
        if pixels is None:
            continue
        assert batch.references is not None
        yield Sample(
            id=batch.ids[row],
            image=pixels,
            text=" / ".join(batch.references[row]),
            prediction=" ".join(names),
            cells=grids.mean(axis=0) if len(grids) else None,
            answer_cells=grids if len(grids) else None,
            boxes=regions_of(batch, row) if batch.images is not None else None,
        )


def _drawn(
    parts: Parts, batch: Batch, looked: AttentionMap, row: int, count: int
) -> tuple[np.ndarray | None, np.ndarray]:
    """A picture, and the attention of each of its words on a grid over it."""
    weights = looked.weights[row, 0, 0, :count].detach().float().cpu()
    shape = looked.keys.spans[0].shape
    if batch.images is not None and batch.boxes is not None:
        pixels = batch.images[int(batch.image_index[row])].cpu()
        grids = on_photo(batch, row, weights)
        return pixels.permute(1, 2, 0).numpy().astype(np.uint8), grids
    if parts.photos is None or len(shape) != 2:
        return None, np.zeros((0, 1, 1), np.float32)
    photo = parts.photos.batch([row]).images
    assert photo is not None
    return photo[0].permute(1, 2, 0).numpy().astype(np.uint8), weights.reshape(-1, *shape).numpy()
