"""Maps of a network for photos beside where people look: OSIE.

    OVERT_DATA=... python benchmarks/measure_osie.py OUT [--photos 100] [--masks 100]

Writes OUT/osie.json, the table with intervals and tests, and OUT/osie.npz, one number a photo. The
rules are in LOG.md. Maps and numbers are kept in OUT/maps and OUT/numbers as they are made: a run
that was stopped goes on, and several may work at once on other rows (`--only`).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from einops import rearrange, repeat
from judging import rows_of, write
from torch import Tensor, nn

from overt import data, measure, models
from overt.attention import AttentionMap, Kind, grid
from overt.capture import class_activation, rise
from overt.data.human import Truth, truth_of
from overt.data.images import load, stretch
from overt.models.attaching.attached import Attached
from overt.models.attaching.levels import Features
from overt.models.cnn import Cells
from overt.models.paying.attention import Levels
from overt.models.photos.efficientnet import MEAN, SPREAD, efficientnet_lite

SIZE, CELLS, FEW = (224, 224), (28, 28), (7, 7)
MAPS = ("class activation", "gradient", "RISE", "LTPA attached")
ROWS = (*MAPS, "uniform", "random", "centre bell", "fitted prior", "people")
SHARES = (0.1, 0.2, 0.4, 0.7)
TEACHING, HELD_OUT, EPOCHS = 800, 200, 10  # photos of Flickr8k, and how often they are seen


class Network(nn.Module):
    """EfficientNet-Lite0 with the cells before its mean as a module that can be named."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = efficientnet_lite().to(memory_format=torch.channels_last)  # faster here
        self.cells = nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.inner.classify(self.cells(self.inner.features(pixels)).mean(dim=(2, 3)))


def roughly(net: nn.Module, pixels: Tensor) -> Tensor:
    """The logits in sixteen bits, where thousands of them are asked for."""
    with torch.autocast("cpu", torch.bfloat16):
        return net(pixels).float()


def pixels_of(images: Tensor) -> Tensor:
    pixels = (images.float() - MEAN) / SPREAD
    return pixels.contiguous(memory_format=torch.channels_last)


# --- maps


def gradient(net: nn.Module, pixels: Tensor, classes: Tensor) -> AttentionMap:
    """How steeply the score of the class changes with each pixel, over its three colours."""
    pixels = pixels.clone().requires_grad_()
    net(pixels).gather(1, classes[:, None]).sum().backward()
    assert pixels.grad is not None
    return AttentionMap.from_cells(pixels.grad.norm(dim=1).flatten(1), grid(*SIZE))


def activation(net: Network, pixels: Tensor, classes: Tensor) -> AttentionMap:
    with torch.no_grad():
        found = class_activation(net, net.cells, pixels, classes)
    return AttentionMap(found.values.clamp_min(0), found.keys, kind=Kind.AMOUNT)


def attached_map(net: Attached, pixels: Tensor) -> AttentionMap:
    """The levels of the attached attention, joined."""
    with torch.no_grad():
        levels = net({"pixel_values": pixels}).attention
    joined = measure.combined([one.over_heads() for one in levels], CELLS)
    return AttentionMap.from_cells(joined.flatten(1).float(), grid(*CELLS))


def teach(backbone: nn.Module, root: Path) -> tuple[Attached, float]:
    """Attention that learns the network's own answers on photos of Flickr8k; the network stays.

    Also the share of held-out photos for which it names the class that the network names.
    """
    torch.manual_seed(0)
    net = models.attach(backbone, classes=1000, size=SIZE).freeze()
    cells, answers = remembered(net, backbone, root, "train", TEACHING)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    net.train()
    for _ in range(EPOCHS):
        for some in torch.randperm(TEACHING).split(32):
            optimizer.zero_grad()
            said = net.decide(encoded(net, [one[some] for one in cells])).prediction
            (-(answers[some] * said.log_softmax(dim=-1)).sum(dim=-1).mean()).backward()
            optimizer.step()
    net.eval()
    cells, answers = remembered(net, backbone, root, "test", HELD_OUT)
    with torch.no_grad():
        said = net.decide(encoded(net, cells)).prediction
    return net, float((said.argmax(dim=-1) == answers.argmax(dim=-1)).float().mean())


