"""Evaluate maps of an image network against human fixations: OSIE.

    OVERT_DATA=... python results/measure_osie.py OUT [--photos 100] [--masks 100]

Writes OUT/osie.json, the table with intervals and tests, and OUT/osie.npz, one number per photo.
The rules are in LOG.md. Maps and numbers are cached in OUT/maps and OUT/numbers: a stopped run
resumes, and several processes can compute different rows (`--only`).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from einops import rearrange, repeat
from map_verdicts import rows_of, write
from torch import Tensor, nn

from overt import data, metrics
from overt.attention import AttentionMap, Kind, grid
from overt.attribution import class_activation, rise
from overt.data.human_attention import GroundTruth, load_ground_truth
from overt.data.images import load_images, stretch
from overt.metrics.segmentation import combine_levels
from overt.nn import attach
from overt.nn.backbone_attention.attached_model import AttachedAttention
from overt.nn.backbone_attention.feature_levels import LevelFeatures
from overt.nn.cnn import ImageFeatures
from overt.nn.image_backbones.efficientnet import MEAN, SPREAD, efficientnet_lite
from overt.nn.learned_attention.attention import MultiLevelFeatures

SIZE, CELLS, FEW = (224, 224), (28, 28), (7, 7)
MAPS = ("class activation", "gradient", "RISE", "LTPA attached")
ROWS = (*MAPS, "uniform", "random", "centre bell", "fitted prior", "people")
SHARES = (0.1, 0.2, 0.4, 0.7)
TEACHING, HELD_OUT, EPOCHS = 800, 200, 10  # photos of Flickr8k, and training epochs


class Network(nn.Module):
    """EfficientNet-Lite0 with a named module for the cells before pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = efficientnet_lite().to(memory_format=torch.channels_last)  # faster on a CPU
        self.cells = nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.inner.classify(self.cells(self.inner.features(pixels)).mean(dim=(2, 3)))


def bfloat16_logits(net: nn.Module, pixels: Tensor) -> Tensor:
    """Return the logits in bfloat16, for thousands of evaluations."""
    with torch.autocast("cpu", torch.bfloat16):
        return net(pixels).float()


def pixels_of(images: Tensor) -> Tensor:
    pixels = (images.float() - MEAN) / SPREAD
    return pixels.contiguous(memory_format=torch.channels_last)


# --- maps


def gradient(net: nn.Module, pixels: Tensor, classes: Tensor) -> AttentionMap:
    """Return the gradient norm of the class score, over the three color channels."""
    pixels = pixels.clone().requires_grad_()
    net(pixels).gather(1, classes[:, None]).sum().backward()
    assert pixels.grad is not None
    return AttentionMap.from_cells(pixels.grad.norm(dim=1).flatten(1), grid(*SIZE))


def activation(net: Network, pixels: Tensor, classes: Tensor) -> AttentionMap:
    with torch.no_grad():
        found = class_activation(net, pixels, classes, net.cells)
    return AttentionMap(found.values.clamp_min(0), found.keys, kind=Kind.AMOUNT)


def attached_map(net: AttachedAttention, pixels: Tensor) -> AttentionMap:
    """Return the combined levels of the attached attention."""
    with torch.no_grad():
        levels = net({"pixel_values": pixels}).attention
    joined = combine_levels([one.over_heads() for one in levels], CELLS)
    return AttentionMap.from_cells(joined.flatten(1).float(), grid(*CELLS))


def train_attached(backbone: nn.Module, root: Path) -> tuple[AttachedAttention, float]:
    """Train attached attention on the network's own outputs on Flickr8k; the network is frozen.

    Also return the share of held-out photos with the same predicted class.
    """
    torch.manual_seed(0)
    net = attach(backbone, classes=1000, size=SIZE).freeze()
    cells, answers = cache_features(net, backbone, root, "train", TEACHING)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    net.train()
    for _ in range(EPOCHS):
        for some in torch.randperm(TEACHING).split(32):
            optimizer.zero_grad()
            logits = net.decide(encode_cached(net, [one[some] for one in cells])).prediction
            (-(answers[some] * logits.log_softmax(dim=-1)).sum(dim=-1).mean()).backward()
            optimizer.step()
    net.eval()
    cells, answers = cache_features(net, backbone, root, "test", HELD_OUT)
    with torch.no_grad():
        logits = net.decide(encode_cached(net, cells)).prediction
    return net, float((logits.argmax(dim=-1) == answers.argmax(dim=-1)).float().mean())


