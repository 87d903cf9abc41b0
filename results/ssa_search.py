"""Compare search strategies: probability of the truth against the number of probes.

    python results/ssa_search.py DATA SCENES CIFAR [OUT.json]

DATA contains CIFAR-10 in its official binary format. SCENES is the model of
`overt demo --rows soft-attention`, runs/demo/soft-attention/model. CIFAR is a file of weights of a
small network that attends to 8 x 8 cells; if it is missing, the network is trained on the CPU and
saved there. Then training samples are searched: 100, 500 and 1,000 random grids as in figure 7 of
"Self Supervision for Attention Networks", and `greedy_refine`. Reported is the probability of the
truth on the best masked input, the mean over samples.

Rule, written before the run: `greedy_refine` is confirmed if, with at most 50 probes per sample,
its mean best score is at least that of 500 random masks in every setting, and the 95 % interval of
the difference, paired by sample, does not reach below -0.001 (then a bootstrap, now t).
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overt import io, losses
from overt.attention import AttentionMap, grid
from overt.data import Cifar10, random_shift_flip
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.scenes.dataset import Scenes
from overt.metrics.statistics import confidence_interval
from overt.nn import VQA, Output
from overt.nn.cnn import ConvBackbone, ImageFeatures
from overt.targets.surrogate import (
    GridMasks,
    MaskedBatch,
    SearchResult,
    exhaustive_search,
    greedy_refine,
    masked_batch,
)

SEED, STEPS, PROBES, RANDOM = 0, 1400, (10, 20, 30, 50), (100, 500, 1000)
ALLOWED = -0.001
# separate from the samples of the design
FRESH_SCENES, FRESH_PICTURES = range(1000, 1024), range(1000, 1192)


class Attending(nn.Module):
    """Small network whose 8 x 8 cells of 32 features are weighted by additive attention."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ConvBackbone([32, 32, 64, 32], [1, 2, 2, 1])
        self.score = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.decision = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def encode(self, batch: Batch) -> ImageFeatures:
        """Return the features of the cells."""
        assert batch.images is not None
        found = self.backbone(batch.images)[batch.image_index]
        return ImageFeatures(found.flatten(2).transpose(1, 2), grid(*found.shape[-2:]))

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return classes from the weighted sum of the unmasked cells."""
        cells = features.masked(mask)
        scores = self.score(cells).transpose(1, 2)[:, None, :, None]
        attention = AttentionMap.from_scores(scores, features.layout)
        summary = torch.bmm(attention.weights[:, 0, 0], cells)[:, 0]
        return Output(self.decision(summary), (attention,))

    def forward(self, batch: Batch) -> Output:
        """Return classes of a batch of images."""
        return self.decide(self.encode(batch))


def train_model(data: Dataset) -> Attending:
    """Train a network for 1,400 steps of AdamW with a one-cycle learning rate."""
    torch.manual_seed(SEED)
    model, drawn = Attending(), torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(data), (64,), generator=drawn).tolist()
        part = random_shift_flip(data.batch(chosen), drawn)
        assert part.labels is not None
        loss = losses.classification(model(part).prediction, part.labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset, items: int) -> float:
    """Return the accuracy on the first items."""
    part = data.batch(range(min(items, len(data))))
    return float((model(part).prediction.argmax(dim=-1) == part.labels).float().mean())


Way = Callable[[MaskedBatch], SearchResult]


def ways(side: int) -> dict[str, Way]:
    """Return all searches over grids of one side, by name."""
    masks = partial(GridMasks, grid=(side, side), seed=SEED)
    random = {f"random {n}": partial(exhaustive_search, masks=masks(n)) for n in RANDOM}
    few = {f"refine {n}": partial(greedy_refine, masks=masks(500), probes=n) for n in PROBES}
    return {**random, **few}


def run_searches(model: Any, data: Dataset, items: Sequence[int], side: int) -> dict[str, Any]:
    """Return scores and probes of every search, on the same samples."""
    found: dict[str, list[SearchResult]] = {name: [] for name in ways(side)}
    seconds = dict.fromkeys(found, 0.0)
    for start in range(0, len(items), 32):
        part = data.batch(items[start : start + 32])
        with masked_batch(model, part, ["image"]) as look:
            for name, way in ways(side).items():
                began = time.process_time()
                found[name].append(way(look))
                seconds[name] += time.process_time() - began
    base = torch.cat([one.base for one in found["random 500"]])
    reference = torch.cat([one.best for one in found["random 500"]])
    rows = {}
    for name, parts in found.items():
        best = torch.cat([one.best for one in parts])
        probes = torch.cat([one.probes for one in parts]).float()
        beyond = confidence_interval((best.exp() - reference.exp()).double())
        logs = confidence_interval((best - reference).double())
        rows[name] = {
            "probability": float(best.exp().mean()),
            "log_probability": float(best.mean()),
            "probes": float(probes.mean()),
            "most_probes": int(probes.max()),
            "beyond_random_500": [beyond.mean, beyond.low, beyond.high],
            "log_beyond_random_500": [logs.mean, logs.low, logs.high],
            "at_least_random_500": float((best >= reference).float().mean()),
            "a_mask_beats_none": float((best > base).float().mean()),
            "processor_seconds": round(seconds[name], 2),
        }
    return {"samples": len(base), "whole": float(base.exp().mean()), "searches": rows}


def verdict(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the rule to every setting."""
    confirmed = {}
    for name, one in settings.items():
        row = one["searches"]["refine 50"]
        mean, low, _ = row["beyond_random_500"]
        confirmed[name] = bool(row["most_probes"] <= 50 and mean >= 0 and low >= ALLOWED)
    return {"by_setting": confirmed, "held": all(confirmed.values())}


