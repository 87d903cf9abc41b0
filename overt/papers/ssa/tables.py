"""Tables of Self Supervision for Attention Networks, each with placebos and controls.

All rows of a seed share the first network and the targets: rows load those of a finished sibling
run. Give all rows one `--out`.
"""

from collections.abc import Callable, Iterable

from overt.experiments.table import RowSpec, TableSpec
from overt.papers.ssa import config as ssa
from overt.papers.ssa.config import SsaLoss, SsaRecipe, SsaSpan, SsaTarget

Maker = Callable[[], SsaRecipe]
FIRST = "ssa-1"

PAPER_LOSSES = (SsaLoss.CORAL, SsaLoss.MSE, SsaLoss.MMD, SsaLoss.ADVERSARIAL)
# Losses that compare whole batches do not distinguish a shuffled target from the right one: their
# placebo has scattered weights.
PLACEBOS = (
    (SsaTarget.SHUFFLED, SsaLoss.MSE),
    (SsaTarget.SHUFFLED, SsaLoss.ADVERSARIAL),
    (SsaTarget.SCATTERED, SsaLoss.CORAL),
    (SsaTarget.SCATTERED, SsaLoss.MMD),
    (SsaTarget.IN_CLASS, SsaLoss.MSE),
    (SsaTarget.RANDOM, SsaLoss.MSE),
    (SsaTarget.UNIFORM, SsaLoss.MSE),
)
CONTROLS = ((SsaTarget.OWN, SsaLoss.MSE), (SsaTarget.GRADCAM, SsaLoss.MSE))
# of datasets with human attention
CONTROLS_WITH_TRUTH = ((SsaTarget.OWN, SsaLoss.MSE), (SsaTarget.TRUTH, SsaLoss.MSE))
ON_SCENES = (
    *((SsaTarget.SHUFFLED, loss) for loss in (SsaLoss.KL, SsaLoss.EMD)),
    *(*PLACEBOS, *CONTROLS),
    *((SsaTarget.TRUTH, loss) for loss in (SsaLoss.MSE, SsaLoss.KL, SsaLoss.ADVERSARIAL)),
)

# The classifier of Lin et al. at the size of the paper: 30 maps over the words.
THIRTY_HOPS = ("model.net=structured", "model.hops=30")
# What multiplies the measured weight of a loss, to be chosen on validation.
WEIGHTS = (0.1, 0.3, 1.0, 3.0, 10.0)
TASKS: dict[str, Maker] = {"trec": ssa.ssa_trec, "cifar10": ssa.ssa_cifar10}

# section 3.1 states without numbers that the best map beats a weighted mean of all
MEAN = ("supervise.loss=mse", "surrogate.search=mean-map")

SEARCH = ("base_score", "best_score", "improved", "search_seconds")
AGREEMENT = ("pointing", "mass_inside", "rank_correlation", "emd")
BEFORE = tuple(f"{name}_before" for name in AGREEMENT)
FOUND = ("surrogate_pointing", "own_pointing", "surrogate_mass_inside", "own_mass_inside")


