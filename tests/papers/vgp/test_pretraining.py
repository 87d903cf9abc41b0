"""Pretraining of a run: its step, and the importance of weights for masked words."""

import torch

from overt.data.scenes.captions import CaptionScenes
from overt.data.vocabulary import MASK, SPECIAL
from overt.losses import SupervisedModel, forgetting
from overt.papers.vgp.in_memory import TextsInMemory
from overt.papers.vgp.pretraining import (
    PretrainingStep,
    PretrainingTexts,
    masked_word_score,
    pretraining_heads,
)
from overt.train import Progress
from tests.papers.vgp import small


def captions() -> PretrainingTexts:
    source = CaptionScenes("train", 5, 8, size=32, regions=10, each=1)
    return PretrainingTexts(TextsInMemory.of(source), MASK, len(SPECIAL))


def test_a_step_has_the_three_losses_of_pretraining() -> None:
    data, net = captions(), small.net()
    supervised = SupervisedModel(net, heads=pretraining_heads(net, data.texts))
    step = PretrainingStep(data, 0.3)
    found = step(supervised, data.texts.batch(range(8)), Progress(0, 1, 0))["model"]
    assert set(found) == {"match", "words", "regions"}
    assert all(float(one.total.detach()) > 0 for one in found.values())


def test_importance_is_that_of_masked_words() -> None:
    """One number per sample, the same for the same generator, and no weight of the classifier."""
    data, net = captions(), small.net().eval()
    batch = data.texts.batch(range(4))
    before = torch.get_rng_state()
    scores = [
        masked_word_score(data, 0.5, torch.Generator().manual_seed(1))(net, batch) for _ in range(2)
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert scores[0].shape == (4,) and torch.equal(*scores) and (scores[0] < 0).all()
    fisher = forgetting.fisher_diagonal(
        net, [batch], masked_word_score(data, 0.5, torch.Generator().manual_seed(1))
    )
    assert (fisher["answer.decision.weight"] == 0).all() and (fisher["word.weight"] > 0).any()