def remembered(
    net: Attached, backbone: nn.Module, root: Path, split: str, count: int
) -> tuple[list[Tensor], Tensor]:
    """The cells of every level, and what the network answers, of the first photos of a split."""
    folder = root / "flickr8k"
    names = (folder / f"Flickr_8k.{split}Images.txt").read_text().split()
    files = [folder / "Flicker8k_Dataset" / name for name in names]
    files = [file for file in files if file.is_file()][:count]
    cells, answers = [], []
    for start in range(0, len(files), 32):
        images, _ = load(files[start : start + 32], SIZE, stretch)
        with torch.no_grad():
            cells.append([one.cells for one in net.look_through(pixels_of(images))])
            answers.append(backbone(pixels_of(images)).softmax(dim=-1))
    return [torch.cat(level) for level in zip(*cells, strict=True)], torch.cat(answers)


def encoded(net: Attached, cells: Sequence[Tensor]) -> Levels:
    """What `encode` makes of cells that were computed before."""
    assert net.query is not None
    made = []
    for norm, one in zip(net.norms, cells, strict=True):
        values = rearrange(norm(one.flatten(2)), "i d k -> i k d")
        made.append(Cells(values, grid(one.shape[2], one.shape[3])))
    return Levels(tuple(made), net.query(Features(cells[-1], None)))


