"""The tables of the attention-aligned captioner as tables of ours.

Tables 1 and 3 are of COCO and stand as they are in the paper; Table 2 is of a server. Scenes and
Flickr8k have one table each with every fusion, placebos of the gate, both presets, and rows that
go on with the critic, of captions that are drawn or of beams. A row with the critic begins at the
captioner of the row without it, once that is finished in the same folder.
"""

from collections.abc import Callable, Iterable

from overt.recipes.a2 import recipe as a2
from overt.recipes.a2.recipe import A2Recipe
from overt.recipes.comparison import Row, Table

PAPER = ("bleu_1", "bleu_4", "meteor", "rouge_l", "cider_d")
WRITTEN = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "meteor", "rouge_l", "cider_d")
GREEDY = ("greedy_cider_d", "val_cider_d", "words")
MASKS = ("mask_mean", "mask_spread", "divergence")
LOOKED = ("tau_removal_before", "tau_removal", "tau_removal_masks", "tau_gradient_masks")
TRUTH = ("mass_inside_before", "mass_inside", "pointing_before", "pointing", "val_pointing")
COST = ("parameters", "seconds")
SWEPT = ("cider_d", "val_cider_d", *MASKS, *TRUTH, *LOOKED)
EPOCHS = {"a2-coco": 20, "a2-scenes": 6, "a2-flickr8k": 6}  # of the critic; the paper states none
FIRST = "a2-3"


def tables() -> tuple[Table, ...]:
    """Tables 1 and 3, figure 4, and the two sets that can be had."""
    return (
        Table(
            "a2-1",
            "Attention-Aligned Transformer, Table 1: COCO, cross-entropy and the critic.",
            (
                *_rows(("none", "gate"), a2.a2_coco, home=FIRST),
                *_critics(("none", "gate"), a2.a2_coco),
            ),
            PAPER,
            stem="a2-1",
        ),
        Table(
            FIRST,
            "Attention-Aligned Transformer, Table 3: COCO, the four fusions.",
            _rows(a2.FUSIONS, a2.a2_coco),
            (*PAPER, *MASKS),
        ),
        Table(
            "a2-scenes",
            "Captions of scenes: the fusions, placebos, the critic, and where words look.",
            (
                *_rows(a2.rows(), a2.a2_scenes),
                *_critics(a2.FUSIONS, a2.a2_scenes),
                *_critics_of_beams(("none", "gate"), a2.a2_scenes),
            ),
            (*WRITTEN, *GREEDY, *TRUTH, *MASKS, *LOOKED, *COST),
        ),
        Table(
            "a2-fig4",
            "Attention-Aligned Transformer, figure 4, on scenes: lambda, masks and captions.",
            tuple(
                Row(f"gate-{one}", a2.a2_scenes, ("align.fuse=gate", f"align.penalty={one}"))
                for one in a2.PENALTIES
            ),
            SWEPT,
            stem="a2-fig4",
        ),
        Table(
            "a2-flickr8k",
            "Captions of Flickr8k: the fusions, placebos and the critic.",
            (
                *_rows(a2.rows(), a2.a2_flickr8k),
                *_critics(a2.FUSIONS, a2.a2_flickr8k),
                *_critics_of_beams(("none", "gate"), a2.a2_flickr8k),
            ),
            (*WRITTEN, *GREEDY, *MASKS, *LOOKED, *COST),
        ),
    )


def _rows(labels: Iterable[str], make: Callable[[], A2Recipe], home: str = "") -> tuple[Row, ...]:
    return tuple(Row(label, make, a2.rows()[label], home) for label in labels)


def _critics(labels: Iterable[str], make: Callable[[], A2Recipe]) -> tuple[Row, ...]:
    epochs = EPOCHS[make().name]
    return tuple(Row(f"{label}-critic", make, a2.critical(label, epochs)) for label in labels)


def _critics_of_beams(labels: Iterable[str], make: Callable[[], A2Recipe]) -> tuple[Row, ...]:
    epochs = EPOCHS[make().name]
    return tuple(
        Row(f"{label}-beams-critic", make, (*a2.critical(label, epochs), *a2.OF_BEAMS))
        for label in labels
    )
