"""The chapters of the demo: which runs are compared, by which metrics, and where to find more.

Each chapter compares a method with its control, which differs in one thing, on the same test
samples. Its page is written from the run folders alone.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pages are imported when they are written
    from overt.viz.chapter_page import Chapter

TITLE = "Five papers on synthetic images"
LEAD = (
    "Each method was trained beside its control: the same data, network and schedule without the "
    "method. Both answer the same test samples, and which objects decide an answer is known."
)
FOOT = (
    "One seed is an illustration, not a finding: another seed can change the order. Differences "
    "are paired over test samples; intervals are 95 % t intervals, where samples with the same "
    "image are one cluster. A verdict needs p < 0.05 after Holm's correction over all lines of "
    "this table. Each chapter names the command of a table with five seeds."
)


@dataclass(frozen=True)
class ChapterSpec:
    """A comparison of two rows of the demo.

    `name` is the short name. Each of `metrics` is a key, what it measures, and what its items are.
    `table` has the arguments of the `overt table` that makes the comparison at full length, and
    `paper` is the folder of the paper; both are empty if the comparison is from no paper.
    """

    name: str
    title: str
    idea: str
    control: str
    method: str
    metrics: tuple[tuple[str, str, str], ...]
    table: str
    paper: str = ""


CHAPTERS = (
    ChapterSpec(
        "LTPA",
        "Learn to Pay Attention",
        "Every cell of two levels of a CNN is weighted by its compatibility with the features of "
        "the whole image; the control averages over the same cells.",
        "average-pooling",
        "learned-attention",
        (
            ("accuracy", "accuracy", "scenes"),
            ("pointing", "points at the object", "scenes"),
        ),
        "ltpa-scenes --rows att2-mean,att2-concat-pc",
        "ltpa",
    ),
    ChapterSpec(
        "SSA",
        "Self Supervision for Attention Networks",
        "A search finds the cells on which a trained network is most confident, and a second "
        "network is trained to attend to them; the control is the first network.",
        "unsupervised",
        "self-supervised",
        (
            ("accuracy", "accuracy", "scenes"),
            ("pointing", "points at the object", "scenes"),
        ),
        "ssa-shapes --rows none,kl",
        "ssa",
    ),
    ChapterSpec(
        "HAN",
        "Bootstrapping Hard Attention",
        "Only the cells with the largest feature norms are kept, without parameters; the control "
        "keeps as many cells at random.",
        "random-cells",
        "hard-attention",
        (
            ("accuracy", "accuracy", "questions"),
            ("covered", "evidence kept", "questions"),
        ),
        "han-scenes --rows random-sum-16,han-sum-16",
        "han",
    ),
    ChapterSpec(
        "AdaHAN",
        "Bootstrapping Hard Attention, adaptive",
        "Each image keeps as many cells as have a norm above a uniform share; the control keeps a "
        "fixed number.",
        "hard-attention",
        "adaptive-attention",
        (("accuracy", "accuracy", "questions"), ("cells_kept", "cells kept", "questions")),
        "han-scenes --rows han-sum-16,adahan-sum",
        "han",
    ),
    ChapterSpec(
        "VGP",
        "Visually grounded supervision of Transformers",
        "Every head of a Transformer is trained to attend from a word to the regions that it "
        "refers to; the control has the same tasks without this loss.",
        "ungrounded",
        "grounded",
        (
            ("grounding_accuracy", "words grounded", "pairs of captions"),
            ("identification", "caption identified", "pairs of captions"),
        ),
        "vgp-scenes --rows none,direct",
        "vgp",
    ),
    ChapterSpec(
        "A2",
        "Attention-Aligned Transformer for captioning",
        "Small networks learn which regions a caption cannot do without, by perturbing the "
        "attention, and correct it with what they learned; the control is the plain captioner.",
        "plain-captions",
        "aligned-captions",
        (
            ("cider_d", "CIDEr-D", "images"),
            ("mass_inside", "attention on named region", "captions"),
        ),
        "a2-scenes --rows none,gate",
        "a2",
    ),
    ChapterSpec(
        "image",
        "Does the image help?",
        "The answer is read from the question and the mean of all cells; the control has the "
        "question alone.",
        "question-only",
        "no-attention",
        (("accuracy", "accuracy", "questions"),),
        "",
    ),
    ChapterSpec(
        "attention",
        "Does attention help?",
        "Cells are weighted by soft attention; the control takes their mean.",
        "no-attention",
        "soft-attention",
        (("accuracy", "accuracy", "questions"),),
        "",
    ),
    ChapterSpec(
        "truth",
        "How much would attention on the truth help?",
        "Soft attention is trained to be on the objects that decide the answer: an upper bound, "
        "not a finding.",
        "soft-attention",
        "truth-supervised",
        (
            ("accuracy", "accuracy", "questions"),
            ("pointing", "points at the evidence", "questions"),
        ),
        "",
    ),
)


def chapters_of(labels: Collection[str]) -> tuple[ChapterSpec, ...]:
    """Return the chapters whose control and method are both among these rows."""
    return tuple(one for one in CHAPTERS if {one.control, one.method} <= set(labels))


def with_controls(labels: Collection[str]) -> set[str]:
    """Return these rows and the control of each."""
    return {*labels, *(one.control for one in CHAPTERS if one.method in labels)}


def read_chapters(out: Path, labels: Collection[str]) -> "list[Chapter]":
    """Read the runs of all chapters of these rows, whose folders are in `out`."""
    from overt.viz.chapter_page import Chapter, ChapterMetric
    from overt.viz.run_reader import read_runs

    found = []
    for spec in chapters_of(labels):
        control, method = read_runs([out / spec.control, out / spec.method])
        found.append(
            Chapter(
                spec.name,
                spec.title,
                spec.idea,
                control,
                method,
                tuple(ChapterMetric(*one) for one in spec.metrics),
                f"Found so far: overt/papers/{spec.paper}/RESULTS.md." if spec.paper else "",
                table_command(spec),
                f"{spec.name.lower()}.html",
            )
        )
    return found


def table_command(spec: ChapterSpec) -> str:
    """Return the command of the comparison at full length, with five seeds; empty without one."""
    if not spec.table:
        return ""
    return f"overt table {spec.table} --seeds 5 --out runs/{spec.table.split()[0]}"
