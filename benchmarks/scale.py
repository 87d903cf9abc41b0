"""Estimate time, memory and cost of the papers' full experiments from measured rates.

    python benchmarks/scale.py

Nothing is measured here. Rates are read from committed results of one H200 or of one CPU thread;
entries without a measured rate are empty. Work is distributed evenly. Training adds one all-reduce
of all gradients at the end of each step, without overlap, as in `fit`: a ring moves
`2 (n - 1) / n` times the gradients over the slowest link. Prices and links are assumptions, stated
here and on the page.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
GPU_COUNTS = (1, 8, 64)
GPU_HOUR = 3.0  # dollars per GPU hour
CORE_HOUR = 0.04  # dollars per CPU core hour
INTRA_NODE, INTER_NODE = 300e9, 40e9  # bytes per second between GPUs of one machine, and of several
FLOAT16, FLOAT32 = 2, 4  # bytes per number

# Sizes of the training sets.
CIFAR, COCO, VQA1, VQA2, PHRASES = 50_000, 113_287, 248_349, 443_757, 54_313


@dataclass(frozen=True)
class Rate:
    """Measured samples per second, the batch size, and the file of the measurement."""

    samples: float
    batch: int
    source: str
    gpu: bool = True


@dataclass(frozen=True)
class Experiment:
    """One experiment: the total number of samples and the number of trained parameters."""

    name: str
    samples: float
    rate: Rate | None
    parameters: float = 0.0  # 0: no all-reduce

    def hours(self, gpus: int) -> float | None:
        """Return the hours on so many GPUs, each with the measured batch size."""
        if self.rate is None:
            return None
        steps = self.samples / self.rate.batch / gpus
        return steps * (self.rate.batch / self.rate.samples + self.allreduce_seconds(gpus)) / 3600

    def allreduce_seconds(self, gpus: int) -> float:
        """Return the seconds per step of the all-reduce of gradients."""
        link = INTRA_NODE if gpus <= 8 else INTER_NODE
        return 2 * (gpus - 1) / gpus * FLOAT32 * self.parameters / link

    def communication_share(self, gpus: int) -> float:
        """Return the share of a step spent on all-reduce."""
        assert self.rate is not None
        return self.allreduce_seconds(gpus) / (
            self.allreduce_seconds(gpus) + self.rate.batch / self.rate.samples
        )

    def cost(self, gpus: int) -> float | None:
        """Return the cost in dollars."""
        hours = self.hours(gpus)
        if hours is None or self.rate is None:
            return None
        return hours * gpus * (GPU_HOUR if self.rate.gpu else CORE_HOUR)


# --- measured rates


def read(name: str) -> Any:
    """Return a committed result, or None."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


GPU_RESULTS = "speed/h200.json"


def section(name: str) -> Any:
    """Return a section of the results of the GPU, or None."""
    results = read(GPU_RESULTS)
    return None if results is None else results["sections"].get(name)


def max_rate(facts: dict[str, Any], start: str, key: str = "samples_per_second") -> float | None:
    """Return the highest rate among the entries with this prefix."""
    found = [one[key] for name, one in facts.items() if name.startswith(start)]
    return max(found) if found else None


def classifier_rate() -> Rate:
    """Return the rate of VGG-att2 in the training loop, images of 32 x 32 pixels."""
    results = section("training")
    found = None if results is None else max_rate(results["facts"], "training loop, att2-concat-pc")
    if found is not None:
        return Rate(found, 256, GPU_RESULTS)
    name = "ltpa-1-short/speed.json"
    steps = read(name)["rows"]["att2-concat-pc"]["seconds_a_step"]["att2-concat-pc"]
    return Rate(256 / statistics.median(steps), 256, name)


def grounding_rate() -> Rate:
    """Return the best rate of supervised attention in a BERT-base, 164 positions."""
    results, start = section("supervision"), "VL-BERT 164 x 64"
    rows = (
        []
        if results is None
        else [one for one in results["rows"] if one["label"].startswith(start)]
    )
    times = [one["ours_s"]["median"] for one in rows if one["ours"] == "direct" and one["ours_s"]]
    if times:
        return Rate(64 / min(times), 64, GPU_RESULTS)
    name = "speed/capture-h200.json"
    row = read(name)["rows"][0]
    return Rate(1000 * row["b"] / (row["plain_ms"] * row["watched_time"]), row["b"], name)


def critic_rate() -> Rate:
    """Return the rate of self-critical steps of the paper's captioner with a gate, 5 captions."""
    results = section("captions")
    start = "self-critical step, as in the paper, gate"
    found = None if results is None else max_rate(results["facts"], start, "images_per_second")
    if found is not None:
        return Rate(found, 64, GPU_RESULTS)
    name = "a2/speed.json"
    step = read(name)["seconds"]["6 layers, width 512, gate, 64 x 5"]["step"]
    return Rate(64 / step, 64, name)


