"""All measures of captions that need no Java, of texts, at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from overt.measure.captions.bleu import Bleu, bleu
from overt.measure.captions.cider import cider_d
from overt.measure.captions.meteor import Meteor, meteor
from overt.measure.captions.rouge import rouge_l
from overt.measure.captions.tokens import caption_words
from overt.measure.measured import Measured


@dataclass(frozen=True, eq=False)
class CaptionScores:
    """The measures of many captions; `table` has the numbers of the whole set.

    BLEU and METEOR of a set are no means: for an interval, take the table of rows that are drawn.
    CIDEr-D of a caption stays what it was in the whole set, where words were counted.
    """

    bleu: Bleu
    meteor: Meteor
    rouge_l: Measured
    cider_d: Measured

    def __len__(self) -> int:
        return len(self.rouge_l)

    def select(self, rows: Int[Tensor, " m"]) -> "CaptionScores":
        """The captions named, in their order; one may be named twice."""
        return CaptionScores(
            *(self.bleu.select(rows), self.meteor.select(rows)),
            *(self.rouge_l[rows], self.cider_d[rows]),
        )

    def table(self) -> dict[str, float]:
        """The numbers of a set by name, as shares: published tables have them times 100."""
        found = {f"BLEU-{n}": float(one) for n, one in enumerate(self.bleu.corpus(), start=1)}
        return found | {
            "METEOR (words and stems)": self.meteor.corpus(),
            "ROUGE-L": float(self.rouge_l.mean()),
            "CIDEr-D": float(self.cider_d.mean()),
        }


def caption_scores(
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    words: Callable[[str], list[str]] = caption_words,
) -> CaptionScores:
    """Score texts against the texts of people; `words` takes a text apart."""
    if not candidates or len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates for {len(references)} sets of references")
    ours = [words(text) for text in candidates]
    theirs = [[words(text) for text in texts] for texts in references]
    return CaptionScores(
        bleu(ours, theirs), meteor(ours, theirs), rouge_l(ours, theirs), cider_d(ours, theirs)
    )
