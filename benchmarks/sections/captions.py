"""Section 4: CIDEr-D as a reward, from token ids, beside dictionaries of words and pycocoevalcap.

`warm` has the references weighted before, as a reward does, and stands beside a scorer of
dictionaries that has counted document frequencies before and cooks the references of its batch each
time, as public training code does. `cold` builds everything and stands beside pycocoevalcap, which
cannot do otherwise. The share of a self-critical step is taken in whole steps of a captioner.
"""

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from overt.data.vocabulary import BEGIN, END
from overt.measure.captions.cider import ORDER, SIGMA, Consensus, numbered

from .clock import Spread, race
from .report import Curve, Report, Row, Setting, absent, at_least, at_most, exact, faster

WORDS, WIDTH = 2500, 1280  # of a vocabulary, and of a cell
Words = Sequence[str]
Captions = tuple[list[list[str]], list[list[list[str]]]]


class Dictionaries:
    """CIDEr-D with dictionaries, document frequencies counted before."""

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.seen: Counter[tuple[str, ...]] = Counter()
        for texts in references:
            self.seen.update({gram for text in texts for gram in self.cook(text)})
        self.documents = math.log(float(len(references)))

    @staticmethod
    def cook(words: Words) -> Counter[tuple[str, ...]]:
        """All n-grams of a text, counted."""
        many = range(1, ORDER + 1)
        return Counter(tuple(words[at : at + n]) for n in many for at in range(len(words) - n + 1))

    def weigh(self, words: Words) -> tuple[list[dict[tuple[str, ...], float]], list[float], int]:
        """A vector a length of n-grams, their norms, and how long the text is."""
        vectors: list[dict[tuple[str, ...], float]] = [{} for _ in range(ORDER)]
        for gram, count in self.cook(words).items():
            rare = self.documents - math.log(max(1.0, self.seen.get(gram, 0)))
            vectors[len(gram) - 1][gram] = count * rare
        norms = [math.sqrt(sum(w * w for w in one.values())) for one in vectors]
        return vectors, norms, max(0, len(words) - 1)

    def __call__(
        self, candidates: Sequence[Words], references: Sequence[Sequence[Words]]
    ) -> np.ndarray:
        """A score a candidate."""
        scores = []
        for words, texts in zip(candidates, references, strict=True):
            ours, our_norms, length = self.weigh(words)
            total = 0.0
            for text in texts:
                theirs, norms, other = self.weigh(text)
                far = math.exp(-((length - other) ** 2) / (2 * SIGMA**2))
                for n in range(ORDER):
                    dot = 0.0
                    for gram, weight in ours[n].items():
                        there = theirs[n].get(gram, 0.0)
                        dot += min(weight, there) * there
                    norm = our_norms[n] * norms[n]
                    total += far * (dot / norm if norm else dot)
            scores.append(10 * total / ORDER / len(texts))
        return np.array(scores)


def made_up(images: int, seed: int = 0) -> Captions:
    """Captions of 8 to 14 words out of 10,000, frequent as words are, five references each."""
    rng, dice = np.random.default_rng(seed), random.Random(seed)
    share = 1 / np.arange(1, 10_001) ** 1.05
    drawn = iter(rng.choice(10_000, size=images * 200, p=share / share.sum()).tolist())

    def sentence() -> list[str]:
        return [str(next(drawn)) for _ in range(dice.randrange(8, 15))]

    def changed(words: list[str], most: int) -> list[str]:
        words = list(words)
        for _ in range(dice.randrange(most)):
            words[dice.randrange(len(words))] = str(next(drawn))
        return words

    candidates, references = [], []
    for _ in range(images):
        base = sentence()
        texts = [changed(base if dice.random() < 0.7 else sentence(), 6) for _ in range(5)]
        references.append(texts)
        candidates.append(changed(dice.choice(texts), 5))
    return candidates, references


