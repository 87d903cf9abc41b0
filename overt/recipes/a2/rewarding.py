"""The reward of self-critical training, on a card or off it, and the seconds that it takes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from overt.data.batch import Batch
from overt.measure.captions.beside import MOST, Beside, in_one
from overt.measure.captions.cider import Consensus, Ids
from overt.recipes.a2.data import Pictures
from overt.supervise import reward
from overt.train.recording import Card, Record, Recorder


@dataclass
class Clock:
    """Seconds of self-critical training, and those of them that its reward took.

    Validations are not counted. A run that goes on counts anew: only the share means something.
    """

    reward: float = 0.0
    aside: float = 0.0
    begun: float | None = None
    until: float = 0.0

    def step(self) -> None:
        """Say that a step begins: what came before it is done."""
        self.until = time.perf_counter()
        if self.begun is None:
            self.begun, self.aside = self.until, 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time go by."""
        before = time.perf_counter()
        yield
        self.aside += time.perf_counter() - before

    def marks(self) -> dict[str, float]:
        """All seconds and the reward's; nothing without a second stage."""
        if self.begun is None or self.until == self.begun:
            return {}
        return {"critic": self.until - self.begun - self.aside, "reward": self.reward}


Judge = Callable[[Tensor, Tensor, Tensor], Tensor]  # of tokens, their mask and images: scores


def by_searching(references: Sequence[Sequence[Ids]]) -> Judge:
    """CIDEr-D on a CPU, by sorting and searching."""
    consensus = Consensus(references)

    def judge(tokens: Tensor, mask: Tensor, images: Tensor) -> Tensor:
        rows, lengths = tokens.cpu().numpy(), mask.sum(dim=1).tolist()
        texts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        return torch.from_numpy(consensus(texts, images.tolist())).to(tokens.device)

    return judge


def by_comparing(references: Sequence[Sequence[Ids]], device: torch.device) -> Judge:
    """The same where captions lie on a card: they stay there."""
    return Beside(references).to(device)


def usual_judge(data: Pictures) -> Judge:
    """What scores captions of this data: on its card, where there is one and its ids fit there."""
    device = data.tokens.device
    if device.type == "cuda" and int(data.tokens.max()) < MOST:
        return by_comparing(data.texts(), device)
    return by_searching(data.texts())


class Reward:
    """CIDEr-D of captions against those of their training pictures, on tokens, the end among them.

    With the end as a word, captions that break off ("a dog with a") do not pay. `judge` scores; by
    default on the device of the data, where captions are.
    """

    def __init__(self, data: Pictures, clock: Clock, judge: Judge | None = None) -> None:
        self.at = {name: number for number, name in enumerate(data.ids)}
        self.clock, self.device = clock, data.tokens.device
        self.judge = judge or usual_judge(data)

    def __call__(self, drawn: Sequence[reward.Drawn], pictures: Batch) -> list[Tensor]:
        """The reward of each caption of each of these lots, a row a picture."""
        self._wait()  # for what the device still has to do: that is not the reward's time
        begun = time.perf_counter()
        at = [self.at[name.partition("#")[0]] for name in pictures.ids]
        images = [one for lot in drawn for one in at for _ in range(len(lot.tokens) // len(at))]
        found = self.judge(
            in_one([one.tokens for one in drawn]),
            in_one([one.mask for one in drawn]),
            torch.tensor(images, device=self.device),
        )
        parts = found.split([len(one.tokens) for one in drawn])
        self._wait()
        self.clock.reward += time.perf_counter() - begun
        return [one.reshape(len(pictures), -1) for one in parts]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def recorded_judge(judge: Judge, record: Record[Tensor] | None = None) -> Judge:
    """The same scores, from recordings on a card; those of the time before are written over."""
    recorder: Recorder[tuple[Tensor, ...], Tensor] = Recorder(
        lambda given: judge(*given), (), record or Card().record, warm=1
    )
    return lambda tokens, mask, images: recorder((tokens, mask, images))
