"""Captions that one captioner writes again and again: on a card, from a recording of all of it.

A small captioner writes a caption in some hundred launches a token, and Python sends them off one
after another. Training by reward and validation ask for captions of the same shapes each time.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from overt.data.batch import Batch
from overt.errors import BadInput
from overt.models.captioning.captioner import Memory
from overt.models.captioning.decoding import Rules, Texts, greedy, sample, sample_beside_greedy
from overt.recipes.a2.networks import Net
from overt.recipes.a2.recipe import Baseline, Critic
from overt.train.recording import Card, Record, Replay

Write = Callable[[Memory], tuple[Texts, ...]]


def usual(model: Net, rules: Rules) -> Write:
    """The greedy caption of every picture."""
    return lambda memory: (greedy(model, _about(memory), rules, memory),)


def drawing(model: Net, critic: Critic, rules: Rules) -> Write:
    """Captions by chance; before them, where they are the baseline, the greedy ones."""
    draws = critic.draws

    def beside(memory: Memory) -> tuple[Texts, ...]:
        drawn, alone = sample_beside_greedy(model, _about(memory), draws, rules, memory)
        return alone, drawn

    def by_chance(memory: Memory) -> tuple[Texts, ...]:
        return (sample(model, _about(memory), draws, rules=rules, features=memory),)

    return beside if critic.baseline is Baseline.GREEDY else by_chance


def _about(memory: Memory) -> Batch:
    """As many samples as there are memories: what decoders are told of a batch."""
    return Batch(("",) * len(memory), features=memory.states)


@dataclass(frozen=True, eq=False)
class _Recording:
    """Where the memory lies, and the texts that each replay writes anew."""

    memory: Memory
    replay: Replay
    texts: tuple[Texts, ...]


class Recorded:
    """Writes as `write` does, on a card from a recording for each shape of memory.

    The first time a shape is written about as it always is. Texts are as long as the rules allow,
    padded, and without attention; those of the time before are written over.
    """

    def __init__(self, write: Write, record: Record[tuple[Texts, ...]]) -> None:
        self.write, self.record = write, record
        self._known: set[Hashable] = set()
        self._kept: dict[Hashable, _Recording] = {}

    @torch.no_grad()
    def __call__(self, memory: Memory) -> tuple[Texts, ...]:
        """Captions of these pictures."""
        key = (memory.states.shape, memory.states.dtype, memory.present is None)
        known = self._kept.get(key)
        if known is None:
            if key not in self._known:
                self._known.add(key)
                return _bare(self.write(memory))
            known = self._kept[key] = self._recorded(memory)
        known.memory.states.copy_(memory.states)
        if known.memory.present is not None and memory.present is not None:
            known.memory.present.copy_(memory.present)
        known.replay()
        return known.texts

    def _recorded(self, memory: Memory) -> _Recording:
        present = None if memory.present is None else memory.present.clone()
        still = replace(memory, states=memory.states.clone(), present=present)
        try:
            replay, texts = self.record(lambda: _bare(self.write(still)))
        except RuntimeError as problem:
            raise BadInput(  # the card's random numbers are of no use after it: no way to go on
                "these captions wait for the card and cannot be recorded; set train.graph=false "
                f"({str(problem).splitlines()[0]})"
            ) from problem
        return _Recording(still, replay, texts)


def _bare(texts: tuple[Texts, ...]) -> tuple[Texts, ...]:
    """The texts without what was looked at."""
    return tuple(replace(one, attention=()) for one in texts)


def recorded(write: Write) -> Recorded:
    """The same captions, from CUDA graphs that share their memory."""
    return Recorded(write, Card().record)
