"""Hard attention between the layers of a ViT: accuracy, operations and time against its controls.

    python benchmarks/tokens_front.py seed 0 --data DATA --out OUT  # and 1, 2: side by side
    python benchmarks/tokens_front.py time --out OUT                # alone on the device
    python benchmarks/tokens_front.py join --out OUT                # OUT/results.json, verdicts

A small ViT (8 layers of 192, patches of 4 x 4, 64 cells and a class token) learns CIFAR-10 from
scratch. Then every rule takes tokens out after 2, 4 and 6 layers, at rates chosen beforehand:
without any training, and after fine-tuning under the rule. Merging takes as many tokens a layer as
costs the same. What is counted: correct answers on the 10,000 test pictures, operations by formula
and by PyTorch, seconds by turns as a ratio to the whole model.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTConfig, ViTForImageClassification

from overt import files, models
from overt.data import Resident, crop_and_flip
from overt.data.batch import Batch
from overt.data.cifar import Cifar10
from overt.measure import two_level
from overt.models.thinning.cost import encoder_flops
from overt.models.thinning.tokens import Tokens
from overt.recipes.running import commit, versions
from overt.supervise import Loss
from overt.train import Limits, ParameterSet, Progress, Reporter, fit, warm_then_cosine
from overt.train.loop import seed_everything

SEEDS = (0, 1, 2)
AFTER = (2, 4, 6)
SHARES = (0.9, 0.75, 0.6, 0.45)  # of the cells, at each of the three steps
TUNED = (0.75, 0.45)
ADAPTIVE, TEMPERATURES = "adaptive presence", (8.0, 2.0, 0.5)
ROUNDS, PASSES = 7, 3
AT_ONCE = (256, 2048)  # pictures a pass when timing
PORTION = 1000  # pictures a batch when testing

Opened = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Sizes:
    """How large the network is, and how long it learns."""

    layers: int = 8
    width: int = 192
    heads: int = 3
    inner: int = 768
    epochs: int = 25
    tuning: int = 2
    batch: int = 512
    rate: float = 1e-3
    tuning_rate: float = 2e-4
    pictures: int | None = None  # of the training part, and of the test part


TINY = Sizes(width=24, heads=2, inner=48, epochs=1, tuning=1, batch=64, pictures=256)
SMALL = Sizes(width=64, heads=2, inner=128, epochs=12, tuning=1, batch=64, pictures=3000)


# --- what is compared


@dataclass(frozen=True)
class Row:
    """One way to have fewer tokens: its rule, how much it keeps, and whether it is fine-tuned."""

    rule: str
    rate: float
    opened: Opened
    tuned: bool

    @property
    def name(self) -> str:
        return f"{self.rule} {self.rate:g}"


def least_presence(tokens: Tokens) -> Tensor:
    """The smallest norms first: the control of the rule's direction."""
    return -models.by_presence(tokens)


def lengths(share: float, sizes: Sizes, cells: int = 64) -> list[int]:
    """The tokens of each layer when a share is kept at each step."""
    found = []
    for layer in range(sizes.layers):
        if layer in AFTER:
            cells = max(1, int(share * cells + 0.5))
        found.append(cells + 1)
    return found


