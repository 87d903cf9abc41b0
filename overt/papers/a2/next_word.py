"""Attention-Aligned Transformer: next-word prediction, so that a captioner can have a scorecard.

A caption has no single answer and no single map, but each of its words has both, given the words
before it: the next word is a class, and its attention row is a map. So a sample is one word of a
human caption, in its position, of a test image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, AttentionMap, words
from overt.data.batch import Batch
from overt.data.scenes.captions import CaptionScenes
from overt.experiments.dataset_views import DatasetView
from overt.metrics.rng import derive_seed
from overt.nn.captioning.captioner import Memory
from overt.nn.output import Output
from overt.papers.a2.data import CaptionedImages
from overt.papers.a2.model import AlignedCaptioner, CaptionerNet, inner_captioner


class NextWordDataset(DatasetView[CaptionedImages]):
    """One word of one caption per image, to be predicted from the words before it.

    If the regions of words are known, a word that refers to some is chosen, and `target` holds
    them. The word is chosen by a hash of the image id. `labels` are word ids.
    """

    def __init__(self, data: CaptionedImages, truth: CaptionScenes | None = None) -> None:
        super().__init__(data)
        self.truth = truth

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return one sample per image: the words before, and the next word as its label."""
        whole = super().batch(indices)
        known = None if self.truth is None else self.truth.batch(indices).target
        assert whole.tokens is not None and whole.token_mask is not None
        rows, places = self._drawn(whole, known, indices)
        device = whole.tokens.device
        at, place = torch.tensor(rows, device=device), torch.tensor(places, device=device)
        seen = torch.arange(whole.tokens.shape[1], device=device) < place[:, None]
        target = None if known is None else _word_target(known, at.cpu(), place.cpu()).to(device)
        chosen = replace(whole.select(at), references=None, target=target)
        # The next word and all after it become padding.
        return replace(
            chosen,
            tokens=whole.tokens[at].where(seen, 0),
            token_mask=seen,
            labels=whole.tokens[at, place],
        )

    def _drawn(
        self, whole: Batch, known: AttentionMap | None, indices: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the caption row and the word position chosen for every image."""
        assert whole.token_mask is not None
        lengths = whole.token_mask.sum(dim=1).tolist()
        has_region = None if known is None else known.rows.tolist()
        of = whole.image_index.tolist()
        rows, places = [], []
        for number, index in enumerate(indices):
            # The first token of a caption is begin and the last is end; what is left are words.
            found = [
                (row, place)
                for row, picture in enumerate(of)
                if picture == number
                for place in range(1, lengths[row] - 1)
                if has_region is None or has_region[row][place]
            ]
            # If no word refers to a region, take the first one.
            found = found or [(of.index(number), 1)]
            row, place = found[derive_seed("word", self.data.ids[int(index)]) % len(found)]
            rows.append(row)
            places.append(place)
        return rows, places


def _word_target(
    target: AttentionMap, rows: Int[Tensor, " n"], places: Int[Tensor, " n"]
) -> AttentionMap:
    """Return the ground truth of one word of each of these captions."""
    chosen = target.select(rows)
    each = torch.arange(len(rows))
    # The index arrays are separated by slices, so their axis comes first: (n, layers, heads, keys).
    # One query axis is put back.
    values = chosen.values[each, :, :, places][:, :, :, None]
    return replace(
        chosen, values=values, queries=GLOBAL_QUERY, mask=chosen.visible[each, places][:, None]
    )


@dataclass(frozen=True, eq=False)
class PartialCaptions:
    """Encoded images, and the words of a caption of each so far."""

    memory: Memory
    tokens: Int[Tensor, "b n"]
    last: Int[Tensor, " b"]


class NextWordClassifier(nn.Module):
    """A captioner as a classifier of the next word, with the attention row it is generated from.

    A mask hides regions from all words, as `Captioner.start` does.
    """

    def __init__(self, captioner: CaptionerNet) -> None:
        super().__init__()
        self.captioner = captioner

    def encode(self, batch: Batch) -> PartialCaptions:
        """Encode the images and keep the words so far."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError(
                "predicting the next word needs batch.tokens and batch.token_mask, got None"
            )
        # The last word so far predicts the next one.
        last = batch.token_mask.sum(dim=1) - 1
        return PartialCaptions(inner_captioner(self.captioner).encode(batch), batch.tokens, last)

    def decide(self, features: PartialCaptions, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return the logits of the next word of every sample, and its attention."""
        model, captions = self.captioner, features
        memory = captions.memory.without(mask)
        if isinstance(model, AlignedCaptioner):
            with model.aligned() as trace:
                output = inner_captioner(self.captioner).decode_captions(memory, captions.tokens)
            attention = trace.after((words(captions.tokens.shape[1]), memory.layout))
        else:
            output = inner_captioner(self.captioner).decode_captions(memory, captions.tokens)
            attention = output.attention
        each = torch.arange(len(captions.tokens), device=captions.tokens.device)
        # The axes are those of `_word_target`.
        values = attention.values[each, :, :, captions.last][:, :, :, None]
        hidden = attention.visible[each, captions.last][:, None]
        one = replace(attention, values=values, queries=GLOBAL_QUERY, mask=hidden)
        return Output(output.logits[each, captions.last], (one,))

    def forward(self, batch: Batch) -> Output:
        """Return the logits and the attention of the next word."""
        return self.decide(self.encode(batch))
