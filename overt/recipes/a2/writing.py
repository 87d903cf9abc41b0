"""Captions that one captioner writes again and again: on a card, from a recording of all of it.

A small captioner writes a caption in some hundred launches a token, and Python sends them off one
after another. Training by reward and validation ask for captions of the same shapes each time.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from overt.data.batch import Batch
from overt.models.captioning.captioner import Memory
from overt.models.captioning.decoding import (
    Rules,
    Texts,
    beams,
    greedy,
    sample,
    sample_beside_greedy,
)
from overt.recipes.a2.networks import Net
from overt.recipes.a2.recipe import Baseline, Critic, Written
from overt.train.recording import Card, Record, Recorder

Write = Callable[[Memory], tuple[Texts, ...]]


def usual(model: Net, rules: Rules) -> Write:
    """The greedy caption of every picture."""
    return lambda memory: (greedy(model, _about(memory), rules, memory),)


def drawing(model: Net, critic: Critic, rules: Rules) -> Write:
    """Captions by chance or by beams; before them, where they are the baseline, the greedy ones."""
    draws, against_greedy = critic.draws, critic.baseline is Baseline.GREEDY

    def best(memory: Memory) -> tuple[Texts, ...]:
        found = beams(model, _about(memory), draws, rules, memory)
        return (*usual(model, rules)(memory), found) if against_greedy else (found,)

    def beside(memory: Memory) -> tuple[Texts, ...]:
        drawn, alone = sample_beside_greedy(model, _about(memory), draws, rules, memory)
        return alone, drawn

    def by_chance(memory: Memory) -> tuple[Texts, ...]:
        return (sample(model, _about(memory), draws, rules=rules, features=memory),)

    if critic.written is Written.BEAMS:
        return best
    return beside if against_greedy else by_chance


def _about(memory: Memory) -> Batch:
    """As many samples as there are memories: what decoders are told of a batch."""
    return Batch(("",) * len(memory), features=memory.states)


def _bare(texts: tuple[Texts, ...]) -> tuple[Texts, ...]:
    """The texts without what was looked at."""
    return tuple(replace(one, attention=()) for one in texts)


def recorded(write: Write, record: Record[tuple[Texts, ...]] | None = None) -> Write:
    """The same captions, from recordings on a card, one for each form of memory.

    The first time a form is written about as it always is. Texts are as long as the rules allow,
    padded, and without attention; those of the time before are written over.
    """
    recorder: Recorder[Memory, tuple[Texts, ...]] = Recorder(
        lambda memory: _bare(write(memory)), (), record or Card().record, warm=1
    )
    return torch.no_grad()(recorder)
