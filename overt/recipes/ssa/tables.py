"""The tables of Self Supervision for Attention Networks, each with its placebos and controls.

Every row of a seed stands on the same first network and the same targets: rows find those of a
finished run beside them. Give all rows one `--out`.
"""

from collections.abc import Callable

from overt.recipes.comparison import Row, Table
from overt.recipes.ssa import recipe as ssa
from overt.recipes.ssa.recipe import Distance, Over, SsaRecipe, Target

Maker = Callable[[], SsaRecipe]
FIRST = "ssa-1"

PAPERS = (Distance.CORAL, Distance.MSE, Distance.MMD, Distance.ADVERSARIAL)
# Losses that compare whole batches cannot tell a shuffled target from the right one: for them the
# placebo is one whose weights are scattered.
PLACEBOS = (
    (Target.SHUFFLED, Distance.MSE),
    (Target.SHUFFLED, Distance.ADVERSARIAL),
    (Target.SCATTERED, Distance.CORAL),
    (Target.SCATTERED, Distance.MMD),
    (Target.IN_CLASS, Distance.MSE),
    (Target.RANDOM, Distance.MSE),
    (Target.UNIFORM, Distance.MSE),
)
CONTROLS = ((Target.OWN, Distance.MSE), (Target.GRADCAM, Distance.MSE))
KNOWN = ((Target.OWN, Distance.MSE), (Target.TRUTH, Distance.MSE))  # where people have marked it

# section 3.1 says without numbers that the best map does better than a weighted mean of all
MEAN = ("supervise.loss=mse", "surrogate.search=mean-map")

SEARCH = ("base_score", "best_score", "improved", "search_seconds")
AGREEMENT = ("pointing", "mass_inside", "rank_correlation", "emd")
BEFORE = tuple(f"{name}_before" for name in AGREEMENT)
FOUND = ("surrogate_pointing", "own_pointing", "surrogate_mass_inside", "own_mass_inside")


def tables() -> tuple[Table, ...]:
    """Tables 1 to 4, the same on scenes, and the studies of figures 6 and 7."""
    return (
        Table(
            FIRST,
            "Self Supervision for Attention Networks, Table 1: TREC-6, with placebos and controls.",
            (
                *full("", ssa.ssa_trec),
                Row("mean-map-mse", ssa.ssa_trec, MEAN),
                *full("minilm", ssa.ssa_minilm, controls=((Target.OWN, Distance.MSE),)),
            ),
            ("accuracy", "accuracy_before", "deletion", "entropy", *SEARCH, "gamma_text"),
        ),
        Table(
            "ssa-2",
            "Self Supervision for Attention Networks, Table 2: CIFAR-10, with placebos, controls.",
            full("", ssa.ssa_cifar10),
            ("accuracy", "accuracy_before", "deletion", "entropy", *SEARCH, "gamma_image"),
        ),
        Table(
            "ssa-3",
            "Self Supervision for Attention Networks, Table 3: agreement with people, on reviews "
            "of Yelp-HAT and, where its files are, on VQA-HAT.",
            (
                *full("yelp", ssa.ssa_yelp, controls=KNOWN),
                *sides("vqa", ssa.ssa_vqa, "ssa-4"),
            ),
            ("rank_correlation", "emd", "accuracy", *BEFORE, *FOUND),
        ),
        Table(
            "ssa-4",
            "Self Supervision for Attention Networks, Table 4: questions, image and both taught.",
            (
                *sides("easyvqa", ssa.ssa_easyvqa),
                *sides("daquar", ssa.ssa_daquar),
                *sides("vqa", ssa.ssa_vqa),
            ),
            ("accuracy", "vqa_accuracy", "deletion", "entropy", "improved", "search_seconds"),
        ),
        Table(
            "ssa-scenes",
            "Scenes, where the truth is known: agreement with it before and after, and placebos.",
            (
                row("none", ssa.ssa_scenes, Target.NONE),
                trained_on("trained-on", ssa.ssa_scenes),
                *(row(loss.value, ssa.ssa_scenes, Target.SURROGATE, loss) for loss in Distance),
                *(
                    row(f"{target.value}-{loss.value}", ssa.ssa_scenes, target, loss)
                    for target, loss in (
                        (Target.SHUFFLED, Distance.KL),
                        (Target.SHUFFLED, Distance.EMD),
                        *PLACEBOS,
                        *CONTROLS,
                        (Target.TRUTH, Distance.MSE),
                        (Target.TRUTH, Distance.KL),
                        (Target.TRUTH, Distance.ADVERSARIAL),
                    )
                ),
            ),
            ("accuracy", *AGREEMENT, *BEFORE, *FOUND, *SEARCH, "gamma_image"),
        ),
        Table(
            "ssa-masks",
            "Figure 7 and the searches beside it: what is found for how many questions.",
            tuple(
                Row(label, ssa.ssa_cifar10, ("supervise.loss=mse", *sets), home="ssa-masks")
                for label, sets in MASKS.items()
            ),
            ("best_score", "base_score", "improved", "probes", "search_seconds", "accuracy"),
        ),
        Table(
            "ssa-words",
            "Figure 6: how sure a network is of the truth from its two best words alone.",
            (
                row("trec", ssa.ssa_trec, Target.SURROGATE, Distance.MSE),
                row("yelp", ssa.ssa_yelp, Target.SURROGATE, Distance.MSE),
                row("easyvqa", ssa.ssa_easyvqa, Target.SURROGATE, Distance.MSE, Over.QUESTION),
            ),
            ("whole_text_score", "two_words_score", "base_score", "best_score", "improved"),
        ),
    )


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


