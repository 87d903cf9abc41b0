"""Token pruning between the layers of a ViT: accuracy, operations and time against controls.

    python results/tokens_front.py seed 0 --data DATA --out OUT  # and 1, 2: in parallel
    python results/tokens_front.py time --out OUT                # alone on the device
    python results/tokens_front.py join --out OUT                # OUT/results.json, verdicts

A small ViT (8 layers of 192, patches of 4 x 4, 64 cells and a class token) is trained on CIFAR-10
from scratch. Then every rule removes tokens after 2, 4 and 6 layers, at predefined rates: without
training, and after fine-tuning under the rule. Merging removes as many tokens per layer as costs
the same. Reported are correct answers on the 10,000 test images, operations by formula and by
PyTorch, and interleaved time as a ratio to the full model.
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

from overt import io
from overt import nn as overt_nn
from overt.data import InMemoryImages, random_crop_flip
from overt.data.batch import Batch
from overt.data.cifar import Cifar10
from overt.experiments.runner import git_commit, package_versions
from overt.losses import Loss
from overt.metrics import two_level_interval
from overt.nn.token_pruning.flops import encoder_flops
from overt.nn.token_pruning.tokens import TokenSequence
from overt.train import FitConfig, ParameterSet, Progress, Reporter, fit, warmup_cosine
from overt.train.loop import seed_everything

SEEDS = (0, 1, 2)
AFTER = (2, 4, 6)
SHARES = (0.9, 0.75, 0.6, 0.45)  # of the cells, at each of the three steps
TUNED = (0.75, 0.45)
ADAPTIVE, TEMPERATURES = "adaptive presence", (8.0, 2.0, 0.5)
ROUNDS, PASSES = 7, 3
AT_ONCE = (256, 2048)  # images per pass when timing
PORTION = 1000  # images per batch when testing

Opened = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Sizes:
    """Size of the network and length of the training."""

    layers: int = 8
    width: int = 192
    heads: int = 3
    inner: int = 768
    epochs: int = 25
    tuning: int = 2
    batch: int = 512
    rate: float = 1e-3
    tuning_rate: float = 2e-4
    pictures: int | None = None  # of the training and test split


TINY = Sizes(width=24, heads=2, inner=48, epochs=1, tuning=1, batch=64, pictures=256)
SMALL = Sizes(width=64, heads=2, inner=128, epochs=12, tuning=1, batch=64, pictures=3000)


# --- rules


@dataclass(frozen=True)
class Row:
    """One way to remove tokens: its rule, its rate, and whether the model is fine-tuned."""

    rule: str
    rate: float
    opened: Opened
    tuned: bool

    @property
    def name(self) -> str:
        return f"{self.rule} {self.rate:g}"


def least_presence(tokens: TokenSequence) -> Tensor:
    """Score tokens by the smallest norm: control for the direction of the rule."""
    return -overt_nn.by_presence(tokens)


def lengths(share: float, sizes: Sizes, cells: int = 64) -> list[int]:
    """Return the tokens of each layer if a share is kept at each step."""
    found = []
    for layer in range(sizes.layers):
        if layer in AFTER:
            cells = max(1, int(share * cells + 0.5))
        found.append(cells + 1)
    return found


def merge_count(share: float, sizes: Sizes, cells: int = 64) -> int:
    """Return how many tokens to merge per layer for the same cost as keeping `share`."""
    budget = encoder_flops(lengths(share, sizes), sizes.width, sizes.inner)
    for count in range(cells // 2):
        left, layer_tokens = cells, [cells + 1]
        for _ in range(sizes.layers - 1):
            left -= min(count, left // 2)
            layer_tokens.append(left + 1)
        if encoder_flops(layer_tokens, sizes.width, sizes.inner) <= budget:
            return count
    return cells // 2


def rows(sizes: Sizes, device: str) -> Iterator[Row]:
    """Yield every rule at every rate."""
    chance = overt_nn.by_random(torch.Generator(device).manual_seed(0))
    scores: dict[str, tuple[Any, Any]] = {
        "presence": (overt_nn.by_presence, None),
        "least presence": (least_presence, None),
        "class attention": (overt_nn.by_class_attention, None),
        "class attention, rest fused": (overt_nn.by_class_attention, overt_nn.fuse_tokens),
        "chance": (chance, None),
        "grid": (overt_nn.by_grid, None),
    }
    for share in SHARES:
        keep = partial(overt_nn.keep_share, share=share)
        for rule, (score, rest) in scores.items():
            opened = partial(overt_nn.prune_tokens, after=AFTER, keep=keep, score=score, rest=rest)
            yield Row(rule, share, opened, share in TUNED and rule != "least presence")
        count = merge_count(share, sizes)
        yield Row("merging", share, partial(overt_nn.merge_tokens, count=count), share in TUNED)
    for temperature in TEMPERATURES:
        keep = partial(overt_nn.keep_above_uniform, temperature=temperature)
        opened = partial(overt_nn.prune_tokens, after=AFTER, keep=keep)
        yield Row(ADAPTIVE, temperature, opened, temperature == TEMPERATURES[0])


# --- the network


def network(sizes: Sizes) -> nn.Module:
    """Return a ViT for images of 32 x 32 pixels, with random weights."""
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
    """Convert bytes to network input, about -2 to 2."""
    return images.float() / 64 - 2


def step(model: nn.Module, batch: Batch, progress: Progress) -> dict[str, dict[str, Loss]]:
    """Cross-entropy with smoothed labels on shifted and mirrored pictures."""
    assert batch.images is not None and batch.labels is not None
    draw = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    logits = model(pixel_values=pixels(random_crop_flip(batch.images, draw))).logits
    total = F.cross_entropy(logits.float(), batch.labels, reduction="sum", label_smoothing=0.1)
    return {"all": {"class": Loss(total, torch.tensor(len(batch), device=total.device))}}


@dataclass(frozen=True)
class Plan:
    """Epochs, learning rate and seed of a training."""

    epochs: int
    rate: float
    seed: int


def learn(model: nn.Module, train: InMemoryImages, batch: int, plan: Plan, device: str) -> float:
    """Train in place; return the seconds."""
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, weight_decay=0.05, fused=on_gpu)
    sets = {"all": ParameterSet(optimizer, warmup_cosine(0.1), clip=1.0)}
    limits = FitConfig(plan.epochs, batch, save_every=10**9, log_every=50, bf16=on_gpu)
    model.train()
    with tempfile.TemporaryDirectory() as folder:
        fitted = fit(
            model, train, step, sets, limits,
            out=Path(folder), seed=plan.seed, device=device, reporter=Reporter(enabled=False),
        )  # fmt: skip
    model.eval()
    return fitted.seconds


@contextmanager
def inference_context(device: str) -> Iterator[None]:
    """Disable gradients, and use bfloat16 on a GPU."""
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        yield


# --- accuracy and operations


def evaluate(
    model: nn.Module, test: InMemoryImages, opened: Opened, sizes: Sizes, device: str
) -> tuple[dict[str, Any], np.ndarray]:
    """Return the cost of a rule and its correct answers per image."""
    right, flops, left = [], [], []
    with opened(model) as thinned, inference_context(device):
        for start in range(0, len(test), PORTION):
            images = pixels(test.images[start : start + PORTION])
            labels = test.labels[start : start + PORTION]
            right.append(model(pixel_values=images).logits.argmax(dim=1) == labels)
            if thinned is not None:
                layer_tokens = thinned.lengths
                left.append(thinned.steps[-1].count - 1)
            else:
                layer_tokens = [65] * sizes.layers
            flops.append(encoder_flops(layer_tokens, sizes.width, sizes.inner) * len(images))
        # unfused: PyTorch does not count products in every fused kernel
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(pixel_values=images)
    answers = torch.cat(right).cpu()
    found = {
        "accuracy": answers.float().mean().item(),
        "megaflops": sum(flops) / len(test) / 1e6,
        "megaflops_by_pytorch": counter.get_total_flops() / len(images) / 1e6,
        "cells_left": torch.cat(left).float().mean().item() if left else 64.0,
        "layers_given": layer_tokens,
    }
    return found, answers.numpy()


def one_seed(seed: int, data: Path, out: Path, sizes: Sizes, device: str) -> None:
    """Train once, then evaluate every rule on the network, and some after fine-tuning."""
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

    note("whole", evaluate(model, test, _whole, sizes, device))
    for row in rows(sizes, device):
        note(row.name, evaluate(model, test, row.opened, sizes, device))
    again, spent = tuned(_whole)
    note("whole, tuned", evaluate(again, test, _whole, sizes, device), seconds=spent)
    for row in rows(sizes, device):
        if row.tuned:
            again, spent = tuned(row.opened)
            one = evaluate(again, test, row.opened, sizes, device)
            note(f"{row.name}, tuned", one, seconds=spent)
    found |= {"settings": asdict(sizes), "data": {"train": train.source, "test": test.source}}
    found |= {
        "test": len(test),
        "versions": package_versions(),
        "commit": git_commit(),
        "device": _named(device),
    }
    io.write_json(out / f"seed-{seed}.json", found)
    io.write_arrays(out / f"seed-{seed}.npz", answers)
    if seed == SEEDS[0]:
        io.write_tensors(out / "model.safetensors", model.state_dict())


def _whole(model: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


def _part(data: Path, split: str, sizes: Sizes, device: str) -> InMemoryImages:
    """Return all 50,000 training images (no model selection), or the test images."""
    whole = InMemoryImages.of(Cifar10(data, split, validation=0), device)
    n = sizes.pictures
    if n is None:
        return whole
    return InMemoryImages(
        whole.name, split, whole.ids[:n], whole.images[:n], whole.labels[:n], whole.source
    )


def _named(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


# --- time


def time_rules(out: Path, sizes: Sizes, device: str, at_once: tuple[int, ...] = AT_ONCE) -> None:
    """Time forward passes, interleaved, as ratios to the full model.

    Without trained weights in `out`, random ones are used: the cost of a fixed share does not
    depend on them. That of the adaptive rule does, so it is skipped then.
    """
    seed_everything(0)
    model = network(sizes).to(device).eval()
    trained = (out / "model.safetensors").is_file()
    if trained:
        model.load_state_dict(io.read_tensors(out / "model.safetensors"))
    turns: dict[str, Opened] = {"whole": _whole, "whole, all kept": _all_kept}
    every = rows(sizes, device)
    turns |= {row.name: row.opened for row in every if trained or row.rule != ADAPTIVE}
    found: dict[str, Any] = {
        "device": _named(device),
        "rounds": ROUNDS,
        "versions": package_versions(),
    }
    found |= {"commit": git_commit(), "trained": trained}
    for count in at_once:
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(count, 3, 32, 32, generator=draw).to(device)
        times: dict[str, list[float]] = {name: [] for name in turns}
        with inference_context(device):
            for number in range(ROUNDS + 1):
                for name, opened in turns.items():
                    with opened(model):
                        spent = _seconds(partial(model, pixel_values=images), device)
                    if number:  # the first round is a warm-up
                        times[name].append(spent)
        medians = {name: statistics.median(each) for name, each in times.items()}
        ratios = {name: each / medians["whole"] for name, each in medians.items()}
        found[str(count)] = {"ratio": ratios, "seconds": times}
        for name, ratio in ratios.items():
            print(f"{count} pictures, {name}: {ratio:.3f}")
        io.write_json(out / "time.json", found)  # save partial results


def _all_kept(model: nn.Module) -> AbstractContextManager[Any]:
    return overt_nn.prune_tokens(model, AFTER, overt_nn.keep_all)


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


def combine(out: Path) -> None:
    """Combine all seeds and times in one file, and apply the decision rule of the log."""
    seeds = [io.read_json(out / f"seed-{seed}.json") for seed in SEEDS]
    bits = [io.read_arrays(out / f"seed-{seed}.npz") for seed in SEEDS]
    count = seeds[0]["test"]
    right = {
        name: torch.tensor(np.stack([np.unpackbits(one[name])[:count] for one in bits])).double()
        for name in bits[0]
    }
    clock = io.read_json(out / "time.json") if (out / "time.json").is_file() else {}
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
    rules = {name: _compare(right, *pair) for name, pair in _questions(right).items()}
    verdicts = _verdicts(rules, table, clock)
    result = {"command": " ".join(sys.argv), "verdicts": verdicts, "table": table, "rules": rules}
    result["time"] = clock
    io.write_json(out / "results.json", {**result, "seeds": seeds})
    for name, one in table.items():
        mean, spread = one["accuracy"]["mean"], one["accuracy"]["spread"]
        print(f"{name:42} {mean:.4f} ± {spread:.4f} {one['megaflops']:5.0f} {one['time_ratio']}")
    for name, holds in verdicts.items():
        print(f"{name}: {holds}")
    for name, one in rules.items():
        low, high = one["low"], one["high"]
        print(f"{name}: {one['verdict']} ({one['mean']:+.4f}, {low:+.4f} to {high:+.4f})")


def _verdicts(
    rules: dict[str, dict[str, Any]], table: dict[str, dict[str, Any]], clock: dict[str, Any]
) -> dict[str, bool | None]:
    """Apply the decision rule of the log; None where nothing was timed."""

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
        "works without fine-tuning": better("", "chance", "grid"),
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
    """Return the pairs of the decision rule: is the first better than the second?"""
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


def _compare(right: dict[str, Tensor], first: str, second: str) -> dict[str, Any]:
    """Return the paired difference, its interval over networks and images, and a verdict."""
    difference = right[first] - right[second]
    found = two_level_interval(difference)
    verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "open"
    return {
        **asdict(found),
        "verdict": verdict,
        "note": found.note,
        "by_seed": difference.mean(dim=1).tolist(),
    }


def _spread(values: list[float]) -> dict[str, float]:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "spread": spread}


def main() -> None:
    """Run one seed, or the timing, or the combination."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("seed", "time", "join"))
    parser.add_argument("seed", type=int, nargs="?", choices=SEEDS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="a test run of a minute on a CPU")
    size.add_argument(
        "--small", action="store_true", help="a quarter of an hour per seed on one core"
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = TINY if args.tiny else SMALL if args.small else Sizes()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "seed":
        if args.seed is None or args.data is None:
            parser.error("a seed needs its number and --data")
        one_seed(args.seed, args.data, args.out, sizes, device)
    elif args.what == "time":
        at_once = (8,) if args.tiny else AT_ONCE[:1] if args.small else AT_ONCE
        time_rules(args.out, sizes, device, at_once)
    else:
        combine(args.out)


if __name__ == "__main__":
    main()
