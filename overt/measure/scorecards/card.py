"""A scorecard: one number a sample of every map by every measure, and how far they can be trusted.

It prints itself, shows itself in a notebook, is a dictionary, a table and a folder of files.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from overt import files
from overt.errors import BadInput, Damaged
from overt.measure import statistics
from overt.measure.scorecards.sight import CONTROLS
from overt.measure.statistics import Interval

FORMAT = "overt scorecard 1"
MODEL = "model"  # the row of what is asked of the model and not of a map
JSON, CSV, SAMPLES, CLOCK = "scorecard.json", "scorecard.csv", "samples.npz", "clock.json"
KEY_COUNT = "key_count"  # the array of how many keys each sample has
SHAPE = "shape"  # the question of measures whose numbers depend on how many keys there are
_ARROWS = {"higher": "↑", "lower": "↓", "neither": " "}

Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """`first - second` by one measure, on the same samples.

    `p` is that of a permutation of signs, a cluster at a time; `holm` and `fdr` are corrected for
    all measures of the comparison (Holm; Benjamini and Hochberg). `effect` is the mean in
    deviations of the differences, `superiority` the share of samples on which the first is higher.
    """

    key: str
    first: str
    second: str
    n: int
    mean: float
    low: float
    high: float
    p: float
    holm: float
    fdr: float
    effect: float
    superiority: float
    direction: str

    @property
    def verdict(self) -> str:
        """ "better", "worse" or "": whether the first is, at 5 % after Holm's correction."""
        if self.direction == "neither" or not self.holm < 0.05 or self.mean == 0:
            return ""
        return "better" if (self.mean > 0) == (self.direction == "higher") else "worse"


