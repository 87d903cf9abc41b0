"""Tables of Attending Self-Attention, and all methods with controls on scenes and photos.

Table 1 uses VQA v2 and RefCOCO+, after fine-tuning on Flickr30k Entities. On scenes its columns
have stand-ins: questions, and referring expressions with detected and with true boxes. `vgp-1`
shows these columns of the runs of `vgp-scenes`: give both tables one `--out`.
"""

from overt.experiments.table import TableSpec, rows_of
from overt.papers.vgp import config as vgp

CAPTIONS = ("identification", "paraphrase", "paraphrase_f1")
GROUNDING = (
    *("grounding_accuracy", "grounding_accuracy_best", "grounding_mass"),
    *("reach", "pointing"),
)
DOWNSTREAM = ("answers", "located_detected", "located_true", "located_all")
IN_TABLE_1 = ("none", "indirect", "direct", "semi-direct", "original")
HOME = "vgp-scenes"


def tables() -> tuple[TableSpec, ...]:
    """Return Table 1 on scenes, and all methods on scenes and photos, also pretrained."""
    return (
        TableSpec(
            "vgp-1",
            "Attending Self-Attention, Table 1, with scenes instead of VQA v2 and RefCOCO+.",
            rows_of(vgp.vgp_scenes, vgp.ROWS, IN_TABLE_1, HOME),
            DOWNSTREAM[:3],
            stem="vgp-1",
        ),
        TableSpec(
            HOME,
            "Supervision methods on scenes, with placebos, and downstream tasks.",
            rows_of(vgp.vgp_scenes, {**vgp.ROWS, **vgp.MATCHER_ROWS}),
            (*CAPTIONS, *GROUNDING, *DOWNSTREAM, "seconds"),
        ),
        TableSpec(
            "vgp-entities",
            "Supervision methods on photos, from MiniLM, with placebos.",
            rows_of(
                vgp.vgp_entities,
                {**vgp.ROWS, **vgp.MATCHER_ROWS, **vgp.PUBLISHED_CODE_ROWS, **vgp.FORGETTING_ROWS},
            ),
            (*CAPTIONS, *GROUNDING, "seconds"),
        ),
        TableSpec(
            "vgp-scenes-pretrained",
            "Supervision and regularization on scenes, all from one pretrained network per seed.",
            rows_of(vgp.vgp_scenes_pretrained, vgp.PRETRAINED_ROWS),
            (*CAPTIONS, *GROUNDING, *DOWNSTREAM, "seconds"),
        ),
        TableSpec(
            "vgp-entities-pretrained",
            "Supervision and regularization on photos, all from one pretrained network per seed.",
            rows_of(vgp.vgp_entities_pretrained, vgp.PRETRAINED_ROWS),
            (*CAPTIONS, *GROUNDING, "seconds"),
        ),
    )