def search_scenes(folder: Path) -> tuple[float, dict[str, Any]]:
    """Return validation accuracy and search results of the scene model."""
    torch.set_num_threads(1)
    train, val = (
        Scenes(split, 1, count, size=64, cells=(8, 8))
        for split, count in (("train", 4000), ("val", 100))
    )
    model = VQA.from_pretrained(folder)
    found = {f"scenes, {n} x {n}": run_searches(model, train, FRESH_SCENES, n) for n in (3, 4)}
    return accuracy(model, val, 100), found


def search_cifar(root: Path, weights: Path) -> tuple[float, dict[str, Any]]:
    """Return validation accuracy and search results of the CIFAR-10 model."""
    torch.set_num_threads(1)
    train, val = Cifar10(root, "train"), Cifar10(root, "val")
    if not weights.exists():
        io.write_tensors(weights, train_model(train).state_dict())
    model = Attending()
    model.load_state_dict(io.read_tensors(weights))
    found = {"CIFAR-10, 4 x 4": run_searches(model.eval(), train, FRESH_PICTURES, 4)}
    return accuracy(model, val, 1000), found


def run(root: Path, scenes_model: Path, weights: Path) -> dict[str, Any]:
    """Run the searches on both datasets in parallel and apply the rule."""
    with ProcessPoolExecutor(2) as pool:
        one = pool.submit(search_scenes, scenes_model)
        other = pool.submit(search_cifar, root, weights)
        (right, scenes), (named, pictures) = one.result(), other.result()
    settings = {**scenes, **pictures}
    return {
        "rule": "with at most 50 probes per sample, mean best probability >= that of 500 random "
        f"masks, and the paired 95 % interval of the difference not below {ALLOWED}",
        "validation_accuracy": {"scenes": right, "CIFAR-10": named},
        "torch": torch.__version__,
        "settings": settings,
        "verdict": verdict(settings),
    }


if __name__ == "__main__":
    data, scenes_at, cifar_at, *out = map(Path, sys.argv[1:])
    result = json.dumps(run(data, scenes_at, cifar_at), indent=2)
    print(result)
    if out:
        out[0].write_text(result + "\n")
