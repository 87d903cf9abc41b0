"""The claims of the five papers that our results can be compared with, in the order of the pages.

`claims.py` computes each of them from an archive of this folder; claims without an archive are
planned runs, by the rules of the logs. Differences are in percentage points.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from overt.papers.a2.published import MEASURES
from overt.papers.a2.published import TABLE_3 as CAPTIONS
from overt.papers.han.published import SIMPLE
from overt.papers.han.published import TABLE_1 as HARD
from overt.papers.han.published import TABLE_2 as ADAPTIVE
from overt.papers.han.published import TABLE_3 as LAYERS
from overt.papers.ltpa.config import TABLE_1 as ERRORS
from overt.papers.ltpa.published import FIGURE_6, TABLE_3
from overt.papers.ssa.published import TABLE_1 as TREC
from overt.papers.ssa.published import TABLE_2 as CIFAR
from overt.papers.ssa.published import TABLE_3 as PEOPLE
from overt.papers.ssa.published import TABLE_4 as VQA
from overt.papers.vgp.published import TABLE_1 as GROUNDED


@dataclass(frozen=True)
class Claim:
    """A difference of two rows: `one` is said to be above `other` (below, with `sign` -1).

    Attributes:
        text: The claim, in words.
        folder: The archive with the runs.
        one: The row that the claim is about.
        other: The row it is compared with.
        metric: The metric, in per cent; "spread of NAME over heads" or "over layers" is the
            standard deviation of NAME over the heads of a layer, or over layers from the second.
        command: The command that runs both rows.
        paper: The difference in the paper, in points, if it states one.
        measured: What the paper measured, where ours is something else.
        sign: 1 if the claim is that the difference is positive, -1 if negative.
        above: The claim is that the difference, times `sign`, is above this many points.
        least: The claim is refuted if the difference, times `sign`, is below this many points;
            `above` if it is None.
        same: The claim is also refuted if the interval is within this many points of 0.
        seeds: The seeds that count; all common ones if empty.
        beside: The archive of `other`, if it is another one.
        unfit: Why these runs cannot decide the claim, whatever the interval.
    """

    text: str
    folder: str
    one: str
    other: str
    metric: str
    command: str
    paper: float | None = None
    measured: str = ""
    sign: int = 1
    above: float = 0.0
    least: float | None = None
    same: float = 0.0
    seeds: tuple[int, ...] = ()
    beside: str = ""
    unfit: str = ""


def table(name: str, one: str, other: str, sets: str = "") -> str:
    """Return the command that runs two rows of a table."""
    return f"overt table {name} --rows {one},{other} {sets}".strip()


# --- LTPA


def _error(data: str, one: str, other: str, text: str, paper: float | None, long: bool) -> Claim:
    """Return a claim about the test error on CIFAR."""
    length = "60" if long else "6"
    folder = "ltpa-60-epochs" if long else "ltpa-1-short"
    rows = (f"{data}-{one}", f"{data}-{other}")
    sets = f"--set train.epochs={length} --set data.held_out=false"
    name = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[data]
    text = f"{text} ({name}, {length} epochs)"
    return Claim(text, folder, *rows, "error", table("ltpa-1", *rows, sets), paper, sign=-1)


def _gap(one: str, other: str, data: str = "cifar100") -> float:
    """Return the published difference of two errors."""
    return float(getattr(ERRORS[one], data) - getattr(ERRORS[other], data))


_SIX = "--set train.epochs=6 --set data.held_out=false"
_POOLED = "attention has less error than average pooling"
_LONG = "--set train.epochs={} --set data.held_out=false --set train.graph=true"


def _at_length(epochs: int, one: str, other: str, text: str) -> Claim:
    """Return a planned claim about errors on CIFAR-100, refuted if half a point is excluded."""
    rows = (f"cifar100-{one}", f"cifar100-{other}")
    text = f"{text} (CIFAR-100, {epochs} epochs)"
    command = table("ltpa-parts", *rows, _LONG.format(epochs))
    return Claim(text, f"ltpa-{epochs}-epochs", *rows, "error", command, sign=-1, least=0.5)


_PARTS = (
    ("att2-mean", "vgg", "resolution alone has less error than VGG"),
    ("att2-concat-pc", "att2-mean-query", "a choice of cells has less error than as many weights"),
    ("att2-concat-additive", "att2-concat-bounded", "the query lowers the error"),
)
LTPA = (
    _error("cifar100", "att2-concat-pc", "att2-mean", _POOLED, None, False),
    _error("cifar100", "att2-concat-pc", "att2-mean", _POOLED, None, True),
    *(
        _error(
            data,
            "att2-concat-pc",
            "vgg",
            "attention at two levels has less error than VGG",
            _gap("att2-concat-pc", "vgg", data),
            long,
        )
        for data, long in (("cifar100", True), ("cifar10", False))
    ),
    _error(
        "cifar100",
        "att2-concat-pc",
        "att2-concat-dp",
        "`pc` has less error than `dp`",
        _gap("att2-concat-pc", "att2-concat-dp"),
        False,
    ),
    _error(
        "cifar100",
        "att3-concat-pc",
        "att2-concat-pc",
        "a third level lowers the error",
        _gap("att3-concat-pc", "att2-concat-pc"),
        False,
    ),
    Claim(
        "attention is fooled less often than VGG at 1/255 (CIFAR-100, 6 epochs)",
        "ltpa-1-short",
        "cifar100-att2-concat-pc",
        "cifar100-vgg",
        "fooled_fgsm_1",
        table("ltpa-fig6", "cifar100-att2-concat-pc", "cifar100-vgg", _SIX),
        FIGURE_6["att2-concat-pc"][0] - FIGURE_6["vgg"][0],
        "CUB",
        sign=-1,
    ),
    Claim(
        "features transfer better than those of VGG (CIFAR-100 to CIFAR-10, 6 epochs)",
        "ltpa-1-short",
        "cifar100-att2-concat-pc",
        "cifar100-vgg",
        "transfer_cifar10",
        table("ltpa-3", "cifar100-att2-concat-pc", "cifar100-vgg", _SIX),
        TABLE_3["att2-concat-pc"][0][1] - TABLE_3["vgg"][0][1],
        "Caltech-101",
    ),
    Claim(
        "maps of attention point to the object more often than class activation maps (scenes)",
        "ltpa-scenes",
        "att2-concat-pc pointing_joined",
        "vgg-gap pointing_cam_chosen",
        "pointing",
        table("ltpa-scenes", "att2-concat-pc", "vgg-gap"),
    ),
    Claim(
        "maps of attention have a higher Jaccard with the object than class activation maps "
        "(scenes)",
        "ltpa-scenes",
        "att2-concat-pc jaccard_joined",
        "vgg-gap jaccard_cam_chosen",
        "jaccard",
        table("ltpa-scenes", "att2-concat-pc", "vgg-gap"),
    ),
    _at_length(72, "att2-concat-pc", "att2-mean", _POOLED),
    *(_at_length(150, *one) for one in (("att2-concat-pc", "att2-mean", _POOLED), *_PARTS)),
)

# --- SSA

_LOSSES = {"coral": "CORAL", "mse": "MSE", "mmd": "MMD", "adversarial": "the adversary"}


def _losses(folder: str, name: str, published: Mapping[str, float], note: str) -> list[Claim]:
    """Return the claims that each of the four losses raises accuracy."""
    return [
        Claim(
            f"{label} raises accuracy ({note})",
            folder,
            row,
            "none",
            "accuracy",
            table(name, row, "none"),
            published[row] - published["none"],
            same=0.5,  # rule of 2026-11-15
        )
        for row, label in _LOSSES.items()
    ]


SSA = (
    Claim(
        "answers depend more on attended words than with own maps as targets (MiniLM, TREC-6)",
        "ssa-1",
        "minilm-mse",
        "minilm-own-mse",
        "deletion_overwritten",
        table("ssa-1", "minilm-mse", "minilm-own-mse"),
        seeds=tuple(range(20, 30)),
    ),
    *_losses("ssa-1", "ssa-1", TREC, "TREC-6"),
    *_losses("ssa-2", "ssa-2", CIFAR, "CIFAR-10, one weight that was not tuned"),
    Claim(
        "targets of the search are better than own maps, in accuracy (TREC-6, MSE)",
        "ssa-1",
        "mse",
        "own-mse",
        "accuracy",
        table("ssa-1", "mse", "own-mse"),
        same=0.5,
    ),
    Claim(
        "attention agrees better with people, rank correlation (Yelp-HAT, MSE)",
        "ssa-3",
        "yelp-mse",
        "yelp-none",
        "rank_correlation",
        table("ssa-3", "yelp-mse", "yelp-none"),
        100 * (PEOPLE["question", "mse"][0] - PEOPLE["", "none"][0]),
        "VQA-HAT, question",
        same=0.5,
    ),
    Claim(
        "attention agrees better with people than with own maps as targets (Yelp-HAT, MSE)",
        "ssa-3",
        "yelp-mse",
        "yelp-own-mse",
        "rank_correlation",
        table("ssa-3", "yelp-mse", "yelp-own-mse"),
        same=0.5,
    ),
    Claim(
        "attention points more often to the deciding object (scenes, KL)",
        "ssa-scenes",
        "kl",
        "none",
        "pointing",
        table("ssa-scenes", "kl", "none"),
        seeds=(3, 4, 5),
        same=0.5,
    ),
    Claim(
        "the adversary on the image raises accuracy (easy-VQA)",
        "ssa-4",
        "easyvqa-image-adversarial",
        "easyvqa-none",
        "accuracy",
        table("ssa-4", "easyvqa-image-adversarial", "easyvqa-none"),
        VQA["image", "adversarial"] - VQA["", "none"],
        "VQA v1",
        same=0.5,
    ),
    Claim(
        "*control*: our adversary moves attention to the truth if the truth is its target (scenes, "
        "mass)",
        "ssa-scenes",
        "truth-adversarial",
        "none",
        "mass_inside",
        table("ssa-scenes", "truth-adversarial", "none"),
        same=0.5,
    ),
    *_losses("ssa-1-hops", "ssa-1-hops", TREC, "TREC-6, 30 maps over the words"),
)

# --- HAN


def _vqa(
    text: str,
    folder: str,
    note: str,
    rows: tuple[str, str],
    paper: float | None,
    above: float = 0.0,
    unfit: str = "",
) -> Claim:
    """Return a claim about the accuracy of answers, with a number on VQA-CP."""
    name = "han-scenes" if folder == "han-scenes-long" else folder
    return Claim(
        f"{text} ({note})",
        folder,
        *rows,
        "accuracy",
        table(name, *rows),
        paper,
        "VQA-CP" if paper is not None else "",
        above=above,
        unfit=unfit,
    )


def _hard(one: str, other: str) -> float:
    """Return the published difference of two rows on VQA-CP, all questions."""
    known = HARD | ADAPTIVE | LAYERS
    ours, theirs = known[one][0], known[other][0]
    assert ours is not None and theirs is not None
    return ours - theirs


_SHORT = "--set train.steps=12000 --set train.precision=bf16 --set train.graph=true"
_ON_ALL = (("han-scenes", "scenes"), ("han-easyvqa", "easy-VQA"), ("han-daquar", "DAQUAR"))
_DAQUAR = "DAQUAR does not separate all cells from random ones"


def _on(folder: str) -> str:
    """Return why a dataset cannot decide between selections."""
    return _DAQUAR if folder == "han-daquar" else ""


def _planned(
    text: str, folder: str, one: str, other: str, metric: str, above: float = 0.0
) -> Claim:
    """Return a claim of a table whose name is that of its archive."""
    return Claim(text, folder, one, other, metric, table(folder, one, other), above=above)


_RELATIONAL = "accuracy_relational"
_FIGURE_3A = (
    ("keeping 6 of 25 cells costs at most a point", "han-rn", "rn-aligned", -1.0),
    ("it gains accuracy at equal seconds", "han-rn", "rn-aligned-seconds", 0.0),
    ("keeping 25 of 100 cells costs at most a point", "han-rn-fine", "rn-aligned-fine", -1.0),
    ("cells that hold the evidence are better than the norm's", "oracle-rn", "han-rn", 0.0),
    ("the selection of 6 of 25 cells uses the question", "han-rn", "blind-rn", 0.0),
)
_CROWDED = (
    ("the selection uses the question", "han-sum-9", "blind-sum-9", "accuracy", 0.0),
    ("it is as good as the evidence itself", "han-sum-9", "oracle-sum-9", "accuracy", -1.0),
    ("it is as good as soft attention", "han-sum-9", "san2-pos", "accuracy", -1.0),
    (
        "a learned selection finds more evidence",
        "straight-through-sum-9",
        "han-sum-9",
        "covered",
        0.0,
    ),
)
HAN = (
    _vqa(
        "cells of the largest norm are better than random ones",
        "han-easyvqa",
        "easy-VQA, 16 of 64",
        ("han-sum-16", "random-sum-16"),
        None,
    ),
    Claim(
        "cells of the largest norm are better than random ones "
        "(Sort-of-CLEVR, relational, 6 of 25)",
        "han-sortclevr-short",
        "han-rn",
        "random-rn",
        "accuracy_relational",
        table("han-sortclevr", "han-rn", "random-rn", _SHORT),
    ),
    Claim(
        "kept cells contain more of the evidence than random ones (scenes)",
        "han-scenes",
        "han-sum-16",
        "random-sum-16",
        "covered",
        table("han-scenes", "han-sum-16", "random-sum-16"),
    ),
    Claim(
        "the selection depends on the question: more evidence than without it (scenes)",
        "han-scenes",
        "han-sum-16",
        "blind-sum-16",
        "covered",
        table("han-scenes", "han-sum-16", "blind-sum-16"),
    ),
    *(
        _vqa(
            "16 cells lose at most a point against all, with the sum",
            folder,
            note,
            ("han-sum-16", "sum"),
            _hard("han-sum-16", "sum"),
            above=-1.0,
            unfit=_on(folder),
        )
        for folder, note in _ON_ALL
    ),
    *(
        _vqa(
            "hard attention, 48 cells with pairs, is better than soft attention",
            folder,
            note,
            ("han-pairwise-48", "san2-pos"),
            _hard("han-pairwise-48", "san2-pos"),
        )
        for folder, note in _ON_ALL
    ),
    *(
        _vqa(
            "an adaptive number of cells is better than 48, with pairs",
            folder,
            note,
            ("adahan-pairwise", "han-pairwise-48"),
            _hard("adahan-pairwise", "han-pairwise-48"),
            unfit=_on(folder),
        )
        for folder, note in _ON_ALL
    ),
    *(
        _vqa(
            "layers before the sum help, 48 cells",
            folder,
            note,
            ("han-sum-48", "han-sum-48-depth0"),
            _hard("han-sum-48", "han-sum-48-depth0"),
        )
        for folder, note in _ON_ALL
    ),
    Claim(
        "hard attention with a small CNN is better than soft (DAQUAR, section 4.7)",
        "han-daquar",
        "simple-han",
        "simple-san",
        "accuracy",
        table("han-daquar", "simple-han", "simple-san"),
        (SIMPLE["simple-han"][0] or 0.0) - (SIMPLE["simple-san"][0] or 0.0),
        "VQA-CP",
    ),
    Claim(
        "a relation network on kept cells is at most 2 points behind (Sort-of-CLEVR)",
        "han-sortclevr",
        "han-rn-fine",
        "rn",
        "accuracy_relational",
        table("han-sortclevr", "han-rn-fine", "rn"),
        93.9 - 95.5,
        "CLEVR",
        above=-2.0,
        unfit="our `rn` has 85.2 %, below the 94 % of the literature, and a coarser grid",
    ),
    *(
        _planned(
            f"{text} (Sort-of-CLEVR, full length)", "han-fig3a", one, other, _RELATIONAL, above
        )
        for text, one, other, above in _FIGURE_3A
    ),
    *(
        _planned(f"{text} (crowded scenes)", "han-crowded", one, other, metric, above)
        for text, one, other, metric, above in _CROWDED
    ),
)

# --- VGP


def _photos(text: str, one: str, other: str, metric: str = "grounding_accuracy") -> Claim:
    """Return a claim about photos of Flickr30k Entities."""
    command = table("vgp-entities", one, other)
    return Claim(f"{text} (photos)", "vgp-entities", one, other, metric, command)


_PLACES = {"answers": 0, "located_detected": 1, "located_true": 4}
_TASKS = {
    "answers": "answers (scenes)",
    "located_detected": "referred objects, detected boxes (scenes)",
    "located_true": "referred objects, true boxes (scenes)",
}
_MEANT = {"answers": "VQA v2", "located_detected": "RefCOCO+", "located_true": "RefCOCO+"}
_UNLEARNED = "no row learned to answer"
_UNTRAINED = 'our "original" was not pretrained'


def _later(text: str, one: str, other: str, metric: str, sign: int, unfit: str = "") -> Claim:
    """Return a claim about a task after grounding, with its column of Table 1."""
    at = _PLACES[metric]
    return Claim(
        f"{text}: {_TASKS[metric]}",
        "vgp-scenes",
        one,
        other,
        metric,
        table("vgp-scenes", one, other),
        GROUNDED[one][at] - GROUNDED[other][at],
        _MEANT[metric],
        sign=sign,
        unfit=unfit,
    )


_SPREAD = "spread of grounding_accuracy over"
_PRETRAINED = (
    ("direct supervision grounds words", "direct", "none", "grounding_accuracy", 1),
    (
        "a bilinear matcher grounds more in its best head",
        "indirect-bilinear",
        "indirect",
        "grounding_accuracy_best",
        1,
    ),
    ("fine-tuning forgets: direct is below original", "direct", "original", "located_true", -1),
    ("selected heads forget less than all", "chosen-heads", "direct", "located_true", 1),
    ("distillation forgets less", "direct-distil", "direct", "located_true", 1),
)
VGP = (
    _photos("direct supervision grounds words", "direct", "none"),
    _photos(
        "direct supervision grounds words better than the same loss on shuffled targets",
        "direct",
        "direct-shuffled",
    ),
    _photos("semi-direct supervision grounds words", "semi-direct", "none"),
    _photos("indirect supervision grounds words", "indirect", "none"),
    _photos("direct supervision identifies more captions", "direct", "none", "identification"),
    _photos(
        "heads of a layer differ more with semi-direct than with direct supervision",
        "semi-direct",
        "direct",
        f"{_SPREAD} heads",
    ),
    _photos(
        "layers differ more with semi-direct than with direct supervision, from the second on",
        "semi-direct",
        "direct",
        f"{_SPREAD} layers",
    ),
    Claim(
        "layers differ more with semi-direct than with direct supervision (scenes)",
        "vgp-scenes",
        "semi-direct",
        "direct",
        f"{_SPREAD} layers",
        table("vgp-scenes", "semi-direct", "direct"),
    ),
    *(
        _later("direct supervision helps later", "direct", "none", name, 1, unfit)
        for name, unfit in (("located_detected", ""), ("answers", _UNLEARNED))
    ),
    _later("direct supervision costs a little", "direct", "none", "located_true", -1),
    *(
        _later("indirect supervision is below none", "indirect", "none", name, -1)
        for name in ("located_detected", "located_true")
    ),
    _later(
        "fine-tuning forgets: direct is below original",
        "direct",
        "original",
        "located_true",
        -1,
        _UNTRAINED,
    ),
    *(
        Claim(
            f"{text} (scenes, from a pretrained network)",
            "vgp-scenes-pretrained",
            one,
            other,
            metric,
            table("vgp-scenes-pretrained", one, other, "--set data.world=2"),
            sign=sign,
        )
        for text, one, other, metric, sign in _PRETRAINED
    ),
)

# --- A2

_CIDER = MEASURES.index("cider_d")


def _captions(text: str, one: str, other: str, paper: float | None = None) -> Claim:
    """Return a claim about captions of Flickr8k."""
    return Claim(
        f"{text} (Flickr8k)",
        "a2-flickr8k",
        one,
        other,
        "cider_d",
        table("a2-flickr8k", one, other),
        paper,
        "COCO" if paper is not None else "",
    )


def _cider(one: str, other: str) -> float:
    """Return the published difference of two fusions in CIDEr."""
    return CAPTIONS[one][_CIDER] - CAPTIONS[other][_CIDER]


_TEN = "--set train.epochs=10"
_FUSIONS = {"gate": "the gate", "decay": "decay", "max": "max", "moving-average": "moving average"}
A2 = (
    _captions("self-critical training raises CIDEr-D", "none-critic", "none"),
    *(
        _captions(f"{name} raises CIDEr-D", row, "none", _cider(row, "none"))
        for row, name in _FUSIONS.items()
    ),
    *(
        _captions(f"{name} is better than {other}", row, beside, _cider(row, beside))
        for row, name, beside, other in (
            ("gate", "the gate", "decay", "decay"),
            ("decay", "decay", "max", "max"),
            ("max", "max", "moving-average", "moving average"),
        )
    ),
    _captions("learned masks are better than random ones", "gate", "gate-random"),
    Claim(
        "self-critical training on beams raises CIDEr-D (scenes)",
        "a2-scenes-critic",
        "none-beams-critic",
        "none",
        "cider_d",
        table("a2-scenes", "none-beams-critic", "none", _TEN),
    ),
    *(
        Claim(
            f"words attend more to their regions with {name} (scenes, mass)",
            "a2-scenes-short",
            row,
            "none",
            "mass_inside",
            table("a2-scenes", row, "none", _TEN),
        )
        for row, name in (("decay", "decay"), ("gate", "the gate"))
    ),
    *(
        Claim(
            f"{text} (scenes, 10 epochs)",
            "a2-scenes-short",
            one,
            other,
            "cider_d",
            table("a2-scenes", one, other, _TEN),
        )
        for text, one, other in (
            ("the gate as printed raises CIDEr-D", "gate-paper", "none"),
            ("the gate of Lu et al. raises CIDEr-D", "gate-lu2021", "none"),
            ("max is better with enhanced weights normalized first", "max-enhanced", "max"),
        )
    ),
)

CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "ltpa": LTPA,
    "ssa": SSA,
    "han": HAN,
    "vgp": VGP,
    "a2": A2,
}
# By place: the finding and the open or refuted claim of each paper that README.md has.
HEADLINES: Mapping[str, tuple[int, int]] = {
    "ltpa": (0, 1),
    "ssa": (0, 4),
    "han": (0, 17),
    "vgp": (0, 4),
    "a2": (0, 1),
}
