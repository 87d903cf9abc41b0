"""Section 4: CIDEr-D as a reward, compared with dictionary scorers and pycocoevalcap.

`warm` weights the references once in advance, as a reward does. It is compared with a scorer of
dictionaries that has counted document frequencies in advance and counts the n-grams of the
references of each batch, as public training code does. `cold` builds everything and is compared
with pycocoevalcap, which always does that. The share of the reward is measured in complete
self-critical steps of a captioner.
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
from overt.metrics.captions.cider import ORDER, SIGMA, CiderDScorer, words_to_ids

from .clock import Spread, time_variants
from .report import (
    Curve,
    Report,
    Row,
    Setting,
    at_least,
    at_most,
    missing_row,
    speedup_row,
    value_row,
)

WORDS, WIDTH = 2500, 1280  # of the vocabulary; of the features of a cell
Words = Sequence[str]
Captions = tuple[list[list[str]], list[list[list[str]]]]


class DictionaryScorer:
    """CIDEr-D with dictionaries; document frequencies are counted in advance."""

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.document_counts: Counter[tuple[str, ...]] = Counter()
        for texts in references:
            self.document_counts.update(
                {gram for text in texts for gram in self.count_ngrams(text)}
            )
        self.documents = math.log(float(len(references)))

    @staticmethod
    def count_ngrams(words: Words) -> Counter[tuple[str, ...]]:
        """Count all n-grams of a text."""
        many = range(1, ORDER + 1)
        return Counter(tuple(words[at : at + n]) for n in many for at in range(len(words) - n + 1))

    def weight(self, words: Words) -> tuple[list[dict[tuple[str, ...], float]], list[float], int]:
        """Return one vector per n-gram length, their norms, and the length of the text."""
        vectors: list[dict[tuple[str, ...], float]] = [{} for _ in range(ORDER)]
        for gram, count in self.count_ngrams(words).items():
            idf = self.documents - math.log(max(1.0, self.document_counts.get(gram, 0)))
            vectors[len(gram) - 1][gram] = count * idf
        norms = [math.sqrt(sum(w * w for w in one.values())) for one in vectors]
        return vectors, norms, max(0, len(words) - 1)

    def __call__(
        self, candidates: Sequence[Words], references: Sequence[Sequence[Words]]
    ) -> np.ndarray:
        """Return one score per candidate."""
        scores = []
        for words, texts in zip(candidates, references, strict=True):
            ours, our_norms, length = self.weight(words)
            total = 0.0
            for text in texts:
                theirs, norms, other = self.weight(text)
                length_penalty = math.exp(-((length - other) ** 2) / (2 * SIGMA**2))
                for n in range(ORDER):
                    dot = 0.0
                    for gram, weight in ours[n].items():
                        reference_weight = theirs[n].get(gram, 0.0)
                        dot += min(weight, reference_weight) * reference_weight
                    norm = our_norms[n] * norms[n]
                    total += length_penalty * (dot / norm if norm else dot)
            scores.append(10 * total / ORDER / len(texts))
        return np.array(scores)


def random_captions(images: int, seed: int = 0) -> Captions:
    """Generate captions of 8 to 14 of 10,000 words, with word frequencies as in natural text."""
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    share = 1 / np.arange(1, 10_001) ** 1.05
    sampled = iter(generator.choice(10_000, size=images * 200, p=share / share.sum()).tolist())

    def sentence() -> list[str]:
        return [str(next(sampled)) for _ in range(rng.randrange(8, 15))]

    def changed(words: list[str], most: int) -> list[str]:
        words = list(words)
        for _ in range(rng.randrange(most)):
            words[rng.randrange(len(words))] = str(next(sampled))
        return words

    candidates, references = [], []
    for _ in range(images):
        base = sentence()
        texts = [changed(base if rng.random() < 0.7 else sentence(), 6) for _ in range(5)]
        references.append(texts)
        candidates.append(changed(rng.choice(texts), 5))
    return candidates, references


class Case:
    """Candidates and references, in the input format of each scorer."""

    def __init__(self, captions: Captions, images: Sequence[int], each: int = 1) -> None:
        candidates, references = captions
        (ours,), self.theirs = words_to_ids([candidates], references)
        self.rows = [image for image in images for _ in range(each)]
        self.words = [candidates[row] for row in self.rows]
        self.ids = [np.array(ours[row]) for row in self.rows]
        self.references = [references[row] for row in self.rows]
        self.score, self.dictionary_scorer = CiderDScorer(self.theirs), DictionaryScorer(references)
        self.caption_data = {
            at: [" ".join(one) for one in many] for at, many in enumerate(references)
        }
        self.candidate_texts = {at: [" ".join(one)] for at, one in enumerate(candidates)}

    def warm(self) -> np.ndarray:
        """Score with ours, references weighted in advance."""
        return self.score(self.ids, self.rows)

    def cold(self) -> np.ndarray:
        """Score with ours, including the references."""
        return CiderDScorer(self.theirs)(self.ids, self.rows)

    def dictionaries(self) -> np.ndarray:
        """Score with dictionaries, frequencies counted in advance."""
        return self.dictionary_scorer(self.words, self.references)

    def pycocoevalcap(self) -> np.ndarray:
        """Score with pycocoevalcap."""
        from pycocoevalcap.cider.cider import Cider

        return np.asarray(Cider().compute_score(self.caption_data, self.candidate_texts)[1])


def evaluation(setting: Setting, report: Report) -> None:
    """Time 5,000 images, and the candidates of one self-critical step."""
    count = setting.size(5000, 100)
    large = random_captions(count)
    all_captions, step = Case(large, range(count)), Case(large, range(min(64, count)), 5)
    difference = max(
        float(np.abs(all_captions.warm() - all_captions.dictionaries()).max()),
        float(np.abs(step.warm() - step.dictionaries()).max()),
    )
    variants: dict[str, Any] = {
        "ids, warm": all_captions.warm,
        "ids, cold": all_captions.cold,
        "dictionaries": all_captions.dictionaries,
    }
    try:
        difference = max(
            difference, float(np.abs(all_captions.warm() - all_captions.pycocoevalcap()).max())
        )
        variants["pycocoevalcap"] = all_captions.pycocoevalcap
    except ImportError:
        report.add(missing_row("cold", "pycocoevalcap is not installed", at_least(6.0)))
    assert difference < 1e-9, f"scores differ by {difference}"
    label = f"difference from pycocoevalcap, {count} images"
    report.add(value_row(label, "largest difference", difference, at_most(1e-9)))
    times = time_variants(variants, min(3, setting.rounds), limit=30.0)
    goal = None if setting.quick else at_least(20.0)
    report.add(speedup_row(f"{count} images, warm", times, "ids, warm", "dictionaries", goal))
    if "pycocoevalcap" in variants:
        goal = None if setting.quick else at_least(6.0)
        report.add(speedup_row(f"{count} images, cold", times, "ids, cold", "pycocoevalcap", goal))
    goal = None if setting.quick else at_least(20.0)
    step_times = time_variants(
        {"ids, warm": step.warm, "dictionaries": step.dictionaries}, 2 * setting.rounds
    )
    report.add(speedup_row("64 x 5 of a step, warm", step_times, "ids, warm", "dictionaries", goal))


# --- a self-critical step


def random_images(count: int, words: int, cells: int, width: int) -> Any:
    """Generate features of images, with five captions of 8 to 14 words each."""
    from overt.papers.a2.data import CaptionedImages, ImagesInMemory

    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 15, 5 * count)
    tokens = np.zeros((5 * count, 17), np.int64)
    for row, n in enumerate(lengths):
        sampled_words = 5 + np.minimum(rng.zipf(1.3, n), words - 6)
        tokens[row, : n + 2] = [BEGIN, *sampled_words, END]
    features = torch.from_numpy(rng.standard_normal((64, cells, width), np.float32)).half()
    show = ImagesInMemory({"features": features.repeat(-(-count // 64), 1, 1)[:count]})
    return CaptionedImages(
        *("made-up", "train", "", tuple(f"p{n}" for n in range(count))),
        tuple((("",) * 5) for _ in range(count)),
        *(torch.from_numpy(tokens), lengths + 2, np.arange(0, 5 * count + 1, 5), show),
    )


def captioners(setting: Setting) -> dict[str, tuple[Any, Any]]:
    """Return sizes and mask fusion of each captioner."""
    from overt.papers.a2.config import A2Fusion, a2_coco, a2_flickr8k

    paper, small = a2_coco().model, a2_flickr8k().model
    found = {"small": (small, A2Fusion.NONE), "as in the paper": (paper, A2Fusion.NONE)}
    if setting.gpu:
        found |= {
            "small, gate": (small, A2Fusion.GATE),
            "as in the paper, gate": (paper, A2Fusion.GATE),
        }
    return found


@dataclass(frozen=True)
class CaptionData:
    """Images with their captions, and the scorer of new captions."""

    data: Any
    scores: Any

    @classmethod
    def create(cls, setting: Setting) -> "CaptionData":
        """Create the data once for all captioners: counting words takes seconds."""
        from overt.papers.a2.reward import default_scorer

        data = random_images(setting.size(6000, 200), WORDS, 49, WIDTH).to(
            torch.device(setting.device)
        )
        return cls(data, default_scorer(data))


def reward_share(
    name: str,
    sizes: Any,
    fuse: Any,
    use_graphs: bool,
    caption_data: "CaptionData",
    setting: Setting,
    report: Report,
) -> None:
    """Measure the share of the reward in a self-critical step, in wall-clock seconds.

    With `use_graphs`, decoding and scoring run in CUDA graphs.
    """
    from overt.nn.captioning.decoding import DecodingRules
    from overt.nn.vqa.image_encoders import CachedImageEncoder
    from overt.papers.a2.config import A2Align, A2Critic
    from overt.papers.a2.model import build_captioner
    from overt.papers.a2.reward import CiderReward, RewardTimer, graphed_scorer
    from overt.papers.a2.sampling import graphed_sampler, training_sampler
    from overt.papers.a2.train import self_critical_step
    from overt.train.loop import seed_everything

    device, data = torch.device(setting.device), caption_data.data
    batch = setting.size(64 if setting.gpu else 4, 2)
    seed_everything(0)
    model = (
        build_captioner(sizes, A2Align(fuse), WORDS, CachedImageEncoder(WIDTH, (7, 7)))
        .to(device)
        .eval()
    )
    clock, rules = RewardTimer(), DecodingRules(max_length=21)
    critic = replace(A2Critic(), batch=batch)
    sample, scores = training_sampler(model, critic, rules), caption_data.scores
    if use_graphs:  # as in training on a GPU, where it is faster
        sample, scores = graphed_sampler(sample), graphed_scorer(scores)
    reward = CiderReward(data, clock, scores)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 5e-6)
    steps, shares, rewards = [], [], []
    for number in range(2 + setting.size(12 if setting.gpu else 4, 1)):
        first = (number * batch) % (len(data) - batch)
        part = data.batch(range(first, first + batch))
        _synchronize(device)
        start, before = time.perf_counter(), clock.reward
        found = self_critical_step(model, part, reward, critic, rules, sample)
        optimizer.zero_grad(set_to_none=True)
        found.loss.mean().backward()
        optimizer.step()
        _synchronize(device)
        if number > 1:  # graphs are captured in the second step
            steps.append(time.perf_counter() - start)
            rewards.append(clock.reward - before)
            shares.append(rewards[-1] / steps[-1])
    name += ", CUDA graph" if use_graphs else ""
    label = f"reward in a step of {batch} x {critic.draws}, {name}"
    report.add(
        Row(label, "reward", "step", "share of the step", Spread.from_values(shares), at_most(0.05),
            Spread.from_values(rewards), Spread.from_values(steps))
    )  # fmt: skip
    report.facts[f"self-critical step, {name}"] = {
        "images_per_second": batch / statistics.median(steps), "batch": batch
    }  # fmt: skip


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def growth(setting: Setting) -> Curve:
    """Time scores of increasing numbers of captions."""
    counts = (10, 50) if setting.quick else (100, 300, 1000, 3000)
    lines: dict[str, list[float]] = {}
    for count in counts:
        case = Case(random_captions(count), range(count))
        variants: dict[str, Any] = {
            "ids, warm": case.warm,
            "ids, cold": case.cold,
            "dictionaries": case.dictionaries,
            "pycocoevalcap": case.pycocoevalcap,
        }
        times = time_variants(variants, 3, limit=6.0)
        for name in variants:
            lines.setdefault(name, []).append(times.spread(name).median)
    return Curve("CIDEr-D, five references per caption", "captions", "seconds",
                 list(map(float, counts)), lines)  # fmt: skip


def section(setting: Setting, report: Report) -> None:
    """Measure the reward's share; on a CPU also the scores and their growth."""
    torch.set_num_threads(1)
    if not setting.gpu:
        report.part("CIDEr-D", partial(evaluation, setting, report))
    caption_data = CaptionData.create(setting)
    for name, (sizes, fuse) in captioners(setting).items():
        for use_graphs in (False, True) if setting.gpu else (False,):
            part = partial(
                reward_share, name, sizes, fuse, use_graphs, caption_data, setting, report
            )
            report.part(f"reward, {name}{', CUDA graph' if use_graphs else ''}", part)
    if not setting.gpu:
        report.part("growth", lambda: report.curves.append(growth(setting)))
