"""What a self-critical step takes, and which share of it is the reward.

    python benchmarks/a2_speed.py --device cuda --out benchmarks/a2/speed.json

Captions of 64 and of 128 pictures, five drawn of each and the greedy one beside them, with the
sizes of `a2-flickr8k` and with those of the paper; plain and with a gate. References are five
captions a picture, made up of words by chance, 6,000 pictures: a reward does not care what they
say. A network that knows nothing draws captions of full length, the most that a step takes.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overt.data.vocabulary import BEGIN, END
from overt.models.answering.eyes import CachedEye
from overt.models.captioning.decoding import Rules
from overt.recipes.a2.building import Clock, Reward, critical
from overt.recipes.a2.data import Kept, Pictures
from overt.recipes.a2.networks import network
from overt.recipes.a2.recipe import Align, Critic, Fuse, a2_coco, a2_flickr8k
from overt.recipes.running import describe, versions
from overt.train.loop import seed_everything

PICTURES, WORDS, CELLS, WIDTH = 6000, 2500, 49, 1280
WARM, STEPS = 3, 10


def pictures(count: int = PICTURES) -> Pictures:
    """Pictures with five captions of 8 to 14 words; words are as unevenly used as words are."""
    dice = np.random.default_rng(0)
    lengths = dice.integers(8, 15, 5 * count)
    tokens = np.zeros((5 * count, 17), np.int64)
    for row, n in enumerate(lengths):
        words = 5 + np.minimum(dice.zipf(1.3, n), WORDS - 6)
        tokens[row, : n + 2] = [BEGIN, *words, END]
    features = torch.from_numpy(dice.standard_normal((64, CELLS, WIDTH), np.float32)).half()
    show = Kept({"features": features.repeat(-(-count // 64), 1, 1)[:count]})
    return Pictures(
        *("made-up", "train", "", tuple(f"p{n}" for n in range(count))),
        tuple((("",) * 5) for _ in range(count)),
        *(torch.from_numpy(tokens), lengths + 2, np.arange(0, 5 * count + 1, 5), show),
    )


def measured(model: Any, data: Pictures, critic: Critic, device: torch.device) -> dict[str, float]:
    """Seconds of a step and of its reward: medians over steps."""
    clock = Clock()
    judge, rules = Reward(data, clock), Rules(longest=21)
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(parameters, 5e-6)
    steps, rewards = [], []
    for number in range(WARM + STEPS):
        first = (number * critic.batch) % (len(data) - critic.batch)
        batch = data.batch(range(first, first + critic.batch))
        _wait(device)
        begun, before = time.perf_counter(), clock.reward
        found = critical(model, batch, judge, critic, rules)
        optimizer.zero_grad(set_to_none=True)
        found.loss.mean().backward()
        optimizer.step()
        _wait(device)
        if number >= WARM:
            steps.append(time.perf_counter() - begun)
            rewards.append(clock.reward - before)
    step, reward = statistics.median(steps), statistics.median(rewards)
    return {"step": step, "reward": reward, "share": reward / step}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure every pair of sizes and fusions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128])
    asked = parser.parse_args()
    device = torch.device(asked.device)
    data = pictures().to(device)
    found: dict[str, Any] = {}
    for sizes in (a2_flickr8k().model, a2_coco().model):
        for fuse in (Fuse.NONE, Fuse.GATE):
            for batch in asked.batches:
                seed_everything(0)
                model = network(sizes, Align(fuse), WORDS, CachedEye(WIDTH, (7, 7)))
                model.to(device).eval()
                name = f"{sizes.layers} layers, width {round(512 * sizes.width)}, {fuse.value}"
                critic = replace(Critic(), batch=batch)
                found[f"{name}, {batch} x {critic.draws}"] = measured(model, data, critic, device)
    about = {"device": describe(device), "versions": versions()}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({**about, "seconds": found}, indent=1) + "\n")
    for name, one in found.items():
        print(f"{name}: step {1e3 * one['step']:.1f} ms, reward {100 * one['share']:.1f} %")


if __name__ == "__main__":
    main()