def as_many(share: float, sizes: Sizes, cells: int = 64) -> int:
    """How many tokens to merge a layer so that no more is computed than by keeping `share`."""
    budget = encoder_flops(lengths(share, sizes), sizes.width, sizes.inner)
    for count in range(cells // 2):
        left, given = cells, [cells + 1]
        for _ in range(sizes.layers - 1):
            left -= min(count, left // 2)
            given.append(left + 1)
        if encoder_flops(given, sizes.width, sizes.inner) <= budget:
            return count
    return cells // 2


def rows(sizes: Sizes, device: str) -> Iterator[Row]:
    """Every rule at every rate."""
    chance = models.by_chance(torch.Generator(device).manual_seed(0))
    scores: dict[str, tuple[Any, Any]] = {
        "presence": (models.by_presence, None),
        "least presence": (least_presence, None),
        "class attention": (models.by_class_attention, None),
        "class attention, rest fused": (models.by_class_attention, models.fused),
        "chance": (chance, None),
        "grid": (models.by_grid, None),
    }
    for share in SHARES:
        keep = partial(models.keep_share, share=share)
        for rule, (score, rest) in scores.items():
            opened = partial(models.thin, after=AFTER, keep=keep, score=score, rest=rest)
            yield Row(rule, share, opened, share in TUNED and rule != "least presence")
        count = as_many(share, sizes)
        yield Row("merging", share, partial(models.merge, count=count), share in TUNED)
    for temperature in TEMPERATURES:
        keep = partial(models.keep_above_uniform, temperature=temperature)
        opened = partial(models.thin, after=AFTER, keep=keep)
        yield Row(ADAPTIVE, temperature, opened, temperature == TEMPERATURES[0])


# --- the network


def network(sizes: Sizes) -> nn.Module:
    """A ViT for pictures of 32 x 32 pixels, with random weights."""
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner,
    )
    config.num_labels = 10
    return ViTForImageClassification(config)


def pixels(images: Tensor) -> Tensor:
    """Bytes as a network wants them, about -2 to 2."""
    return images.float() / 64 - 2


def step(model: nn.Module, batch: Batch, progress: Progress) -> dict[str, dict[str, Loss]]:
    """Cross-entropy with smoothed labels on shifted and mirrored pictures."""
    assert batch.images is not None and batch.labels is not None
    draw = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    logits = model(pixel_values=pixels(crop_and_flip(batch.images, draw))).logits
    total = F.cross_entropy(logits.float(), batch.labels, reduction="sum", label_smoothing=0.1)
    return {"all": {"class": Loss(total, torch.tensor(len(batch), device=total.device))}}


@dataclass(frozen=True)
class Plan:
    """How long to train, at which rate, in which order of pictures."""

    epochs: int
    rate: float
    seed: int


def learn(model: nn.Module, train: Resident, batch: int, plan: Plan, device: str) -> float:
    """Train in place; seconds taken."""
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, weight_decay=0.05, fused=on_gpu)
    sets = {"all": ParameterSet(optimizer, warm_then_cosine(0.1), clip=1.0)}
    limits = Limits(plan.epochs, batch, save_every=10**9, log_every=50, bf16=on_gpu)
    model.train()
    with tempfile.TemporaryDirectory() as folder:
        fitted = fit(
            model, train, step, sets, limits,
            out=Path(folder), seed=plan.seed, device=device, reporter=Reporter(enabled=False),
        )  # fmt: skip
    model.eval()
    return fitted.seconds


@contextmanager
def judging(device: str) -> Iterator[None]:
    """No gradients, and half precision on a GPU."""
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        yield


# --- accuracy and operations


def tested(
    model: nn.Module, test: Resident, opened: Opened, sizes: Sizes, device: str
) -> tuple[dict[str, Any], np.ndarray]:
    """What a rule costs and how many answers are right, picture by picture."""
    right, flops, left = [], [], []
    with opened(model) as thinned, judging(device):
        for start in range(0, len(test), PORTION):
            images = pixels(test.images[start : start + PORTION])
            labels = test.labels[start : start + PORTION]
            right.append(model(pixel_values=images).logits.argmax(dim=1) == labels)
            if thinned is not None:
                given = thinned.lengths
                left.append(thinned.steps[-1].count - 1)
            else:
                given = [65] * sizes.layers
            flops.append(encoder_flops(given, sizes.width, sizes.inner) * len(images))
        # plain products: PyTorch does not count those inside every fused kernel
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(pixel_values=images)
    answers = torch.cat(right).cpu()
    found = {
        "accuracy": answers.float().mean().item(),
        "megaflops": sum(flops) / len(test) / 1e6,
        "megaflops_by_pytorch": counter.get_total_flops() / len(images) / 1e6,
        "cells_left": torch.cat(left).float().mean().item() if left else 64.0,
        "layers_given": given,
    }
    return found, answers.numpy()


def one_seed(seed: int, data: Path, out: Path, sizes: Sizes, device: str) -> None:
    """Train once, then try every rule on the trained network, and some after fine-tuning."""
    train = _part(data, "train", sizes, device)
    test = _part(data, "test", sizes, device)
    seed_everything(seed)
    model = network(sizes).to(device)
    seconds = learn(model, train, sizes.batch, Plan(sizes.epochs, sizes.rate, seed), device)
    found: dict[str, Any] = {"seconds": seconds, "rows": {}}
    answers: dict[str, np.ndarray] = {}

    def note(name: str, one: tuple[dict[str, Any], np.ndarray], **more: Any) -> None:
        found["rows"][name] = {**one[0], **more}
        answers[name] = np.packbits(one[1])
        print(f"seed {seed} {name}: {one[0]['accuracy']:.4f} {one[0]['megaflops']:.0f}", flush=True)

    def tuned(opened: Opened) -> tuple[nn.Module, float]:
        again = deepcopy(model)
        plan = Plan(sizes.tuning, sizes.tuning_rate, seed + 100)
        with opened(again):
            return again, learn(again, train, sizes.batch, plan, device)

    note("whole", tested(model, test, _whole, sizes, device))
    for row in rows(sizes, device):
        note(row.name, tested(model, test, row.opened, sizes, device))
    again, spent = tuned(_whole)
    note("whole, tuned", tested(again, test, _whole, sizes, device), seconds=spent)
    for row in rows(sizes, device):
        if row.tuned:
            again, spent = tuned(row.opened)
            one = tested(again, test, row.opened, sizes, device)
            note(f"{row.name}, tuned", one, seconds=spent)
    found |= {"settings": asdict(sizes), "data": {"train": train.source, "test": test.source}}
    found |= {
        "test": len(test),
        "versions": versions(),
        "commit": commit(),
        "device": _named(device),
    }
    files.write_json(out / f"seed-{seed}.json", found)
    files.write_arrays(out / f"seed-{seed}.npz", answers)
    if seed == SEEDS[0]:
        files.write_tensors(out / "model.safetensors", model.state_dict())


