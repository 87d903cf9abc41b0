"""Tables of Attention-Aligned Transformer.

Tables 1 and 3 use COCO and follow the paper; Table 2 comes from a test server. Scenes and Flickr8k
have one table each with every fusion, placebos of the gate, both presets, and rows that continue
with the critic, on sampled captions or on beams. A row with the critic starts from the captioner of
the row without it, once that run is finished in the same folder.
"""

from collections.abc import Callable, Iterable

from overt.experiments.table import RowSpec, TableSpec, rows_of
from overt.papers.a2 import config as a2
from overt.papers.a2.config import A2Recipe

PAPER = ("bleu_1", "bleu_4", "meteor", "rouge_l", "cider_d")
WRITTEN = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "meteor", "rouge_l", "cider_d")
GREEDY = ("greedy_cider_d", "val_cider_d", "words")
MASKS = ("mask_mean", "mask_spread", "divergence")
LOOKED = ("tau_removal_before", "tau_removal", "tau_removal_masks", "tau_gradient_masks")
TRUTH = ("mass_inside_before", "mass_inside", "pointing_before", "pointing", "val_pointing")
ORACLE = ("mass_inside_oracle", "pointing_oracle", "oracle_gain")  # of the row `none`
COST = ("parameters", "seconds")
SWEPT = ("cider_d", "val_cider_d", *MASKS, *TRUTH, *LOOKED)
EPOCHS = {"a2-coco": 20, "a2-scenes": 6, "a2-flickr8k": 6}  # of the critic; not stated in the paper
FIRST = "a2-3"


def tables() -> tuple[TableSpec, ...]:
    """Return Tables 1 and 3, figure 4, and the tables of scenes and Flickr8k."""
    return (
        TableSpec(
            "a2-1",
            "Attention-Aligned Transformer, Table 1: COCO, cross-entropy and the critic.",
            (
                *rows_of(a2.a2_coco, a2.table_rows(), ("none", "gate"), FIRST),
                *_critics(("none", "gate"), a2.a2_coco),
            ),
            PAPER,
            stem="a2-1",
        ),
        TableSpec(
            FIRST,
            "Attention-Aligned Transformer, Table 3: COCO, the four fusions.",
            rows_of(a2.a2_coco, a2.table_rows(), a2.FUSIONS),
            (*PAPER, *MASKS),
        ),
        TableSpec(
            "a2-scenes",
            "Captions of scenes: fusions, placebos, the critic, and the attention of words.",
            _with_critics(a2.a2_scenes),
            (*WRITTEN, *GREEDY, *TRUTH, *ORACLE, *MASKS, *LOOKED, *COST),
        ),
        TableSpec(
            "a2-fig4",
            "Attention-Aligned Transformer, figure 4, on scenes: lambda, masks and captions.",
            tuple(
                RowSpec(f"gate-{one}", a2.a2_scenes, ("align.fuse=gate", f"align.penalty={one}"))
                for one in a2.PENALTIES
            ),
            SWEPT,
            stem="a2-fig4",
        ),
        TableSpec(
            "a2-flickr8k",
            "Captions of Flickr8k: fusions, placebos and the critic.",
            _with_critics(a2.a2_flickr8k),
            (*WRITTEN, *GREEDY, *MASKS, *LOOKED, *COST),
        ),
    )


def _with_critics(make: Callable[[], A2Recipe]) -> tuple[RowSpec, ...]:
    """Return every fusion and its controls, without and with the critic, and critics of beams."""
    return (
        *rows_of(make, a2.table_rows()),
        *_critics(a2.FUSIONS, make),
        *_critics(("none", "gate"), make, "-beams", a2.BEAM_CRITIC),
    )


def _critics(
    labels: Iterable[str],
    make: Callable[[], A2Recipe],
    kind: str = "",
    more: tuple[str, ...] = (),
) -> tuple[RowSpec, ...]:
    epochs = EPOCHS[make().name]
    return tuple(
        RowSpec(f"{label}{kind}-critic", make, (*a2.with_critic(label, epochs), *more))
        for label in labels
    )
