"""Time, memory and cost of the papers' full experiments, worked out from rates that were measured.

    python benchmarks/scale.py

Nothing is measured here. Rates are read from committed results of one H200 or of one CPU thread;
what has not been measured has no number. Work is shared out evenly. Training adds, at the end of
each step, one sum of all gradients over all cards, with nothing else beside it, as in `fit`: a
ring moves `2 (n - 1) / n` times the gradients over the slowest link. Prices and links are
assumptions, stated here and on the page.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CARDS = (1, 8, 64)
PRICE = 3.0  # dollars an hour of a card
CORE = 0.04  # dollars an hour of a CPU core
NEAR, FAR = 300e9, 40e9  # bytes a second between cards of one machine, and of several
HALF, SINGLE = 2, 4  # bytes of a number

# What the papers train on.
CIFAR, COCO, VQA1, VQA2, PHRASES = 50_000, 113_287, 248_349, 443_757, 54_313


@dataclass(frozen=True)
class Rate:
    """Samples a second that were measured, the samples of a step, and where it is written."""

    samples: float
    batch: int
    source: str
    card: bool = True


@dataclass(frozen=True)
class Work:
    """One experiment: how many samples it sees in all, and how many parameters it learns."""

    name: str
    samples: float
    rate: Rate | None
    parameters: float = 0.0  # 0: nothing is summed over the cards

    def hours(self, cards: int) -> float | None:
        """How long it takes on so many cards, each with the batch that was measured."""
        if self.rate is None:
            return None
        steps = self.samples / self.rate.batch / cards
        return steps * (self.rate.batch / self.rate.samples + self.summing(cards)) / 3600

    def summing(self, cards: int) -> float:
        """Seconds a step in which gradients are summed."""
        link = NEAR if cards <= 8 else FAR
        return 2 * (cards - 1) / cards * SINGLE * self.parameters / link

    def lost(self, cards: int) -> float:
        """The share of a step that is spent on sums."""
        assert self.rate is not None
        return self.summing(cards) / (self.summing(cards) + self.rate.batch / self.rate.samples)

    def cost(self, cards: int) -> float | None:
        """Dollars."""
        hours = self.hours(cards)
        if hours is None or self.rate is None:
            return None
        return hours * cards * (PRICE if self.rate.card else CORE)


# --- what was measured


def read(name: str) -> Any:
    """A committed result, or None."""
    path = HERE / name
    return json.loads(path.read_text()) if path.exists() else None


CARD = "speed/h200.json"


def section(name: str) -> Any:
    """A section of what one card was measured at, or None."""
    kept = read(CARD)
    return None if kept is None else kept["sections"].get(name)


def quickest(facts: dict[str, Any], start: str, key: str = "samples_per_second") -> float | None:
    """The highest of the rates whose names begin so."""
    found = [one[key] for name, one in facts.items() if name.startswith(start)]
    return max(found) if found else None


def classifier() -> Rate:
    """VGG-att2 in the training loop, pictures of 32 x 32 pixels."""
    kept = section("training")
    found = None if kept is None else quickest(kept["facts"], "loop, att2-concat-pc")
    if found is not None:
        return Rate(found, 256, CARD)
    name = "ltpa-1-short/speed.json"
    steps = read(name)["rows"]["att2-concat-pc"]["seconds_a_step"]["att2-concat-pc"]
    return Rate(256 / statistics.median(steps), 256, name)


def grounded() -> Rate:
    """A network of BERT's size with supervised attention, 164 positions, the way that is best."""
    kept, start = section("supervision"), "VL-BERT 164 x 64"
    rows = [] if kept is None else [one for one in kept["rows"] if one["what"].startswith(start)]
    times = [one["ours_s"]["median"] for one in rows if one["ours"] == "direct" and one["ours_s"]]
    if times:
        return Rate(64 / min(times), 64, CARD)
    name = "capture/h200.json"
    row = read(name)["rows"][0]
    return Rate(1000 * row["b"] / (row["plain_ms"] * row["watched_time"]), row["b"], name)


def critic() -> Rate:
    """A self-critical step of the captioner of the paper with a gate, five captions a picture."""
    kept = section("captions")
    start = "self-critical step, as in the paper, gate"
    found = None if kept is None else quickest(kept["facts"], start, "images_per_second")
    if found is not None:
        return Rate(found, 64, CARD)
    name = "a2/speed.json"
    step = read(name)["seconds"]["6 layers, width 512, gate, 64 x 5"]["step"]
    return Rate(64 / step, 64, name)