class Case:
    """Candidates and references, as every scorer wants them."""

    def __init__(self, captions: Captions, images: Sequence[int], each: int = 1) -> None:
        candidates, references = captions
        (ours,), self.theirs = numbered([candidates], references)
        self.rows = [image for image in images for _ in range(each)]
        self.words = [candidates[row] for row in self.rows]
        self.ids = [np.array(ours[row]) for row in self.rows]
        self.beside = [references[row] for row in self.rows]
        self.score, self.slow = Consensus(self.theirs), Dictionaries(references)
        self.given = {at: [" ".join(one) for one in many] for at, many in enumerate(references)}
        self.said = {at: [" ".join(one)] for at, one in enumerate(candidates)}

    def warm(self) -> np.ndarray:
        """Ours, references weighted before."""
        return self.score(self.ids, self.rows)

    def cold(self) -> np.ndarray:
        """Ours, from nothing."""
        return Consensus(self.theirs)(self.ids, self.rows)

    def dictionaries(self) -> np.ndarray:
        """Dictionaries, frequencies counted before."""
        return self.slow(self.words, self.beside)

    def published(self) -> np.ndarray:
        """pycocoevalcap, from nothing."""
        from pycocoevalcap.cider.cider import Cider

        return np.asarray(Cider().compute_score(self.given, self.said)[1])


def evaluation(setting: Setting, report: Report) -> None:
    """5,000 images, and the candidates of one self-critical step."""
    count = setting.some(5000, 100)
    large = made_up(count)
    whole, step = Case(large, range(count)), Case(large, range(min(64, count)), 5)
    apart = max(
        float(np.abs(whole.warm() - whole.dictionaries()).max()),
        float(np.abs(step.warm() - step.dictionaries()).max()),
    )
    ways: dict[str, Any] = {
        "ids, warm": whole.warm,
        "ids, cold": whole.cold,
        "dictionaries": whole.dictionaries,
    }
    try:
        apart = max(apart, float(np.abs(whole.warm() - whole.published()).max()))
        ways["pycocoevalcap"] = whole.published
    except ImportError:
        report.add(absent("cold", "pycocoevalcap is not installed", at_least(6.0)))
    assert apart < 1e-9, f"scores differ by {apart}"
    what = f"off pycocoevalcap, {count} images"
    report.add(exact(what, "largest difference", apart, at_most(1e-9)))
    times = race(ways, min(3, setting.rounds), limit=30.0)
    goal = None if setting.quick else at_least(20.0)
    report.add(faster(f"{count} images, warm", times, "ids, warm", "dictionaries", goal))
    if "pycocoevalcap" in ways:
        goal = None if setting.quick else at_least(6.0)
        report.add(faster(f"{count} images, cold", times, "ids, cold", "pycocoevalcap", goal))
    goal = None if setting.quick else at_least(20.0)
    few = race({"ids, warm": step.warm, "dictionaries": step.dictionaries}, 2 * setting.rounds)
    report.add(faster("64 x 5 of a step, warm", few, "ids, warm", "dictionaries", goal))


# --- a self-critical step