def search_rate() -> Rate | None:
    """Return images per second, 500 masks each: on a GPU if measured, else on a CPU thread."""
    results = section("surrogates")
    start = "images per second"
    rows = (
        []
        if results is None
        else [one for one in results["rows"] if one["label"].startswith(start)]
    )
    rates = [one["value"]["median"] for one in rows if one["value"] is not None]
    if rates:
        return Rate(max(rates), 512, GPU_RESULTS)
    results = read("speed/cpu.json")
    if results is None or "surrogates" not in results["sections"]:
        return None
    start = "500 masks of 3 x 3, no repeats"
    for row in results["sections"]["surrogates"]["rows"]:
        if row["label"].startswith(start):
            return Rate(2 / row["ours_s"]["median"], 2, "speed/cpu.json", gpu=False)
    return None


def next_word_rate() -> Rate | None:
    """Return the rate of next-word training of the paper's captioner, five captions per image."""
    results = section("training")
    found = None if results is None else max_rate(results["facts"], "captioner, batch 256")
    return None if found is None else Rate(found, 256, GPU_RESULTS)


def experiments() -> list[Experiment]:
    """Return the papers' experiments."""
    vgg, bert, critic = classifier_rate(), grounding_rate(), critic_rate()
    search, words = search_rate(), next_word_rate()
    return [
        Experiment("LTPA: VGG-att2 on CIFAR, 300 epochs", 300 * CIFAR, vgg, 20e6),
        Experiment("LTPA: 36 rows of table 1, 300 epochs", 36 * 300 * CIFAR, vgg, 20e6),
        Experiment("SSA: surrogates of VQA v1, 248,349 questions x 500 masks", VQA1, search),
        Experiment("VGP: VL-BERT on Flickr30k Entities, 8 epochs", 8 * PHRASES, bert, 110e6),
        Experiment("VGP: VL-BERT on VQA v2, 20 epochs", 20 * VQA2, bert, 110e6),
        Experiment("A2: COCO, next words, 30 epochs", 30 * COCO, words, 58e6),
        Experiment("A2: COCO, self-critical with a gate, 30 epochs", 30 * COCO, critic, 58e6),
    ]


# --- memory


def memory_sizes() -> list[tuple[str, float, str]]:
    """Return the sizes of large arrays: name, bytes and derivation."""
    grid, regions = 14 * 14 * 2048, 36 * 2048
    return [
        ("CIFAR on the GPU, uint8", CIFAR * 3 * 32 * 32, "50,000 x 3 x 32 x 32"),
        ("VQA v2 features on disk, 14 x 14 cells", 123_287 * grid * FLOAT16,
         "123,287 images x 196 x 2,048, float16"),
        ("COCO features on disk, 36 regions", 123_287 * regions * FLOAT16,
         "123,287 images x 36 x 2,048, float16"),
        ("surrogates of VQA v2 on disk", VQA2 * 196 * FLOAT32, "443,757 x 196, float32"),
        ("one search at a time, 512 images on a GPU", 512 * (1 + 2) * 196 * 512 * FLOAT32,
         "512 x (cells and two maps of them) x 196 x 512, float32; not masks"),
        ("references of COCO, weighted", COCO * 5 * 40 * 16,
         "113,287 x 5 captions x about 40 n-grams x (key, weight)"),
        ("gradients of VL-BERT, one message", 110e6 * FLOAT32, "110 M, float32"),
    ]  # fmt: skip


# --- text


def format_hours(number: float | None) -> str:
    """Format a duration in a suitable unit."""
    if number is None:
        return "not measured"
    for unit, format_size in (("days", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if number >= 2 * format_size:
            return f"{number / format_size:.1f} {unit}"
    return f"{number * 3600:.0f} s"


def format_size(number: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit, header in (("GB", 1e9), ("MB", 1e6)):
        if number >= header:
            return f"{number / header:.1f} {unit}"
    return f"{number:.0f} B"


def markdown_table(heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """Format a Markdown table."""
    rows = [heads, ("---",) * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page_parts() -> dict[str, str]:
    """Return the tables of docs/scale.md by name."""
    found = experiments()
    rates, times = [], []
    for work in found:
        rate = work.rate
        rate_text = "not measured" if rate is None else f"{rate.samples:,.0f}"
        if rate is not None and rate.samples < 10:
            rate_text = f"{rate.samples:.2f}"
        source = (
            ""
            if rate is None
            else f"`{rate.source}`, {'one GPU' if rate.gpu else 'one CPU thread'}"
        )
        rates.append((work.name, f"{work.samples:,.0f}", rate_text, source))
        costs = work.cost(1), work.cost(64)
        money = (
            ""
            if None in costs
            else " / ".join(f"{cost:,.0f}" for cost in costs if cost is not None)
        )
        communication_share = (
            ""
            if rate is None or not work.parameters
            else f"{100 * work.communication_share(64):.0f} %"
        )
        times.append(
            (
                work.name,
                *(format_hours(work.hours(n)) for n in GPU_COUNTS),
                communication_share,
                money,
            )
        )
    results = [(name, format_size(number), how) for name, number, how in memory_sizes()]
    header = tuple(f"{n}" for n in GPU_COUNTS)
    return {
        "rates": markdown_table(("experiment", "samples", "per second", "from"), rates),
        "hours": markdown_table(
            ("experiment", *header, "all-reduce share at 64", "dollars, 1 / 64"), times
        ),
        "memory": markdown_table(("array", "size", "derivation"), results),
    }


if __name__ == "__main__":
    for name, text in page_parts().items():
        print(f"{name}\n\n{text}\n")
