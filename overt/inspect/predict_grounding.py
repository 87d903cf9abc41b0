"""Ground the words of a caption in boxes of an image."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overt.errors import UserError
from overt.inspect.collate import split_captions

if TYPE_CHECKING:
    from overt.attention import AttentionMap, Layout
    from overt.data.batch import Batch
    from overt.nn.vlbert.model import VLBertOutput

MAPS = {
    "attention": "attention of each word on each box, renormalized over boxes",
    "gradient": "gradient of the answer with respect to each box and word",
    "rollout": "attention rollout from boxes to words",
}
TITLE = "from words to boxes"
SINGLE_CAPTION_NOTE = (
    "Click a word to see its boxes. Give two captions, one per line, to see which of them match "
    "the image."
)


def word_region_maps(
    output: "VLBertOutput", batch: "Batch", method: str
) -> tuple[dict[str, "AttentionMap"], list[str]]:
    """Return the attention from words to boxes, of every layer and head, and a note.

    Rows are renormalized over boxes; the note states how much weight is on boxes.
    """
    from overt.attribution import attention_rollout

    assert output.trace is not None and output.features is not None
    whole = attention_rollout.rollout(output.trace) if method == "rollout" else output.trace.map()
    rows = output.features.words[0].nonzero()[:, 0]
    keys = whole.keys.find("regions").index
    onto = whole.weights[0][:, :, rows][..., keys].sum(dim=-1)
    block = whole.between("text", "regions")
    found = replace(
        block,
        values=block.values[:, :, :, rows],
        queries=word_layout(batch, rows),
        mask=None if block.mask is None else _rows(block.mask, rows),
    )
    where = "After all layers" if method == "rollout" else "In the last layer"
    part = float(onto[-1].mean())
    note = f"{where}, {part:.0%} of the attention of words is on boxes; only that is shown."
    return {TITLE: found}, [note]


def caption_answers(
    known: Any, text: str, chances: Any
) -> tuple[list[tuple[str, float]], list[str]]:
    """Return which of two captions match the image; empty for one caption."""
    if len(split_captions(text)) < 2:
        return [], [SINGLE_CAPTION_NOTE]
    order = chances.argsort(descending=True).tolist()
    return [(known.answers[at], float(chances[at])) for at in order], []


def check_two_captions(text: str | None) -> None:
    """Raise unless there are two captions, since one caption has no answer to explain."""
    if text is not None and len(split_captions(text)) < 2:
        raise UserError(
            "A gradient map explains an answer, and one caption has none: give two captions, one "
            "per line, or use the map attention."
        )


def word_layout(batch: "Batch", rows: Any) -> "Layout":
    """Return the layout of these tokens of a batch's text."""
    from overt.attention import words
    from overt.geometry import TextGeometry

    assert batch.text is not None
    geometry = TextGeometry(batch.text.texts, batch.text.spans[:, rows])
    return words(len(rows), geometry=geometry)


def _rows(mask: Any, rows: Any) -> Any:
    return mask if mask.shape[1] == 1 else mask[:, rows]