def pictures(count: int, words: int, cells: int, width: int) -> Any:
    """Pictures with five captions of 8 to 14 words; words are as unevenly used as words are."""
    from overt.recipes.a2.data import Kept, Pictures

    dice = np.random.default_rng(0)
    lengths = dice.integers(8, 15, 5 * count)
    tokens = np.zeros((5 * count, 17), np.int64)
    for row, n in enumerate(lengths):
        chosen = 5 + np.minimum(dice.zipf(1.3, n), words - 6)
        tokens[row, : n + 2] = [BEGIN, *chosen, END]
    features = torch.from_numpy(dice.standard_normal((64, cells, width), np.float32)).half()
    show = Kept({"features": features.repeat(-(-count // 64), 1, 1)[:count]})
    return Pictures(
        *("made-up", "train", "", tuple(f"p{n}" for n in range(count))),
        tuple((("",) * 5) for _ in range(count)),
        *(torch.from_numpy(tokens), lengths + 2, np.arange(0, 5 * count + 1, 5), show),
    )


def cases(setting: Setting) -> dict[str, tuple[Any, Any]]:
    """Captioners by name: their sizes and how masks are fused."""
    from overt.recipes.a2.recipe import Fuse, a2_coco, a2_flickr8k

    paper, small = a2_coco().model, a2_flickr8k().model
    found = {"small": (small, Fuse.NONE), "as in the paper": (paper, Fuse.NONE)}
    if setting.gpu:
        found |= {"small, gate": (small, Fuse.GATE), "as in the paper, gate": (paper, Fuse.GATE)}
    return found


@dataclass(frozen=True)
class Given:
    """Pictures with their captions, and what scores new captions of them."""

    data: Any
    scores: Any

    @classmethod
    def on(cls, setting: Setting) -> "Given":
        """The same for all captioners: to count the words of all captions takes seconds."""
        from overt.recipes.a2.rewarding import usual_judge

        data = pictures(setting.some(6000, 200), WORDS, 49, WIDTH).to(torch.device(setting.device))
        return cls(data, usual_judge(data))


def reward_share(
    name: str, sizes: Any, fuse: Any, kept: bool, given: "Given", setting: Setting, report: Report
) -> None:
    """Which share of a self-critical step the reward takes: clocks on the wall, both inside it.

    With `kept`, captions are written and scored from recordings.
    """
    from overt.models.answering.eyes import CachedEye
    from overt.models.captioning.decoding import Rules
    from overt.recipes.a2.building import critical
    from overt.recipes.a2.networks import network
    from overt.recipes.a2.recipe import Align, Critic
    from overt.recipes.a2.rewarding import Clock, Reward, recorded_judge
    from overt.recipes.a2.writing import drawing, recorded
    from overt.train.loop import seed_everything

    device, data = torch.device(setting.device), given.data
    batch = setting.some(64 if setting.gpu else 4, 2)
    seed_everything(0)
    model = network(sizes, Align(fuse), WORDS, CachedEye(WIDTH, (7, 7))).to(device).eval()
    clock, rules = Clock(), Rules(longest=21)
    critic = replace(Critic(), batch=batch)
    write, scores = drawing(model, critic, rules), given.scores
    if kept:  # as recipes do on a card, where a step is shorter by it
        write, scores = recorded(write), recorded_judge(scores)
    judge = Reward(data, clock, scores)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 5e-6)
    steps, shares, rewards = [], [], []
    for number in range(2 + setting.some(12 if setting.gpu else 4, 1)):
        first = (number * batch) % (len(data) - batch)
        part = data.batch(range(first, first + batch))
        _wait(device)
        begun, before = time.perf_counter(), clock.reward
        found = critical(model, part, judge, critic, rules, write)
        optimizer.zero_grad(set_to_none=True)
        found.loss.mean().backward()
        optimizer.step()
        _wait(device)
        if number > 1:  # captions and scores are recorded in the second
            steps.append(time.perf_counter() - begun)
            rewards.append(clock.reward - before)
            shares.append(rewards[-1] / steps[-1])
    name += ", recorded" if kept else ""
    what = f"reward in a step of {batch} x {critic.draws}, {name}"
    report.add(
        Row(what, "reward", "step", "share of the step", Spread.of(shares), at_most(0.05),
            Spread.of(rewards), Spread.of(steps))
    )  # fmt: skip
    report.facts[f"self-critical step, {name}"] = {
        "images_per_second": batch / statistics.median(steps), "batch": batch
    }  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def growth(setting: Setting) -> Curve:
    """Scores of more and more captions."""
    counts = (10, 50) if setting.quick else (100, 300, 1000, 3000)
    lines: dict[str, list[float]] = {}
    for count in counts:
        case = Case(made_up(count), range(count))
        ways: dict[str, Any] = {
            "ids, warm": case.warm,
            "ids, cold": case.cold,
            "dictionaries": case.dictionaries,
            "pycocoevalcap": case.published,
        }
        times = race(ways, 3, limit=6.0)
        for name in ways:
            lines.setdefault(name, []).append(times.of(name).median)
    return Curve("CIDEr-D, five references a caption", "captions", "seconds",
                 list(map(float, counts)), lines)  # fmt: skip


def section(setting: Setting, report: Report) -> None:
    """The reward's share; on a CPU, where they are made, scores and their growth."""
    torch.set_num_threads(1)
    if not setting.gpu:
        report.part("CIDEr-D", partial(evaluation, setting, report))
    given = Given.on(setting)
    for name, (sizes, fuse) in cases(setting).items():
        for kept in (False, True) if setting.gpu else (False,):
            part = partial(reward_share, name, sizes, fuse, kept, given, setting, report)
            report.part(f"reward, {name}{', recorded' if kept else ''}", part)
    if not setting.gpu:
        report.part("growth", lambda: report.curves.append(growth(setting)))
