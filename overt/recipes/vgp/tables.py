"""The table of grounded supervision, and the same ways with controls on scenes and photos.

Table 1 is of VQA v2 and RefCOCO+, after tuning on Flickr30k Entities. On scenes its columns have
stand-ins: questions, and referring expressions with detected and with true boxes. `vgp-1` shows
these columns of the runs of `vgp-scenes`: give both tables one `--out`.
"""

from overt.recipes.comparison import Row, Table
from overt.recipes.vgp import recipe as vgp

CAPTIONS = ("identification", "paraphrase", "paraphrase_f1")
LOOKED = (
    "grounding_accuracy",
    "grounding_accuracy_best",
    "grounding_mass",
    "reach",
    "pointing",
)
AFTER = ("answers", "located_detected", "located_true", "located_all")
IN_TABLE_1 = ("none", "indirect", "direct", "semi-direct", "original")
HOME = "vgp-scenes"


def tables() -> tuple[Table, ...]:
    """Table 1 on scenes, all ways on scenes, and all ways on photos."""
    return (
        Table(
            "vgp-1",
            "Attending Self-Attention, Table 1, with scenes in the place of VQA v2 and RefCOCO+.",
            tuple(Row(label, vgp.vgp_scenes, vgp.ROWS[label], HOME) for label in IN_TABLE_1),
            AFTER[:3],
            stem="vgp-1",
        ),
        Table(
            HOME,
            "Ways to supervise attention on scenes, with placebos, and tasks afterwards.",
            tuple(Row(label, vgp.vgp_scenes, changes) for label, changes in vgp.ROWS.items()),
            (*CAPTIONS, *LOOKED, *AFTER, "seconds"),
        ),
        Table(
            "vgp-entities",
            "Ways to supervise attention on photos, from MiniLM, with placebos.",
            tuple(
                Row(label, vgp.vgp_entities, changes)
                for label, changes in {**vgp.ROWS, **vgp.AGAINST}.items()
            ),
            (*CAPTIONS, *LOOKED, "seconds"),
        ),
    )