def cache_features(
    net: AttachedAttention, backbone: nn.Module, root: Path, split: str, count: int
) -> tuple[list[Tensor], Tensor]:
    """Return the cells of every level and the outputs for the first photos of a split."""
    folder = root / "flickr8k"
    names = (folder / f"Flickr_8k.{split}Images.txt").read_text().split()
    files = [folder / "Flicker8k_Dataset" / name for name in names]
    files = [file for file in files if file.is_file()][:count]
    cells, answers = [], []
    for start in range(0, len(files), 32):
        images, _ = load_images(files[start : start + 32], SIZE, stretch)
        with torch.no_grad():
            cells.append([one.cells for one in net.backbone_features(pixels_of(images))])
            answers.append(backbone(pixels_of(images)).softmax(dim=-1))
    return [torch.cat(level) for level in zip(*cells, strict=True)], torch.cat(answers)


def encode_cached(net: AttachedAttention, cells: Sequence[Tensor]) -> MultiLevelFeatures:
    """Compute the result of `encode` from cached cells."""
    assert net.query is not None
    made = []
    for norm, one in zip(net.norms, cells, strict=True):
        values = rearrange(norm(one.flatten(2)), "i d k -> i k d")
        made.append(ImageFeatures(values, grid(one.shape[2], one.shape[3])))
    return MultiLevelFeatures(tuple(made), net.query(LevelFeatures(cells[-1], None)))


def make_maps(
    out: Path,
    source: data.Osie,
    places: Sequence[int],
    masks: int,
    few: int,
    root: Path,
    wanted: Sequence[str] = MAPS,
) -> dict:
    """Return every map of every photo on the grid of the truth, by name, with a disk cache."""
    net = Network().eval()
    attached: list[tuple[AttachedAttention, float]] = []
    ways: dict[str, Callable[[Tensor, Tensor, int], AttentionMap]] = {
        "class activation": lambda pixels, classes, _: activation(net, pixels, classes),
        "gradient": lambda pixels, classes, _: gradient(net, pixels, classes),
        "LTPA attached": lambda pixels, classes, _: attached_map(attached[0][0], pixels),
        "RISE": lambda pixels, classes, at: rise(
            partial(bfloat16_logits, net),
            pixels,
            classes,
            torch.Generator().manual_seed(at),
            masks=masks,
            chunk=2 * len(pixels),
        ),
    }
    (out / "maps").mkdir(parents=True, exist_ok=True)
    found: dict[str, Tensor] = {}
    for name, way in ways.items():
        if name not in wanted:
            continue
        path = out / "maps" / f"{name.replace(' ', '-')}.npz"
        if not path.is_file():
            begun, rows = time.process_time(), []
            agrees = float("nan")
            if name == "LTPA attached":
                attached.append(train_attached(net.inner, root))
                agrees = attached[0][1]
            shown = places[:few] if name == "RISE" else places
            for start in range(0, len(shown), 4):
                pixels = pixels_of(source.batch(shown[start : start + 4]).images)
                with torch.no_grad():
                    classes = net(pixels).argmax(dim=-1)
                rows.append(
                    metrics.resample_to_grid(way(pixels, classes, start), CELLS).values.detach()
                )
                print(name, start, flush=True)
            seconds = (time.process_time() - begun) / len(shown)
            np.savez(path, values=torch.cat(rows).numpy(), seconds=seconds, agrees=agrees)
        with np.load(path) as kept:
            found[name] = torch.from_numpy(kept["values"]).float()
            found[f"{name}/seconds"] = torch.tensor(float(kept["seconds"]))
            found[f"{name}/agrees"] = torch.tensor(float(kept["agrees"]))
    return found


# --- numbers


def human_metrics(truth: GroundTruth) -> dict[str, Callable[[AttentionMap, AttentionMap], Tensor]]:
    """Return metrics of a map and the fixations of one person, with maps of other photos."""
    assert truth.fixations is not None and truth.others is not None and truth.prior is not None
    people = truth.fixations.values.shape[3]

    def spread(one: AttentionMap) -> AttentionMap:
        values = repeat(one.values, "b l h 1 k -> (b p) l h 1 k", p=people)
        return AttentionMap(values, one.keys, kind=Kind.AMOUNT)

    others, prior = spread(truth.others), spread(truth.prior)
    return {
        "NSS": metrics.nss,
        "AUC-Judd": metrics.auc_judd,
        "shuffled AUC": partial(metrics.auc_shuffled, others=others),
        "information gain": partial(metrics.information_gain, prior=prior),
    }