def tables() -> tuple[TableSpec, ...]:
    """Return Tables 1 to 4, the same on scenes, and the studies of figures 6 and 7."""
    return (
        TableSpec(
            FIRST,
            "Self Supervision for Attention Networks, Table 1: TREC-6, with placebos and controls.",
            (
                *full_rows("", ssa.ssa_trec),
                RowSpec("mean-map-mse", ssa.ssa_trec, MEAN),
                *full_rows("minilm", ssa.ssa_minilm, controls=((SsaTarget.OWN, SsaLoss.MSE),)),
            ),
            ("accuracy", "accuracy_before", "deletion", "entropy", *SEARCH, "gamma_text"),
        ),
        TableSpec(
            "ssa-1-hops",
            "Self Supervision for Attention Networks, Table 1, with the network of the paper.",
            tuple(
                RowSpec(one.label, ssa.ssa_trec, (*one.changes, *THIRTY_HOPS))
                for one in full_rows("", ssa.ssa_trec)
            ),
            ("accuracy", "val_accuracy", "accuracy_before", "deletion", "entropy", *SEARCH),
        ),
        TableSpec(
            "ssa-weights",
            "The weight of each loss, to be chosen by validation accuracy, on TREC-6 and CIFAR-10.",
            weight_rows(),
            ("val_accuracy", "accuracy", "entropy", "gamma_text", "gamma_image"),
        ),
        TableSpec(
            "ssa-2",
            "Self Supervision for Attention Networks, Table 2: CIFAR-10, with placebos, controls.",
            full_rows("", ssa.ssa_cifar10),
            ("accuracy", "accuracy_before", "deletion", "entropy", *SEARCH, "gamma_image"),
        ),
        TableSpec(
            "ssa-3",
            "Self Supervision for Attention Networks, Table 3: agreement with human attention, on "
            "reviews of Yelp-HAT and, if its files are present, on VQA-HAT.",
            (
                *full_rows("yelp", ssa.ssa_yelp, controls=CONTROLS_WITH_TRUTH),
                *span_rows("vqa", ssa.ssa_vqa, "ssa-4"),
            ),
            ("rank_correlation", "emd", "accuracy", *BEFORE, *FOUND),
        ),
        TableSpec(
            "ssa-4",
            "Self Supervision for Attention Networks, Table 4: supervised question, image, both.",
            (
                *span_rows("easyvqa", ssa.ssa_easyvqa),
                *span_rows("daquar", ssa.ssa_daquar),
                *span_rows("vqa", ssa.ssa_vqa),
            ),
            ("accuracy", "vqa_accuracy", "deletion", "entropy", "improved", "search_seconds"),
        ),
        TableSpec(
            "ssa-scenes",
            "Scenes with ground truth: agreement with it before and after, and placebos.",
            (
                row("none", ssa.ssa_scenes, SsaTarget.NONE),
                continued_row("trained-on", ssa.ssa_scenes),
                *(row(loss.value, ssa.ssa_scenes, SsaTarget.SURROGATE, loss) for loss in SsaLoss),
                *target_rows(ssa.ssa_scenes, ON_SCENES),
            ),
            ("accuracy", *AGREEMENT, *BEFORE, *FOUND, *SEARCH, "gamma_image"),
        ),
        TableSpec(
            "ssa-shapes",
            "The shape of the largest object of a scene, with and without targets, and a placebo.",
            (
                row("none", ssa.ssa_shapes, SsaTarget.NONE),
                row("kl", ssa.ssa_shapes, SsaTarget.SURROGATE, SsaLoss.KL),
                *target_rows(ssa.ssa_shapes, ((SsaTarget.SHUFFLED, SsaLoss.KL),)),
            ),
            ("accuracy", *AGREEMENT, *BEFORE, *SEARCH, "gamma_image"),
        ),
        TableSpec(
            "ssa-masks",
            "Figure 7 and other searches: the result against the number of forward passes.",
            tuple(
                RowSpec(label, ssa.ssa_cifar10, ("supervise.loss=mse", *sets), home="ssa-masks")
                for label, sets in MASKS.items()
            ),
            ("best_score", "base_score", "improved", "probes", "search_seconds", "accuracy"),
        ),
        TableSpec(
            "ssa-words",
            "Figure 6: confidence in the label from the two best words alone.",
            (
                row("trec", ssa.ssa_trec, SsaTarget.SURROGATE, SsaLoss.MSE),
                row("yelp", ssa.ssa_yelp, SsaTarget.SURROGATE, SsaLoss.MSE),
                row("easyvqa", ssa.ssa_easyvqa, SsaTarget.SURROGATE, SsaLoss.MSE, SsaSpan.QUESTION),
            ),
            ("whole_text_score", "two_words_score", "base_score", "best_score", "improved"),
        ),
    )