def _whole(model: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


def _part(data: Path, split: str, sizes: Sizes, device: str) -> Resident:
    """All 50,000 training pictures, since nothing is chosen by them, or the test pictures."""
    whole = Resident.of(Cifar10(data, split, validation=0), device)
    n = sizes.pictures
    if n is None:
        return whole
    return Resident(
        whole.name, split, whole.ids[:n], whole.images[:n], whole.labels[:n], whole.source
    )


def _named(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


# --- time


def timed(out: Path, sizes: Sizes, device: str, at_once: tuple[int, ...] = AT_ONCE) -> None:
    """Seconds of a forward pass by turns, as ratios to the whole model.

    Where no trained weights lie in `out`, random ones serve: what a fixed share costs does not
    depend on them. What the adaptive rule keeps does, so it is left out then.
    """
    seed_everything(0)
    model = network(sizes).to(device).eval()
    trained = (out / "model.safetensors").is_file()
    if trained:
        model.load_state_dict(files.read_tensors(out / "model.safetensors"))
    turns: dict[str, Opened] = {"whole": _whole, "whole, all kept": _all_kept}
    every = rows(sizes, device)
    turns |= {row.name: row.opened for row in every if trained or row.rule != ADAPTIVE}
    found: dict[str, Any] = {"device": _named(device), "rounds": ROUNDS, "versions": versions()}
    found |= {"commit": commit(), "trained": trained}
    for count in at_once:
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(count, 3, 32, 32, generator=draw).to(device)
        times: dict[str, list[float]] = {name: [] for name in turns}
        with judging(device):
            for number in range(ROUNDS + 1):
                for name, opened in turns.items():
                    with opened(model):
                        spent = _seconds(partial(model, pixel_values=images), device)
                    if number:  # the first round warms up
                        times[name].append(spent)
        medians = {name: statistics.median(each) for name, each in times.items()}
        ratios = {name: each / medians["whole"] for name, each in medians.items()}
        found[str(count)] = {"ratio": ratios, "seconds": times}
        for name, ratio in ratios.items():
            print(f"{count} pictures, {name}: {ratio:.3f}")
        files.write_json(out / "time.json", found)  # what is measured stays if the rest is stopped


def _all_kept(model: nn.Module) -> AbstractContextManager[Any]:
    return models.thin(model, AFTER, models.keep_all)


def _seconds(run: Callable[[], Any], device: str) -> float:
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(PASSES):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / PASSES


# --- all seeds together, and the verdict


def joined(out: Path) -> None:
    """All seeds and times in one file, the front, and what the decision rule in the log says."""
    seeds = [files.read_json(out / f"seed-{seed}.json") for seed in SEEDS]
    bits = [files.read_arrays(out / f"seed-{seed}.npz") for seed in SEEDS]
    count = seeds[0]["test"]
    right = {
        name: torch.tensor(np.stack([np.unpackbits(one[name])[:count] for one in bits])).double()
        for name in bits[0]
    }
    clock = files.read_json(out / "time.json") if (out / "time.json").is_file() else {}
    table: dict[str, dict[str, Any]] = {}
    for name in right:
        each = [one["rows"][name] for one in seeds]
        table[name] = {
            "accuracy": _spread([one["accuracy"] for one in each]),
            "megaflops": statistics.fmean(one["megaflops"] for one in each),
            "megaflops_by_pytorch": statistics.fmean(one["megaflops_by_pytorch"] for one in each),
            "cells_left": statistics.fmean(one["cells_left"] for one in each),
            "time_ratio": {
                count: clock[count]["ratio"].get(name.removesuffix(", tuned"))
                for count in map(str, AT_ONCE)
                if count in clock
            },
        }
    rules = {name: _asked(right, *pair) for name, pair in _questions(right).items()}
    verdicts = _decided(rules, table, clock)
    result = {"command": " ".join(sys.argv), "verdicts": verdicts, "table": table, "rules": rules}
    result["time"] = clock
    files.write_json(out / "results.json", {**result, "seeds": seeds})
    for name, one in table.items():
        mean, spread = one["accuracy"]["mean"], one["accuracy"]["spread"]
        print(f"{name:42} {mean:.4f} ± {spread:.4f} {one['megaflops']:5.0f} {one['time_ratio']}")
    for name, holds in verdicts.items():
        print(f"{name}: {holds}")
    for name, one in rules.items():
        low, high = one["low"], one["high"]
        print(f"{name}: {one['verdict']} ({one['mean']:+.4f}, {low:+.4f} to {high:+.4f})")


def _decided(
    rules: dict[str, dict[str, Any]], table: dict[str, dict[str, Any]], clock: dict[str, Any]
) -> dict[str, bool | None]:
    """What the decision rule in the log says; None where nothing was timed."""

    def better(end: str, *others: str) -> bool:
        asked = [f"presence {share:g}{end} over {other}" for share in TUNED for other in others]
        return all(rules[name]["verdict"] == "better" for name in asked)

    def cost(name: str, what: str) -> float:
        return float(table[name][what] / table["whole"][what])

    kept = [f"presence {share:g}" for share in SHARES]
    busy = max(
        (one for one in map(str, AT_ONCE) if one in clock), key=int, default=str(AT_ONCE[-1])
    )
    ours, theirs = (
        [table["whole"][what] - table[one][what] for one in kept]
        for what in ("megaflops", "megaflops_by_pytorch")
    )
    spent = {name: one["time_ratio"].get(busy) for name, one in table.items()}
    timed_all = all(spent[one] is not None for one in kept)
    return {
        "works between layers": better(", tuned", "chance", "grid"),
        "works as it is": better("", "chance", "grid"),
        "large norms are the ones to keep": all(
            rules[f"{one} over least presence"]["verdict"] == "better" for one in kept
        ),
        "little is lost": rules[f"{kept[1]}, tuned, over whole, tuned"]["low"] > -0.01,
        "the formula saves what PyTorch saves": all(
            abs(one - other) < 0.01 * other for one, other in zip(ours, theirs, strict=True)
        ),
        "less work is less time": all(spent[x] <= 1.15 * cost(x, "megaflops") for x in kept)
        if timed_all
        else None,
        "choosing itself costs little": clock[busy]["ratio"]["whole, all kept"] <= 1.10
        if busy in clock
        else None,
    }


def _questions(right: dict[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Pairs that the decision rule asks about: is the first better than the second?"""
    found = {}
    for share in SHARES:
        for end in ("", ", tuned") if share in TUNED else ("",):
            ours = f"presence {share:g}{end}"
            for other in (
                "chance", "grid", "class attention", "class attention, rest fused", "merging"
            ):  # fmt: skip
                found[f"{ours} over {other}"] = (ours, f"{other} {share:g}{end}")
        found[f"presence {share:g} over least presence"] = (
            f"presence {share:g}", f"least presence {share:g}"
        )  # fmt: skip
    for share in TUNED:
        found[f"presence {share:g}, tuned, over whole, tuned"] = (
            f"presence {share:g}, tuned", "whole, tuned"
        )  # fmt: skip
    return {name: pair for name, pair in found.items() if all(one in right for one in pair)}


def _asked(right: dict[str, Tensor], first: str, second: str) -> dict[str, Any]:
    """The difference on the same networks and pictures, its interval over both, and a verdict."""
    difference = right[first] - right[second]
    found = two_level(difference)
    verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "open"
    return {**asdict(found), "verdict": verdict, "by_seed": difference.mean(dim=1).tolist()}


def _spread(values: list[float]) -> dict[str, float]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "spread": spread}


def main() -> None:
    """One seed, or the times, or all together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("seed", "time", "join"))
    parser.add_argument("seed", type=int, nargs="?", choices=SEEDS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="a trial of a minute on a CPU")
    size.add_argument("--small", action="store_true", help="a quarter of an hour a seed on a core")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = TINY if given.tiny else SMALL if given.small else Sizes()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "seed":
        if given.seed is None or given.data is None:
            parser.error("a seed needs its number and --data")
        one_seed(given.seed, given.data, given.out, sizes, device)
    elif given.what == "time":
        at_once = (8,) if given.tiny else AT_ONCE[:1] if given.small else AT_ONCE
        timed(given.out, sizes, device, at_once)
    else:
        joined(given.out)


if __name__ == "__main__":
    main()