def full(
    name: str,
    make: Maker,
    controls: tuple[tuple[Target, Distance], ...] = CONTROLS,
) -> tuple[Row, ...]:
    """The five rows of Table 1 or 2, the network trained on, placebos, and controls."""
    before = f"{name}-" if name else ""
    return (
        row(f"{before}none", make, Target.NONE),
        trained_on(f"{before}trained-on", make),
        *(row(before + loss.value, make, Target.SURROGATE, loss) for loss in PAPERS),
        *(
            row(f"{before}{target.value}-{loss.value}", make, target, loss)
            for target, loss in (*PLACEBOS, *controls)
        ),
    )


def sides(name: str, make: Maker, home: str = "") -> tuple[Row, ...]:
    """The rows of Tables 3 and 4: nothing taught, the question, the image, and both."""
    each = [
        row(f"{name}-{over.value}-{loss.value}", make, Target.SURROGATE, loss, over, home)
        for over in (Over.QUESTION, Over.IMAGE)
        for loss in PAPERS
    ]
    both = row(
        f"{name}-both-adversarial",
        make,
        Target.SURROGATE,
        Distance.ADVERSARIAL,
        Over.BOTH,
        home,
    )
    placebo = [
        row(
            f"{name}-{over.value}-shuffled-adversarial",
            make,
            Target.SHUFFLED,
            Distance.ADVERSARIAL,
            over,
            home,
        )
        for over in (Over.QUESTION, Over.IMAGE)
    ]
    return row(f"{name}-none", make, Target.NONE, home=home), *each, both, *placebo


def row(
    label: str,
    make: Maker,
    target: Target,
    loss: Distance = Distance.ADVERSARIAL,
    over: Over = Over.IMAGE,
    home: str = "",
) -> Row:
    """One row by what is taught, by which loss, and over what."""
    changes = [f"supervise.target={target.value}", f"supervise.loss={loss.value}"]
    changes += [f"supervise.over={over.value}"] if over is not Over.IMAGE else []
    return Row(label, make, tuple(changes), home)


def trained_on(label: str, make: Maker) -> Row:
    """The first network trained for as long again without any target: what time alone gives."""
    return Row(label, make, ("supervise.target=none", "supervise.start=baseline"))