@dataclass(frozen=True, eq=False)
class Scorecard:
    """What came out of `scorecard`.

    `maps` are the rows, the one that is judged first; `measures` say what each number means, as
    plain values; `numbers[map, key]` are one a sample, NaN where it is not defined. `clusters` name
    what samples share, such as their image. `skipped` says of a measure why it was not asked.
    `seconds` are what each measure took, with all that it was the first to need. `key_counts` are
    how many keys the maps of each sample have, None where nobody has written that down.
    """

    name: str
    data: Mapping[str, Any]
    seed: int
    maps: tuple[str, ...]
    measures: tuple[Mapping[str, Any], ...]
    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    numbers: Mapping[tuple[str, str], Numbers]
    skipped: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    key_counts: Numbers | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def subject(self) -> str:
        """The map that is judged; the others stand beside it."""
        return self.maps[0] if self.maps else MODEL

    @property
    def keys(self) -> tuple[str, ...]:
        """The measures that gave a number."""
        return tuple(str(one["key"]) for one in self.measures)

    def about(self, key: str) -> Mapping[str, Any]:
        """What a measure means; an unknown key is answered with those there are."""
        for one in self.measures:
            if one["key"] == key:
                return one
        why = f": {self.skipped[key]}" if key in self.skipped else ""
        raise ValueError(f"{key!r} was not measured{why}; there are {', '.join(self.keys)}")

    def values(self, key: str, map: str | None = None) -> Numbers:
        """One number a sample; of a measure of the model there is one row, whatever the map."""
        self.about(key)
        if (MODEL, key) in self.numbers:
            return self.numbers[MODEL, key]
        found = self.numbers.get((map or self.subject, key))
        if found is None:
            raise ValueError(f"there is no map {map!r}; there are {', '.join(self.maps)}")
        return found

    def _gives(self, key: str, map: str | None) -> bool:
        """Whether there is a number of this map by this measure; some maps have none, as even ones.

        An unknown map is answered with those there are.
        """
        if map is not None and map not in self.maps:
            raise ValueError(f"there is no map {map!r}; there are {', '.join(self.maps)}")
        return any((name, key) in self.numbers for name in (MODEL, map or self.subject))

    # --- statistics

    @cached_property
    def intervals(self) -> Mapping[tuple[str, str], Interval]:
        """By map and measure the mean, its 95 % interval and n; whole clusters are drawn anew.

        One infinite number makes the mean infinite, as it can that of `kl`.
        """
        pairs = list(self.numbers)
        if not pairs:
            return {}
        table = torch.from_numpy(np.stack([self.numbers[pair] for pair in pairs]))
        endless = table.isinf()
        known = table.masked_fill(endless, torch.nan)
        found = statistics.bootstraps(known, self.seed, clusters=self.clusters)
        counts = (~table.isnan()).sum(dim=1).tolist()
        return {
            pair: Interval(math.inf, math.inf, math.inf, count) if beyond else one
            for pair, one, beyond, count in zip(
                pairs, found, endless.any(dim=1).tolist(), counts, strict=True
            )
        }

    def against(self, control: str) -> tuple[Difference, ...]:
        """The judged map less another one of this card, by each measure of maps."""
        if control not in self.maps:
            raise ValueError(f"there is no map {control!r}; there are {', '.join(self.maps)}")
        keys = [key for key in self.keys if (self.subject, key) in self.numbers]
        keys = [key for key in keys if (control, key) in self.numbers]
        rows = [self.numbers[self.subject, k] - self.numbers[control, k] for k in keys]
        return self._differences(keys, rows, self.subject, control)

    def compare(self, other: "Scorecard", map: str | None = None) -> tuple[Difference, ...]:
        """This card's judged map less that of another model, on the same samples, by their ids.

        What hangs on the number of keys is left out where the two have not as many: `not_compared`.
        """
        order = _order(self, other)
        left_out = self._on_other_scales(other)
        keys = [key for key in self.keys if self._gives(key, map) and other._gives(key, map)]
        keys = [key for key in keys if key not in left_out]
        rows = [self.values(key, map) - other.values(key, map)[order] for key in keys]
        return self._differences(keys, rows, self.name, other.name)

    def not_compared(self, other: "Scorecard") -> str:
        """Which measures `compare` leaves out and why, in a sentence; empty where it is none."""
        left_out, found = self._on_other_scales(other), self._other_keys(other)
        if not left_out or found is None:
            return ""
        at, ours, theirs = found
        return (
            f"not compared: {', '.join(left_out)} (they depend on the number of keys, and of "
            f"{self.ids[at]!r} {self.name} has {ours} and {other.name} {theirs})"
        )

    def _on_other_scales(self, other: "Scorecard") -> tuple[str, ...]:
        """The measures of shape that both have, where their maps have not as many keys."""
        if self._other_keys(other) is None:
            return ()
        both = (key for key in self.keys if key in other.keys)
        return tuple(key for key in both if self.about(key)["question"] == SHAPE)

    def _other_keys(self, other: "Scorecard") -> tuple[int, int, int] | None:
        """The first sample that has not as many keys on both cards, and how many; None of none."""
        if self.key_counts is None or other.key_counts is None:
            return None
        ours, theirs = self.key_counts, other.key_counts[_order(self, other)]
        differ = np.flatnonzero(np.abs(ours - theirs) > 0)  # one that is not known is no difference
        if not len(differ):
            return None
        at = int(differ[0])
        return at, int(ours[at]), int(theirs[at])

    def _differences(
        self, keys: Sequence[str], rows: Sequence[Numbers], first: str, second: str
    ) -> tuple[Difference, ...]:
        if not keys:
            return ()
        table = torch.from_numpy(np.stack(rows)).double()
        table = torch.where(table.isfinite(), table, torch.nan)  # infinity has no mean
        around = statistics.bootstraps(table, self.seed, clusters=self.clusters)
        chances = statistics.permutation_tests(table, self.seed, clusters=self.clusters)
        corrected = statistics.holm(chances), statistics.benjamini_hochberg(chances)
        return tuple(
            Difference(
                key,
                first,
                second,
                one.count,
                one.mean,
                one.low,
                one.high,
                p,
                holm,
                fdr,
                statistics.effect_size(row),
                statistics.superiority(row),
                str(self.about(key)["direction"]),
            )
            for key, row, one, p, holm, fdr in zip(
                keys, table, around, chances, *corrected, strict=True
            )
        )

    # --- as values, as text, as a page of a notebook

    def to_dict(self) -> dict[str, Any]:
        """The card as plain JSON values, without the numbers of samples and without clock times."""
        comparisons = {
            control: {one.key: _plain(asdict(one)) for one in self.against(control)}
            for control in self.maps[1:]
        }
        return {
            "format": FORMAT,
            "name": self.name,
            "data": dict(self.data),
            "seed": self.seed,
            "n": len(self),
            "clusters": len(set(self.clusters)),
            "maps": list(self.maps),
            "measures": [
                {
                    **one,
                    "values": {
                        name: _plain(asdict(self.intervals[name, one["key"]]))
                        for name in (*self.maps, MODEL)
                        if (name, one["key"]) in self.intervals
                    },
                }
                for one in self.measures
            ],
            "against": comparisons,
            "skipped": dict(self.skipped),
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and lines: a measure a line, a map a column, means with half their interval."""
        header = ["measure", "", "n", *self.maps]
        lines = []
        for one in self.measures:
            key = str(one["key"])
            arrow = _ARROWS[str(one["direction"])].strip()
            if (MODEL, key) in self.intervals:
                found = self.intervals[MODEL, key]
                rest = [""] * (len(self.maps) - 1) if self.maps else []
                lines.append([key, arrow, str(found.count), written(found), *rest])
                continue
            there = [self.intervals.get((name, key)) for name in self.maps]
            count = str(there[0].count) if there[0] is not None else ""
            lines.append([key, arrow, count, *("" if x is None else written(x) for x in there)])
        return header, lines

    def to_csv(self) -> str:
        """A line for each map and measure: mean, interval, n, unit, direction, difference, p."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            "measure map mean low high n unit direction question "
            "difference difference_low difference_high p holm fdr effect superiority".split()
        )
        beside = {
            (one.second, one.key): one for name in self.maps[1:] for one in self.against(name)
        }
        for one in self.measures:
            for name in (*self.maps, MODEL):
                found = self.intervals.get((name, one["key"]))
                if found is None:
                    continue
                cells: list[Any] = [one["key"], name, found.mean, found.low, found.high]
                cells += [found.count, one["unit"], one["direction"], one["question"]]
                gap = beside.get((name, one["key"]))
                if gap is not None:
                    cells += [gap.mean, gap.low, gap.high, gap.p, gap.holm, gap.fdr, gap.effect]
                    cells.append(gap.superiority)
                writer.writerow([_cell(value) for value in cells])
        return text.getvalue()

    def __str__(self) -> str:
        header, lines = self.table()
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        rows = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (header, *lines)
        ]
        return "\n".join([self.title, *rows, *self.notes()])

    @property
    def title(self) -> str:
        """What was measured on what, in a line."""
        data, n = self.data, len(self)
        return f"{self.name} on {data['name']} {data['split']}, {n} samples, seed {self.seed}"

    def notes(self) -> Iterator[str]:
        """What a reader should know: what the judged map beats, and what was not asked."""
        beaten = []
        for control in (name for name in self.maps[1:] if name in CONTROLS):
            gaps = [one for one in self.against(control) if one.direction != "neither"]
            good = sum(one.verdict == "better" for one in gaps)
            if gaps:
                beaten.append(f"{control} on {good} of {len(gaps)}")
        if beaten:
            yield f"{self.subject} beats {', '.join(beaten)} measures."
        reasons: dict[str, list[str]] = {}
        for key, why in self.skipped.items():
            reasons.setdefault(why.partition(". ")[0], []).append(key)
        for why, keys in reasons.items():
            yield f"not asked: {', '.join(keys)} ({why})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the table, and in each cell its interval."""
        header, _ = self.table()
        heads = "".join(f"<th>{escape(word)}</th>" for word in header)
        rows = []
        for one in self.measures:
            key = str(one["key"])
            names = self.maps if (self.subject, key) in self.intervals else (MODEL,)
            cells = []
            for name in names:
                found = self.intervals.get((name, key))
                if found is None:
                    cells.append("<td></td>")
                    continue
                around = f"{found.low:.4g} to {found.high:.4g}, n = {found.count}"
                cells.append(f'<td title="{escape(around)}">{escape(written(found))}</td>')
            meaning = escape(f"{one['unit']}. Cannot say: {one['cannot_say']}")
            count = self.intervals[names[0], key].count
            rows.append(
                f'<tr><th style="text-align:left" title="{meaning}">{escape(key)}</th>'
                f"<td>{_ARROWS[str(one['direction'])].strip()}</td><td>{count}</td>"
                f"{''.join(cells)}</tr>"
            )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes())
        return (
            f"<p><b>{escape(self.title)}</b></p><table><thead><tr>{heads}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table><ul>{notes}</ul>"
        )

    # --- on disk

    def save(self, folder: Path | str) -> None:
        """Write scorecard.json, scorecard.csv, samples.npz and clock.json.

        The same numbers give the same bytes, but for clock.json, which says what took how long.
        """
        folder = Path(folder)
        arrays: dict[str, NDArray[Any]] = {
            "id": np.array(self.ids, dtype=np.str_),
            "cluster": np.array(self.clusters, dtype=np.str_),
        }
        if self.key_counts is not None:
            arrays[KEY_COUNT] = self.key_counts
        for (name, key), values in self.numbers.items():
            arrays[f"{name}|{key}"] = values
        files.write_arrays(folder / SAMPLES, arrays)
        files.write_text(folder / CSV, self.to_csv())
        files.write_json(folder / JSON, self.to_dict())
        files.write_json(folder / CLOCK, {key: round(s, 3) for key, s in self.seconds.items()})

    @classmethod
    def load(cls, folder: Path | str) -> "Scorecard":
        """Read what `save` has written; what is not that is `Damaged`."""
        folder = Path(folder)
        if not (folder / JSON).is_file():
            raise BadInput(f"{folder} holds no scorecard: it has no {JSON}.")
        said = files.read_json(folder / JSON)
        arrays = files.read_arrays(folder / SAMPLES)
        try:
            if said["format"] != FORMAT:
                raise ValueError(f"its format is {said['format']!r}")
            ids = tuple(str(name) for name in arrays.pop("id"))
            clusters = tuple(str(name) for name in arrays.pop("cluster"))
            counts = arrays.pop(KEY_COUNT, None)
            if counts is not None and counts.shape != (len(ids),):
                raise ValueError(f"{KEY_COUNT!r} is not a number for each of {len(ids)} samples")
            numbers = {}
            for name, values in arrays.items():
                which, bar, key = name.partition("|")
                if not bar or values.shape != (len(ids),):
                    raise ValueError(f"{name!r} is not a number for each of {len(ids)} samples")
                numbers[which, key] = values
            clock = files.read_json(folder / CLOCK) if (folder / CLOCK).is_file() else {}
            measures = tuple(
                {name: value for name, value in one.items() if name != "values"}
                for one in said["measures"]
            )
            return cls(
                said["name"], said["data"], said["seed"], tuple(said["maps"]), measures,
                ids, clusters, numbers, said["skipped"], clock, counts,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as problem:
            raise Damaged(f"{folder / JSON} is not a scorecard: {problem}.") from problem


def over_runs(
    cards: Sequence[Scorecard], others: Sequence[Scorecard] = (), map: str | None = None
) -> dict[str, Interval]:
    """By measure the mean over runs that differ by their seed, and over samples: two levels.

    With `others` the difference to those, without what hangs on the number of keys where they have
    not as many. Runs and clusters of samples are both drawn anew, so the interval speaks of the
    method and not of the runs at hand. All cards are of the same samples.
    """
    if not cards:
        raise ValueError("there is no scorecard to take a mean of")
    first = cards[0]
    everyone = (*cards, *others)
    unlike = {key for one in others for key in first._on_other_scales(one)}
    keys = [key for key in first.keys if all(one._gives(key, map) for one in everyone)]
    keys = [key for key in keys if key not in unlike]
    found = {}
    for key in keys:
        ours = _stacked(first, cards, key, map)
        if others:
            theirs = _stacked(first, others, key, map)
            found[key] = statistics.two_level_difference(
                ours, theirs, first.seed, clusters=first.clusters
            )
        else:
            found[key] = statistics.two_level(ours, first.seed, clusters=first.clusters)
    return found


def _stacked(
    first: Scorecard, cards: Sequence[Scorecard], key: str, map: str | None
) -> Float[Tensor, "s b"]:
    rows = [one.values(key, map)[_order(first, one)] for one in cards]
    return torch.from_numpy(np.stack(rows))


def _order(first: Scorecard, second: Scorecard) -> NDArray[np.int64]:
    """Where the samples of the first card stand in the second."""
    place = {name: at for at, name in enumerate(second.ids)}
    missing = [name for name in first.ids if name not in place]
    if missing or len(first) != len(second):
        example = missing[0] if missing else next(n for n in second.ids if n not in set(first.ids))
        raise BadInput(
            f"{first.name} and {second.name} were not measured on the same samples, such as "
            f"{example!r}; measure both on the same data with the same --limit."
        )
    return np.array([place[name] for name in first.ids], dtype=np.int64)


def written(one: Interval) -> str:
    """A mean with its interval, as short as it can be said; one sample has no interval.

    >>> written(Interval(0.51234, 0.4, 0.62, 20))
    '0.512 [0.400, 0.620]'
    """
    if not one.count or math.isnan(one.mean):
        return "–"
    digits = 3 if max(abs(one.low), abs(one.high), abs(one.mean)) < 100 else 1
    if one.count == 1:
        return f"{one.mean:.{digits}f}"
    return f"{one.mean:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values for JSON, None for what is no number."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9g}" if math.isfinite(value) else ""
    return value
