"""How sure of the truth a search makes a model, against how often it asks.

    python benchmarks/ssa_search.py DATA SCENES CIFAR [OUT.json]

DATA holds CIFAR-10 in its official binary format. SCENES is the model that `overt demo` leaves in
runs/demo/soft-attention/model. CIFAR is a file of weights: those of a small network that attends to
8 x 8 cells; where it is not there, the network is trained here on the CPU, and kept there. Then
training samples are searched: random grids, 100, 500 and 1,000 of them as in figure 7 of "Self
Supervision for Attention Networks", and `refine`. The figures are probabilities of the truth on the
best masked input, the mean over samples.

Rule, written before the run: `refine` holds what it promises if, with at most 50 probes a sample,
its mean best score is at least that of 500 random masks in every setting, and the 95 % bootstrap
interval of the difference, paired by sample, does not reach below -0.001.
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

from overt import files, models, supervise
from overt.attention import AttentionMap, grid
from overt.data import Cifar10, vary
from overt.data.batch import Batch
from overt.data.scenes.store import Scenes
from overt.data.source import Source
from overt.measure.statistics import bootstrap
from overt.models.cnn import Backbone, Cells
from overt.supervise.surrogate import Found, Grids, Look, asking, refine, search

SEED, STEPS, PROBES, RANDOM = 0, 1400, (10, 20, 30, 50), (100, 500, 1000)
ALLOWED = -0.001
# not those on which the search was designed
FRESH_SCENES, FRESH_PICTURES = range(1000, 1024), range(1000, 1192)


class Attending(nn.Module):
    """A small network whose 8 x 8 cells of 32 features are weighed by additive attention."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone([32, 32, 64, 32], [1, 2, 2, 1])
        self.score = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.decision = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def encode(self, batch: Batch) -> Cells:
        """The features of the cells."""
        assert batch.images is not None
        found = self.backbone(batch.images)[batch.image_index]
        return Cells(found.flatten(2).transpose(1, 2), grid(*found.shape[-2:]))

    def decide(self, features: Cells, mask: Mapping[str, Tensor] | None = None) -> models.Output:
        """Classes from the weighted sum of what is left of the cells."""
        cells = features.masked(mask)
        scores = self.score(cells).transpose(1, 2)[:, None, :, None]
        attention = AttentionMap.from_scores(scores, features.layout)
        summary = torch.bmm(attention.weights[:, 0, 0], cells)[:, 0]
        return models.Output(self.decision(summary), (attention,))

    def forward(self, batch: Batch) -> models.Output:
        """Classes of a batch of pictures."""
        return self.decide(self.encode(batch))


def trained(data: Source) -> Attending:
    """A network after 1,400 steps of AdamW along one cycle of the rate."""
    torch.manual_seed(SEED)
    model, drawn = Attending(), torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(len(data), (64,), generator=drawn).tolist()
        part = vary(data.batch(chosen), drawn)
        assert part.labels is not None
        loss = supervise.classification(model(part).prediction, part.labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: Source, items: int) -> float:
    """The share of right answers in the first items."""
    part = data.batch(range(min(items, len(data))))
    return float((model(part).prediction.argmax(dim=-1) == part.labels).float().mean())


Way = Callable[[Look], Found]


def ways(side: int) -> dict[str, Way]:
    """All searches over grids of one side, by name."""
    masks = partial(Grids, grid=(side, side), seed=SEED)
    random = {f"random {n}": partial(search, masks=masks(n)) for n in RANDOM}
    few = {f"refine {n}": partial(refine, masks=masks(500), probes=n) for n in PROBES}
    return {**random, **few}


def searched(model: Any, data: Source, items: Sequence[int], side: int) -> dict[str, Any]:
    """Scores and probes of every search, on the same samples."""
    found: dict[str, list[Found]] = {name: [] for name in ways(side)}
    seconds = dict.fromkeys(found, 0.0)
    for start in range(0, len(items), 32):
        part = data.batch(items[start : start + 32])
        with asking(model, part, ["image"]) as look:
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
        beyond = bootstrap((best.exp() - reference.exp()).double())
        logs = bootstrap((best - reference).double())
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
    """The rule applied to every setting."""
    held = {}
    for name, one in settings.items():
        row = one["searches"]["refine 50"]
        mean, low, _ = row["beyond_random_500"]
        held[name] = bool(row["most_probes"] <= 50 and mean >= 0 and low >= ALLOWED)
    return {"by_setting": held, "held": all(held.values())}


def of_scenes(folder: Path) -> tuple[float, dict[str, Any]]:
    """Validation accuracy of the model on scenes, and what each search finds there."""
    torch.set_num_threads(1)
    train, held = (
        Scenes(split, 1, count, size=64, cells=(8, 8))
        for split, count in (("train", 4000), ("val", 100))
    )
    model = models.VQA.from_pretrained(folder)
    found = {f"scenes, {n} x {n}": searched(model, train, FRESH_SCENES, n) for n in (3, 4)}
    return accuracy(model, held, 100), found


def of_pictures(root: Path, weights: Path) -> tuple[float, dict[str, Any]]:
    """Validation accuracy of the model on CIFAR-10, and what each search finds there."""
    torch.set_num_threads(1)
    train, held = Cifar10(root, "train"), Cifar10(root, "val")
    if not weights.exists():
        files.write_tensors(weights, trained(train).state_dict())
    model = Attending()
    model.load_state_dict(files.read_tensors(weights))
    found = {"CIFAR-10, 4 x 4": searched(model.eval(), train, FRESH_PICTURES, 4)}
    return accuracy(model, held, 1000), found


def run(root: Path, scenes_model: Path, weights: Path) -> dict[str, Any]:
    """Search and judge; the two worlds side by side."""
    with ProcessPoolExecutor(2) as pool:
        one = pool.submit(of_scenes, scenes_model)
        other = pool.submit(of_pictures, root, weights)
        (right, scenes), (named, pictures) = one.result(), other.result()
    settings = {**scenes, **pictures}
    return {
        "rule": "with at most 50 probes a sample, mean best probability >= that of 500 random "
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