# Figure 7 of the paper has 100, 500 and 1000 random masks; the other searches are ours.
MASKS = {
    "random-100": ("surrogate.count=100",),
    "random-500": (),
    "random-1000": ("surrogate.count=1000",),
    "shifted-500": ("surrogate.shift=true",),
    "grid-2x2": ("surrogate.grid=2,2",),
    "refine-50": ("surrogate.search=refine",),
    "mean-of-maps": ("surrogate.search=mean-map",),
    "mean-of-masks": ("surrogate.search=mean-mask",),
}


def weight_rows() -> tuple[RowSpec, ...]:
    """Return the baseline and, for each loss, a row per weight, on both tasks of Tables 1 and 2."""
    found: list[RowSpec] = []
    for name, make in TASKS.items():
        found += [row(f"{name}-none", make, SsaTarget.NONE)]
        for loss in PAPER_LOSSES:
            one = row(f"{name}-{loss.value}", make, SsaTarget.SURROGATE, loss)
            found += [
                RowSpec(
                    f"{one.label}-{weight:g}", make, (*one.changes, f"supervise.weight={weight:g}")
                )
                for weight in WEIGHTS
            ]
    return tuple(found)


def target_rows(
    make: Maker, plans: Iterable[tuple[SsaTarget, SsaLoss]], before: str = ""
) -> tuple[RowSpec, ...]:
    """Return a row for each target and loss, labelled by both."""
    return tuple(
        row(f"{before}{target.value}-{loss.value}", make, target, loss) for target, loss in plans
    )


def full_rows(
    name: str, make: Maker, controls: tuple[tuple[SsaTarget, SsaLoss], ...] = CONTROLS
) -> tuple[RowSpec, ...]:
    """Return the five rows of Table 1 or 2, continued training, placebos, and controls."""
    before = f"{name}-" if name else ""
    return (
        row(f"{before}none", make, SsaTarget.NONE),
        continued_row(f"{before}trained-on", make),
        *(row(before + loss.value, make, SsaTarget.SURROGATE, loss) for loss in PAPER_LOSSES),
        *target_rows(make, (*PLACEBOS, *controls), before),
    )


def span_rows(name: str, make: Maker, home: str = "") -> tuple[RowSpec, ...]:
    """Return the rows of Tables 3 and 4: no supervision, the question, the image, and both."""
    sides = (SsaSpan.QUESTION, SsaSpan.IMAGE)
    plans = (
        ("none", SsaTarget.NONE, SsaLoss.ADVERSARIAL, SsaSpan.IMAGE),
        *(
            (f"{over.value}-{loss.value}", SsaTarget.SURROGATE, loss, over)
            for over in sides
            for loss in PAPER_LOSSES
        ),
        ("both-adversarial", SsaTarget.SURROGATE, SsaLoss.ADVERSARIAL, SsaSpan.BOTH),
        *(
            (f"{over.value}-shuffled-adversarial", SsaTarget.SHUFFLED, SsaLoss.ADVERSARIAL, over)
            for over in sides
        ),
    )
    return tuple(
        row(f"{name}-{label}", make, target, loss, over, home)
        for label, target, loss, over in plans
    )


def row(
    label: str,
    make: Maker,
    target: SsaTarget,
    loss: SsaLoss = SsaLoss.ADVERSARIAL,
    over: SsaSpan = SsaSpan.IMAGE,
    home: str = "",
) -> RowSpec:
    """Return one row by its target, loss and span."""
    changes = [f"supervise.target={target.value}", f"supervise.loss={loss.value}"]
    changes += [f"supervise.over={over.value}"] if over is not SsaSpan.IMAGE else []
    return RowSpec(label, make, tuple(changes), home)


def continued_row(label: str, make: Maker) -> RowSpec:
    """Return the first network trained for as long again without targets: the effect of time."""
    return RowSpec(label, make, ("supervise.target=none", "supervise.start=baseline"))