def agreement(attention: AttentionMap, truth: GroundTruth) -> dict[str, Tensor]:
    """Evaluate a map on each person's fixations and on their density."""
    assert truth.fixations is not None
    found = {
        name: metrics.agreement_with_each_human(ask, attention, truth.fixations)
        for name, ask in human_metrics(truth).items()
    }
    for ask in (metrics.cc, metrics.sim, metrics.spearman):
        found[f"{ask.info.name} with the density"] = ask(attention, truth.target)
    return found


def faithfulness(net: nn.Module, pixels: Tensor, attention: AttentionMap) -> dict[str, Tensor]:
    decide = metrics.pixel_removal(partial(bfloat16_logits, net), pixels, FEW, metrics.mean_fill)
    coarse = metrics.resample_to_grid(attention, FEW)
    found = {}
    for ask in (metrics.deletion_area, metrics.insertion_area):
        found[ask.info.name] = ask(decide, coarse, torch.Generator().manual_seed(0), SHARES)
    return found


def evaluate_map(
    name: str, maps: dict, loaded: Sequence[tuple[Tensor, GroundTruth]], few: int
) -> dict:
    """Compute all metrics of one map, of a control or of people, one tensor per metric."""
    net = Network().eval()
    numbers: dict[str, list[Tensor]] = {}
    for place, (images, truth) in enumerate(loaded):
        start = 4 * place
        assert truth.people is not None and truth.fixations is not None and truth.prior is not None
        even = metrics.uniform_map(truth.target)
        if name == "people":
            found = {
                ask: metrics.inter_human_agreement(measured, truth.people, truth.fixations)
                for ask, measured in human_metrics(truth).items()
            }
        else:
            match name:
                case "uniform":
                    attention = even
                case "random":
                    attention = metrics.random_map(even, torch.Generator().manual_seed(start))
                case "centre bell":
                    attention = metrics.center_map(even)
                case "fitted prior":
                    attention = truth.prior
                case _:
                    if start >= len(maps[name]):
                        break
                    values = maps[name][start : start + 4]
                    attention = AttentionMap(values, truth.target.keys, kind=Kind.AMOUNT)
            found = agreement(attention, truth)
            if name in (*MAPS, "random") and start < few:
                found |= faithfulness(net, pixels_of(images), attention)
        for ask, values in found.items():
            numbers.setdefault(ask, []).append(values)
        print("evaluated", name, start, flush=True)
    return {ask: torch.cat(values) for ask, values in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("--masks", type=int, default=100)
    parser.add_argument("--few", type=int, default=40, help="photos for RISE and for removal")
    parser.add_argument(
        "--only", nargs="*", choices=ROWS, help="compute these rows only, without a table"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = data.data_root()
    source = data.Osie(root, size=SIZE, how=stretch, cells=CELLS)
    places = list(range(0, len(source), 7))[: args.photos]
    wanted = args.only or ROWS
    made = [name for name in wanted if name in MAPS]
    maps = make_maps(args.out, source, places, args.masks, args.few, root, made)
    loaded: list[tuple[Tensor, GroundTruth]] = []
    columns: dict[str, dict[str, Tensor]] = {}
    for name in wanted:
        path = args.out / "numbers" / f"{name.replace(' ', '-')}.npz"
        if not path.is_file():
            for start in range(0, 0 if loaded else len(places), 4):
                batch, truth = load_ground_truth(source, places[start : start + 4])
                loaded.append((batch.images, truth))
            found = evaluate_map(name, maps, loaded, args.few)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **{ask: values.numpy() for ask, values in found.items()})
        nothing = torch.full(
            (len(places),), torch.nan
        )  # where only the first photos were evaluated
        with np.load(path) as kept:
            columns[name] = {
                ask: torch.cat([torch.from_numpy(kept[ask]), nothing])[: len(places)]
                for ask in kept.files
            }
    if args.only:
        return
    against = {"NSS": "fitted prior", "deletion area": "random", "insertion area": "random"}
    write(
        args.out / "osie",
        rows_of(columns, against, MAPS),
        columns,
        about={
            "photos": len(places),
            "cells": list(CELLS),
            "masks": args.masks,
            "few": args.few,
            "shares": list(SHARES),
            "seconds a photo": {one: float(maps[f"{one}/seconds"]) for one in MAPS},
            "attached names the network's class": float(maps["LTPA attached/agrees"]),
            "data": source.digest(),
        },
    )


if __name__ == "__main__":
    main()
