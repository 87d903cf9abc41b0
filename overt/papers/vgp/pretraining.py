"""Attending Self-Attention: pretrain on single captions, before fine-tuning on pairs of them.

The paper starts from a published VL-BERT, pretrained on Conceptual Captions; "original" in its
table is that network. Here a network is pretrained on scenes of another world, or on Flickr8k
captions of photos that are not in Flickr30k Entities.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.losses import SupervisedModel, forgetting
from overt.nn.vlbert.model import VLBert
from overt.nn.vlbert.pretraining import (
    PretrainingHeads,
    content_size,
    mask_words,
    pretraining_losses,
    word_logits,
)
from overt.papers.vgp.in_memory import TextsInMemory
from overt.train import Losses, Progress


@dataclass(frozen=True, eq=False)
class PretrainingTexts:
    """Single captions of images, the id of the mask token, and the first id of a word."""

    texts: TextsInMemory
    mask: int
    specials: int


@dataclass(frozen=True, eq=False)
class PretrainingStep:
    """A training step on masked words, masked regions, and the match of caption and image."""

    data: PretrainingTexts
    share: float

    def __call__(self, net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        """Return the three losses, each with its own count."""
        assert isinstance(net, SupervisedModel)
        model, heads = cast(VLBert, net.model), cast(PretrainingHeads, net.heads)
        about = self.data
        found = pretraining_losses(model, heads, batch, about.mask, self.share, about.specials)
        return {"model": found}


def pretraining_heads(net: VLBert, texts: TextsInMemory) -> PretrainingHeads:
    """Build the predictions beside the network, for the regions of these texts."""
    return PretrainingHeads(net.sizes.width, content_size(texts.batch([0])))


def masked_word_score(
    data: PretrainingTexts, share: float, generator: torch.Generator
) -> Callable[[nn.Module, Batch], Tensor]:
    """Return the log-likelihood of words sampled from the predictions for masked words.

    The Fisher information of this score says which weights pretraining used.
    """

    def score(model: nn.Module, batch: Batch) -> Tensor:
        net = cast(VLBert, model)
        assert batch.tokens is not None and batch.token_mask is not None
        marks = (batch.tokens == net.sizes.begin) | (batch.tokens == net.sizes.end)
        words = batch.token_mask & ~marks
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        with torch.random.fork_rng(devices=[batch.tokens.device] if batch.tokens.is_cuda else []):
            torch.manual_seed(seed)
            tokens, chosen = mask_words(
                batch.tokens, words, data.mask, net.sizes.vocabulary, share, data.specials
            )
        output = net(replace(batch, tokens=tokens))
        logits = word_logits(net, output.text()[chosen])
        found = forgetting.sampled_log_likelihood(logits, generator)
        sample = chosen.nonzero()[:, 0]
        return found.new_zeros(len(tokens)).index_add(0, sample, found)

    return score
