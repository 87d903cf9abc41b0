"""Attention-Aligned Transformer: the CIDEr-D reward of self-critical training, on CPU or GPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from overt.data.batch import Batch
from overt.losses import caption_reward
from overt.metrics.captions.cider import CiderDScorer, Ids
from overt.metrics.captions.cider_gpu import MAX_IDS, CiderDScorerGPU, pad_and_concatenate
from overt.papers.a2.data import CaptionedImages
from overt.train.cuda_graph import CaptureFunction, GraphCapture, GraphedFunction


@dataclass
class RewardTimer:
    """Seconds of self-critical training, and the part spent on the reward.

    Validation is excluded. A resumed run counts from zero: only the ratio is meaningful.
    """

    reward: float = 0.0
    aside: float = 0.0
    begun: float | None = None
    until: float = 0.0

    def step(self) -> None:
        """Mark the start of a step."""
        self.until = time.perf_counter()
        # A validation before the first step is not part of the training time.
        if self.begun is None:
            self.begun, self.aside = self.until, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside."""
        before = time.perf_counter()
        yield
        self.aside += time.perf_counter() - before

    def summary(self) -> dict[str, float]:
        """Return the seconds of the critic and of the reward; empty without a second stage."""
        if self.begun is None or self.until == self.begun:
            return {}
        return {"critic": self.until - self.begun - self.aside, "reward": self.reward}


ScoreFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens, their mask, image indices -> scores


def cpu_scorer(references: Sequence[Sequence[Ids]]) -> ScoreFn:
    """Return a CIDEr-D scorer on the CPU."""
    consensus = CiderDScorer(references)

    def score(tokens: Tensor, mask: Tensor, images: Tensor) -> Tensor:
        rows, lengths = tokens.cpu().numpy(), mask.sum(dim=1).tolist()
        texts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        return torch.from_numpy(consensus(texts, images.tolist())).to(tokens.device)

    return score


def gpu_scorer(references: Sequence[Sequence[Ids]], device: torch.device) -> ScoreFn:
    """Return a CIDEr-D scorer on the GPU, where the captions are."""
    return CiderDScorerGPU(references).to(device)


def default_scorer(data: CaptionedImages) -> ScoreFn:
    """Return the scorer for this data: on its GPU if the ids fit there, else on the CPU."""
    device = data.tokens.device
    if device.type == "cuda" and int(data.tokens.max()) < MAX_IDS:
        return gpu_scorer(data.texts(), device)
    return cpu_scorer(data.texts())


class CiderReward:
    """CIDEr-D of sampled captions against those of their training image, with the end token.

    With the end token as a word, truncated captions ("a dog with a") score lower. `score`
    computes the scores, by default on the device of the data.
    """

    def __init__(
        self, data: CaptionedImages, timer: RewardTimer, score: ScoreFn | None = None
    ) -> None:
        self.at = {name: number for number, name in enumerate(data.ids)}
        self.timer, self.device = timer, data.tokens.device
        self.score = score or default_scorer(data)

    def __call__(
        self, drawn: Sequence[caption_reward.SampledCaptions], pictures: Batch
    ) -> list[Tensor]:
        """Return the rewards of each group of captions, one row per image."""
        self._synchronize()  # pending kernels must not count as reward time
        begun = time.perf_counter()
        # The ids of captions are `image#n`, those of images without captions have no `#`.
        at = [self.at[name.partition("#")[0]] for name in pictures.ids]
        # In every group, the captions of an image are adjacent.
        images = [one for lot in drawn for one in at for _ in range(len(lot.tokens) // len(at))]
        found = self.score(
            pad_and_concatenate([one.tokens for one in drawn]),
            pad_and_concatenate([one.mask for one in drawn]),
            torch.tensor(images, device=self.device),
        )
        parts = found.split([len(one.tokens) for one in drawn])
        self._synchronize()
        self.timer.reward += time.perf_counter() - begun
        return [one.reshape(len(pictures), -1) for one in parts]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def graphed_scorer(score: ScoreFn, capture: CaptureFunction[Tensor] | None = None) -> ScoreFn:
    """Run a scorer in a CUDA graph; each call overwrites the scores of the previous one."""
    graphed: GraphedFunction[tuple[Tensor, ...], Tensor] = GraphedFunction(
        lambda given: score(*given), (), capture or GraphCapture().capture, warmup=1
    )
    return lambda tokens, mask, images: graphed((tokens, mask, images))
