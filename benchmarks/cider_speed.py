"""How fast CIDEr-D is as a reward: ids beside dictionaries of words, by turns.

    python benchmarks/cider_speed.py [--out FILE] [--captions Flickr8k.token.txt] [--rounds N]

Three sizes: a whole evaluation, a validation, and the samples of one self-critical step (several
candidates an image). `warm` has the references weighted before, as a reward does, and stands beside
a scorer of dictionaries that has counted document frequencies before and cooks the references of
its batch each time, as public training code does. `cold` builds everything and stands beside
pycocoevalcap, which cannot do otherwise. Each section first asserts that all scores agree to 1e-9.
Time is CPU time on one thread; ratios are medians over the rounds.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from speed import machine

from overt.data.captions import read_tokens
from overt.measure.captions.cider import ORDER, SIGMA, Consensus, numbered
from overt.measure.captions.tokens import caption_words

Words = Sequence[str]
GOAL_WARM, GOAL_COLD = 20.0, 6.0


class Dictionaries:
    """CIDEr-D with dictionaries, document frequencies counted before."""

    def __init__(self, references: Sequence[Sequence[Words]]) -> None:
        self.seen: Counter[tuple[str, ...]] = Counter()
        for texts in references:
            self.seen.update({gram for text in texts for gram in self.cook(text)})
        self.documents = math.log(float(len(references)))

    @staticmethod
    def cook(words: Words) -> Counter[tuple[str, ...]]:
        many = range(1, ORDER + 1)
        return Counter(tuple(words[at : at + n]) for n in many for at in range(len(words) - n + 1))

    def weigh(self, words: Words) -> tuple[list[dict[tuple[str, ...], float]], list[float], int]:
        vectors: list[dict[tuple[str, ...], float]] = [{} for _ in range(ORDER)]
        for gram, count in self.cook(words).items():
            rare = self.documents - math.log(max(1.0, self.seen.get(gram, 0)))
            vectors[len(gram) - 1][gram] = count * rare
        norms = [math.sqrt(sum(w * w for w in one.values())) for one in vectors]
        return vectors, norms, max(0, len(words) - 1)

    def __call__(
        self, candidates: Sequence[Words], references: Sequence[Sequence[Words]]
    ) -> np.ndarray:
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


def made_up(images: int, seed: int = 0) -> tuple[list[list[str]], list[list[list[str]]]]:
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


def real(path: Path) -> tuple[list[list[str]], list[list[list[str]]]]:
    """The first caption of every photo as the candidate, the other four as references."""
    read = [[caption_words(text) for text in texts] for texts in read_tokens(path).values()]
    return [texts[0] for texts in read], [texts[1:] for texts in read]


def timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of every run, by turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(1000 * (time.process_time() - start))
    return times


def section(
    candidates: list[list[str]],
    references: list[list[list[str]]],
    images: Sequence[int],
    each: int,
    rounds: int,
) -> dict[str, Any]:
    """Scores of `each` candidates an image, of the images named, out of all references."""
    from pycocoevalcap.cider.cider import Cider

    (ours,), theirs = numbered([candidates], references)
    rows = [image for image in images for _ in range(each)]
    words = [candidates[row] for row in rows]
    ids = [np.array(ours[row]) for row in rows]
    beside = [references[row] for row in rows]
    score, slow = Consensus(theirs), Dictionaries(references)
    apart = float(np.abs(score(ids, rows) - slow(words, beside)).max())
    runs: dict[str, Callable[[], Any]] = {
        "ids": lambda: score(ids, rows),
        "dictionaries": lambda: slow(words, beside),
    }
    if len(rows) == len(references):  # all there is: what evaluation does, from nothing
        given = {at: [" ".join(text) for text in texts] for at, texts in enumerate(references)}
        said = {at: [" ".join(text)] for at, text in enumerate(candidates)}
        published = Cider().compute_score(given, said)[1]
        apart = max(apart, float(np.abs(score(ids, rows) - published).max()))
        runs["ids, cold"] = lambda: Consensus(theirs)(ids, rows)
        runs["pycocoevalcap"] = lambda: Cider().compute_score(given, said)
    assert apart < 1e-9, apart
    times = timed(runs, rounds)
    found: dict[str, Any] = {
        "images": len(references),
        "candidates": len(rows),
        "largest difference": apart,
        "milliseconds": {name: round(statistics.median(many), 2) for name, many in times.items()},
        "warm": _ratio(times["dictionaries"], times["ids"]),
    }
    if "pycocoevalcap" in times:
        found["cold"] = _ratio(times["pycocoevalcap"], times["ids, cold"])
    return found


def _ratio(slow: Sequence[float], quick: Sequence[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(slow, quick, strict=True)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--captions", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "goals": {"warm": GOAL_WARM, "cold": GOAL_COLD}}
    large = made_up(5_000)
    found["evaluation"] = section(*large, range(5_000), 1, max(2, chosen.rounds // 2))
    found["validation"] = section(*made_up(1_000), range(1_000), 1, chosen.rounds)
    found["self-critical step, 64 x 5"] = section(*large, range(64), 5, 4 * chosen.rounds)
    if chosen.captions is not None:
        captions = real(chosen.captions)
        count = len(captions[0])
        found["Flickr8k"] = section(*captions, range(count), 1, max(2, chosen.rounds // 2))
    for name, one in found.items():
        print(f"{name}: {json.dumps(one)}", flush=True)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
