"""What share of a self-critical step is its reward: CIDEr-D of ids, beside drawing and learning.

    python benchmarks/reward_share.py [--device cuda] [--out FILE] [--captions Flickr8k.token.txt]

A step draws five captions an image, judges them against references that were weighted before, and
learns from the difference, as `overt.supervise.self_critical` does it. References are captions of
Flickr8k where they are given, else sentences that are made up. Networks are untrained, so captions
are as long as they may be: drawing takes its longest, and so does the reward. Clock times of parts
are medians over the rounds; a GPU is waited for after each part.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cider_speed import made_up, real
from speed import machine

from overt.data.batch import Batch
from overt.data.vocabulary import BEGIN, END, Vocabulary
from overt.measure.captions import Consensus
from overt.models.captioning.captioner import CachedRegions, Captioner, CaptionSizes
from overt.models.captioning.decoding import Rules, sample
from overt.supervise.reward import log_probabilities, self_critical

GOAL, DRAWS, REGIONS, WIDTH = 0.05, 5, 49, 1280
SIZES = {"small": (256, 3, 4), "the paper's": (512, 6, 8)}  # width, layers, heads


class Timed:
    """The clock time of each part of a step, added up."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, dict[str, float]()

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        self.wait()
        start = time.perf_counter()
        found = work()
        self.wait()
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start
        return found

    def wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def section(
    references: list[list[list[str]]], size: str, images: int, device: str, rounds: int
) -> dict[str, Any]:
    """A self-critical step, its parts in milliseconds, and the share of its reward."""
    torch.manual_seed(0)
    words = Vocabulary.build((text for texts in references for text in texts), minimum=5)
    judge = Consensus([[[*words.encode(one), END] for one in texts] for texts in references])
    width, layers, heads = SIZES[size]
    sizes = CaptionSizes(words.size, width, layers, heads, 4 * width, dropout=0.0)
    model = Captioner(sizes, CachedRegions(WIDTH)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    features = torch.randn(images, REGIONS, WIDTH, device=device)
    batch = Batch(ids=tuple(map(str, range(images))), features=features)
    rules = Rules(longest=20)
    of = [image for image in range(images) for _ in range(DRAWS)]
    timed = Timed(device)

    def draw() -> Any:
        return timed("draw", lambda: sample(model, batch, DRAWS, rules=rules))

    def reward(drawn: Any) -> torch.Tensor:
        def judged() -> torch.Tensor:
            rows = zip(drawn.tokens.tolist(), drawn.mask.sum(dim=1).tolist(), strict=True)
            found = judge([row[:count] for row, count in rows], of)
            return torch.from_numpy(found).reshape(images, DRAWS).to(device)

        return timed("reward", judged)

    def tell(drawn: Any) -> torch.Tensor:
        memory = model.encode(batch)
        rows = torch.arange(images, device=device).repeat_interleave(DRAWS)
        state = model.start(memory).reorder(rows).memory
        begun = torch.cat([torch.full_like(drawn.tokens[:, :1], BEGIN), drawn.tokens[:, :-1]], 1)
        logits = model.write(state, begun).logits
        return log_probabilities(logits, drawn.tokens, rules.never)

    def step() -> None:
        found = self_critical(draw, reward, lambda drawn: timed("tell", lambda: tell(drawn)))

        def learn() -> None:
            optimizer.zero_grad()
            found.loss.mean().backward()
            optimizer.step()

        timed("learn", learn)

    step()
    steps = []
    for _ in range(rounds):
        timed.times.clear()
        step()
        steps.append(dict(timed.times))
    parts = {name: statistics.median(one[name] for one in steps) for name in steps[0]}
    share = statistics.median(one["reward"] / sum(one.values()) for one in steps)
    return {
        "images": images,
        "captions": images * DRAWS,
        "milliseconds": {name: round(1000 * one, 2) for name, one in parts.items()},
        "share": round(share, 4),
        "goal": GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--captions", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    references = (made_up(5_000) if chosen.captions is None else real(chosen.captions))[1]
    found: dict[str, Any] = {"machine": machine(), "device": chosen.device}
    for size in SIZES:
        name = f"{size}, 64 images"
        found[name] = section(references, size, 64, chosen.device, chosen.rounds)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