def searched() -> Rate | None:
    """Images a second, 500 masks each: on a card where that was measured, else on a CPU thread."""
    kept = section("surrogates")
    start = "images a second"
    rows = [] if kept is None else [one for one in kept["rows"] if one["what"].startswith(start)]
    rates = [one["value"]["median"] for one in rows if one["value"] is not None]
    if rates:
        return Rate(max(rates), 512, CARD)
    kept = read("speed/cpu.json")
    if kept is None or "surrogates" not in kept["sections"]:
        return None
    start = "500 masks of 3 x 3, each once"
    for row in kept["sections"]["surrogates"]["rows"]:
        if row["what"].startswith(start):
            return Rate(2 / row["ours_s"]["median"], 2, "speed/cpu.json", card=False)
    return None


def next_words() -> Rate | None:
    """The captioner of the paper, its next words given the ones before; five captions a picture."""
    kept = section("training")
    found = None if kept is None else quickest(kept["facts"], "captioner, batch 256")
    return None if found is None else Rate(found, 256, CARD)


def works() -> list[Work]:
    """The papers' experiments."""
    small, bert, drawn = classifier(), grounded(), critic()
    search, words = searched(), next_words()
    return [
        Work("LTPA: VGG-att2 on CIFAR, 300 epochs", 300 * CIFAR, small, 20e6),
        Work("LTPA: 36 rows of table 1, 300 epochs", 36 * 300 * CIFAR, small, 20e6),
        Work("SSA: surrogates of VQA v1, 248,349 questions x 500 masks", VQA1, search),
        Work("VGP: VL-BERT on Flickr30k Entities, 8 epochs", 8 * PHRASES, bert, 110e6),
        Work("VGP: VL-BERT on VQA v2, 20 epochs", 20 * VQA2, bert, 110e6),
        Work("A2: COCO, next words, 30 epochs", 30 * COCO, words, 58e6),
        Work("A2: COCO, self-critical with a gate, 30 epochs", 30 * COCO, drawn, 58e6),
    ]


# --- memory


def memory() -> list[tuple[str, float, str]]:
    """What lies where: a name, bytes, and how it is worked out."""
    grid, regions = 14 * 14 * 2048, 36 * 2048
    return [
        ("CIFAR on the card, bytes a pixel", CIFAR * 3 * 32 * 32, "50,000 x 3 x 32 x 32"),
        ("VQA v2 features on disk, 14 x 14 cells", 123_287 * grid * HALF,
         "123,287 pictures x 196 x 2,048, float16"),
        ("COCO features on disk, 36 regions", 123_287 * regions * HALF,
         "123,287 pictures x 36 x 2,048, float16"),
        ("surrogates of VQA v2 on disk", VQA2 * 196 * SINGLE, "443,757 x 196, float32"),
        ("one search at a time, 512 images on a card", 512 * (1 + 2) * 196 * 512 * SINGLE,
         "512 x (cells and two maps of them) x 196 x 512, float32; not masks"),
        ("references of COCO, weighted", COCO * 5 * 40 * 16,
         "113,287 x 5 captions x about 40 n-grams x (key, weight)"),
        ("gradients of VL-BERT, one message", 110e6 * SINGLE, "110 M, float32"),
    ]  # fmt: skip


# --- as text


def hours(number: float | None) -> str:
    """A time in the unit that suits it."""
    if number is None:
        return "not measured"
    for unit, size in (("days", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if number >= 2 * size:
            return f"{number / size:.1f} {unit}"
    return f"{number * 3600:.0f} s"


def size(number: float) -> str:
    """Bytes in the unit that suits it."""
    for unit, many in (("GB", 1e9), ("MB", 1e6)):
        if number >= many:
            return f"{number / many:.1f} {unit}"
    return f"{number:.0f} B"


def laid(heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A table of a page."""
    rows = [heads, ("---",) * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def parts() -> dict[str, str]:
    """The tables of docs/scale.md by name."""
    found = works()
    rates, times = [], []
    for work in found:
        rate = work.rate
        told = "not measured" if rate is None else f"{rate.samples:,.0f}"
        if rate is not None and rate.samples < 10:
            told = f"{rate.samples:.2f}"
        where = (
            ""
            if rate is None
            else f"`{rate.source}`, {'one card' if rate.card else 'one CPU thread'}"
        )
        rates.append((work.name, f"{work.samples:,.0f}", told, where))
        costs = work.cost(1), work.cost(64)
        money = (
            ""
            if None in costs
            else " / ".join(f"{cost:,.0f}" for cost in costs if cost is not None)
        )
        lost = "" if rate is None or not work.parameters else f"{100 * work.lost(64):.0f} %"
        times.append((work.name, *(hours(work.hours(n)) for n in CARDS), lost, money))
    kept = [(name, size(number), how) for name, number, how in memory()]
    many = tuple(f"{n}" for n in CARDS)
    return {
        "rates": laid(("experiment", "samples in all", "a second", "from"), rates),
        "hours": laid(("experiment", *many, "lost to sums at 64", "dollars, 1 / 64"), times),
        "memory": laid(("what", "size", "as"), kept),
    }


if __name__ == "__main__":
    for name, text in parts().items():
        print(f"{name}\n\n{text}\n")