def make_maps(
    out: Path,
    source: data.Osie,
    places: Sequence[int],
    masks: int,
    few: int,
    root: Path,
    wanted: Sequence[str] = MAPS,
) -> dict:
    """Every map of every photo on the cells of the truth, by name; those on disk are taken."""
    net = Network().eval()
    taught: list[tuple[Attached, float]] = []
    ways: dict[str, Callable[[Tensor, Tensor, int], AttentionMap]] = {
        "class activation": lambda pixels, classes, _: activation(net, pixels, classes),
        "gradient": lambda pixels, classes, _: gradient(net, pixels, classes),
        "LTPA attached": lambda pixels, classes, _: attached_map(taught[0][0], pixels),
        "RISE": lambda pixels, classes, at: rise(
            partial(roughly, net),
            pixels,
            classes,
            torch.Generator().manual_seed(at),
            masks=masks,
            chunk=2,
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
                taught.append(teach(net.inner, root))
                agrees = taught[0][1]
            shown = places[:few] if name == "RISE" else places
            for start in range(0, len(shown), 4):
                pixels = pixels_of(source.batch(shown[start : start + 4]).images)
                with torch.no_grad():
                    classes = net(pixels).argmax(dim=-1)
                rows.append(measure.on_grid(way(pixels, classes, start), CELLS).values.detach())
                print(name, start, flush=True)
            seconds = (time.process_time() - begun) / len(shown)
            np.savez(path, values=torch.cat(rows).numpy(), seconds=seconds, agrees=agrees)
        with np.load(path) as kept:
            found[name] = torch.from_numpy(kept["values"]).float()
            found[f"{name}/seconds"] = torch.tensor(float(kept["seconds"]))
            found[f"{name}/agrees"] = torch.tensor(float(kept["agrees"]))
    return found


# --- numbers


def of_each(truth: Truth) -> dict[str, Callable[[AttentionMap, AttentionMap], Tensor]]:
    """Measures of a map and one person's fixations, with what they need of other photos."""
    assert truth.fixations is not None and truth.others is not None and truth.prior is not None
    people = truth.fixations.values.shape[3]

    def spread(one: AttentionMap) -> AttentionMap:
        values = repeat(one.values, "b l h 1 k -> (b p) l h 1 k", p=people)
        return AttentionMap(values, one.keys, kind=Kind.AMOUNT)

    others, prior = spread(truth.others), spread(truth.prior)
    return {
        "NSS": measure.nss,
        "AUC-Judd": measure.auc_judd,
        "shuffled AUC": partial(measure.auc_shuffled, others=others),
        "information gain": partial(measure.information_gain, prior=prior),
    }


def agreement(attention: AttentionMap, truth: Truth) -> dict[str, Tensor]:
    """How the map predicts each person's fixations, and how it goes with their density."""
    assert truth.fixations is not None
    found = {
        name: measure.against_each(ask, attention, truth.fixations)
        for name, ask in of_each(truth).items()
    }
    for ask in (measure.cc, measure.sim, measure.spearman):
        found[f"{ask.measure.name} with the density"] = ask(attention, truth.target)
    return found


def faithfulness(net: nn.Module, pixels: Tensor, attention: AttentionMap) -> dict[str, Tensor]:
    decide = measure.in_pixels(partial(roughly, net), pixels, FEW, measure.to_mean)
    coarse = measure.on_grid(attention, FEW)
    found = {}
    for ask in (measure.deletion_area, measure.insertion_area):
        found[ask.measure.name] = ask(decide, coarse, torch.Generator().manual_seed(0), SHARES)
    return found


def judge(name: str, maps: dict, seen: Sequence[tuple[Tensor, Truth]], few: int) -> dict:
    """Every number of one map, of a control or of people, a tensor a measure."""
    net = Network().eval()
    numbers: dict[str, list[Tensor]] = {}
    for place, (images, truth) in enumerate(seen):
        start = 4 * place
        assert truth.people is not None and truth.fixations is not None and truth.prior is not None
        even = measure.uniform(truth.target)
        if name == "people":
            found = {
                ask: measure.ceiling(measured, truth.people, truth.fixations)
                for ask, measured in of_each(truth).items()
            }
        else:
            match name:
                case "uniform":
                    attention = even
                case "random":
                    attention = measure.random_map(even, torch.Generator().manual_seed(start))
                case "centre bell":
                    attention = measure.centre(even)
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
        print("judged", name, start, flush=True)
    return {ask: torch.cat(values) for ask, values in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("--masks", type=int, default=100)
    parser.add_argument("--few", type=int, default=40, help="photos for RISE and for removal")
    parser.add_argument("--only", nargs="*", choices=ROWS, help="these rows, and no table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    root = data.root_of()
    source = data.Osie(root, size=SIZE, how=stretch, cells=CELLS)
    places = list(range(0, len(source), 7))[: asked.photos]
    wanted = asked.only or ROWS
    made = [name for name in wanted if name in MAPS]
    maps = make_maps(asked.out, source, places, asked.masks, asked.few, root, made)
    seen: list[tuple[Tensor, Truth]] = []
    columns: dict[str, dict[str, Tensor]] = {}
    for name in wanted:
        path = asked.out / "numbers" / f"{name.replace(' ', '-')}.npz"
        if not path.is_file():
            for start in range(0, 0 if seen else len(places), 4):
                batch, truth = truth_of(source, places[start : start + 4])
                seen.append((batch.images, truth))
            found = judge(name, maps, seen, asked.few)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **{ask: values.numpy() for ask, values in found.items()})
        nothing = torch.full((len(places),), torch.nan)  # where only the first few were asked
        with np.load(path) as kept:
            columns[name] = {
                ask: torch.cat([torch.from_numpy(kept[ask]), nothing])[: len(places)]
                for ask in kept.files
            }
    if asked.only:
        return
    against = {"NSS": "fitted prior", "deletion area": "random", "insertion area": "random"}
    write(
        asked.out / "osie",
        rows_of(columns, against, MAPS),
        columns,
        about={
            "photos": len(places),
            "cells": list(CELLS),
            "masks": asked.masks,
            "few": asked.few,
            "shares": list(SHARES),
            "seconds a photo": {one: float(maps[f"{one}/seconds"]) for one in MAPS},
            "attached names the network's class": float(maps["LTPA attached/agrees"]),
            "data": source.digest(),
        },
    )


if __name__ == "__main__":
    main()
