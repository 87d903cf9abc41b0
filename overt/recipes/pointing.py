"""Asking a network that ties words to boxes: what of a picture each word of a caption means."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput
from overt.recipes.feeding import divided

if TYPE_CHECKING:
    from overt.attention import AttentionMap, Layout
    from overt.data.batch import Batch
    from overt.models.vlbert.model import Understood

MAPS = {
    "raw": "what each word takes from each box, of all that it takes from boxes",
    "gradient": "how much the answer hangs on each box and word",
    "rollout": "how much of each box reaches each word after all layers",
}
TITLE = "from words to boxes"
ALONE = (
    "Click a word to see which boxes it means. Write two captions, a line each, and the network "
    "says which of them describe the picture."
)


def pointed(
    output: "Understood", batch: "Batch", way: str
) -> tuple[dict[str, "AttentionMap"], list[str]]:
    """The rows of the words over the boxes, of every layer and head, and how much they share.

    Rows are shares among the boxes: what goes to other words is left out, and told.
    """
    from overt.capture.derived import rolling

    assert output.seen is not None and output.features is not None
    whole = rolling.rollout(output.seen) if way == "rollout" else output.seen.map()
    rows = output.features.words[0].nonzero()[:, 0]
    keys = whole.keys.find("regions").index
    onto = whole.weights[0][:, :, rows][..., keys].sum(dim=-1)
    block = whole.between("text", "regions")
    found = replace(
        block,
        values=block.values[:, :, :, rows],
        queries=words_of(batch, rows),
        mask=None if block.mask is None else _rows(block.mask, rows),
    )
    where = "After all layers" if way == "rollout" else "In the last layer"
    part = float(onto[-1].mean())
    note = f"{where} {part:.0%} of what words take comes from boxes; this is all of that."
    return {TITLE: found}, [note]


def answers(known: Any, text: str, chances: Any) -> tuple[list[tuple[str, float]], list[str]]:
    """Which of two captions describe the picture; of one caption nothing is answered."""
    if len(divided(text)) < 2:
        return [], [ALONE]
    order = chances.argsort(descending=True).tolist()
    return [(known.answers[at], float(chances[at])) for at in order], []


def check(text: str | None) -> None:
    """Refuse to explain an answer that is not given."""
    if text is not None and len(divided(text)) < 2:
        raise BadInput(
            "a gradient explains an answer, and of one caption there is none; write two, a line "
            "each, or ask for the map raw."
        )


def words_of(batch: "Batch", rows: Any) -> "Layout":
    """An axis of these tokens of a batch's text."""
    from overt.attention import words
    from overt.geometry import TextGeometry

    assert batch.text is not None
    geometry = TextGeometry(batch.text.texts, batch.text.spans[:, rows])
    return words(len(rows), geometry=geometry)


def _rows(mask: Any, rows: Any) -> Any:
    return mask if mask.shape[1] == 1 else mask[:, rows]
