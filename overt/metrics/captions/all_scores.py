"""All caption metrics that do not need Java, computed from texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from overt.metrics.captions.bleu import Bleu, bleu
from overt.metrics.captions.cider import cider_d
from overt.metrics.captions.meteor import Meteor, meteor
from overt.metrics.captions.rouge import rouge_l
from overt.metrics.captions.tokenizer import tokenize_caption
from overt.metrics.captions.validation import check_texts
from overt.metrics.metric import SampleScores


@dataclass(frozen=True, eq=False)
class CaptionScores:
    """Scores of many captions; `table` has the scores of the whole set.

    BLEU and METEOR of a set are not means: for an interval, compute the table of resampled rows.
    CIDEr-D of a caption stays that of the whole set, where n-grams were counted; with a single
    image it is NaN (`cider_d`).

    Args:
        bleu: Statistics of BLEU.
        meteor: Statistics of METEOR.
        rouge_l: ROUGE-L of each caption.
        cider_d: CIDEr-D of each caption.

    Example:
        >>> import torch
    >>> scores = caption_scores(["a cat", "a dog"], [["a cat"], ["a red dog"]])
        >>> len(scores), len(scores.select(torch.tensor([0])))
        (2, 1)
    """

    bleu: Bleu
    meteor: Meteor
    rouge_l: SampleScores
    cider_d: SampleScores

    def __len__(self) -> int:
        return len(self.rouge_l)

    def select(self, rows: Int[Tensor, " m"]) -> "CaptionScores":
        """Select captions by index, in this order; an index may be repeated."""
        return CaptionScores(
            *(self.bleu.select(rows), self.meteor.select(rows)),
            *(self.rouge_l[rows], self.cider_d[rows]),
        )

    def table(self) -> dict[str, float]:
        """Return the scores of the set by name, without the factor 100 of published tables."""
        found = {f"BLEU-{n}": float(one) for n, one in enumerate(self.bleu.corpus(), start=1)}
        return found | {
            "METEOR (words and stems)": self.meteor.corpus(),
            "ROUGE-L": float(self.rouge_l.mean()),
            "CIDEr-D": float(self.cider_d.mean()),
        }


def caption_scores(
    candidates: Sequence[str],
    references: Sequence[Sequence[str]],
    words: Callable[[str], list[str]] = tokenize_caption,
) -> CaptionScores:
    """Score captions against references by BLEU, METEOR, ROUGE-L and CIDEr-D.

    Args:
        candidates: One caption per image, as strings.
        references: The references of each image.
        words: The tokenizer.

    Returns:
        The scores.

    Raises:
        ValueError: There are no captions, or they do not match the references.

    Example:
        >>> scores = caption_scores(["a cat", "a dog"], [["a cat"], ["a dog"]])
        >>> round(scores.table()["BLEU-1"], 3)
        1.0
    """
    check_texts(candidates, references)
    if not candidates:
        raise ValueError("expected at least 1 candidate, got 0")
    ours = [words(text) for text in candidates]
    theirs = [[words(text) for text in texts] for texts in references]
    return CaptionScores(
        bleu(ours, theirs), meteor(ours, theirs), rouge_l(ours, theirs), cider_d(ours, theirs)
    )
