"""Result of a scorecard: scores per sample of every map and metric, with intervals and tests.

It can be printed, displayed in a notebook, converted to a dictionary or a table, and saved.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from overt import io as overt_io
from overt.errors import CorruptFileError, UserError, require_package
from overt.metrics import statistics
from overt.metrics.scorecard.differences import Difference, differences, intervals, paired_gaps
from overt.metrics.scorecard.metric_context import CONTROLS
from overt.metrics.scorecard.trust import Trust, find_trust
from overt.metrics.statistics import Interval

FORMAT = "overt scorecard 1"
MODEL = "model"  # the row of metrics of the model
JSON, CSV, SAMPLES, CLOCK = "scorecard.json", "scorecard.csv", "samples.npz", "clock.json"
KEY_COUNT = "key_count"  # the array of the number of keys per sample
SHAPE = "shape"  # the question of metrics that depend on the number of keys
LOCATION = "location"  # the question of metrics that count cells inside the target
_ARROWS = {"higher": "↑", "lower": "↓", "neither": " "}

_COLUMNS = (
    "measure map mean low high n unit direction question "
    "difference difference_low difference_high p holm fdr effect superiority"
).split()

Numbers = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Scorecard:
    """The result of `scorecard`.

    Args:
        name: Name of the model.
        data: Name, split, digest and number of items of the dataset.
        seed: Seed of all random numbers.
        maps: Names of the maps; the evaluated one first.
        measures: What each metric means, as JSON values.
        ids: Ids of the samples.
        clusters: The cluster of each sample, such as its image.
        numbers: Scores per sample by (map, key), NaN where undefined.
        skipped: Reasons of metrics that were not computed, by key.
        seconds: Seconds by metric, with everything that it was the first to need.
        key_counts: Number of keys of each sample's maps; None if unknown.
        judged: Description of the evaluated map: which level, over which keys, averaged over what.

    Example:
        >>> numbers = {("model", "entropy"): torch.tensor([0.5, 1.5]).numpy()}
        >>> ids, metrics = ("a", "b"), ({"key": "entropy"},)
        >>> card = Scorecard("net", {}, 0, ("model",), metrics, ids, ids, numbers)
        >>> len(card), card.subject, card.keys
        (2, 'model', ('entropy',))
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
    judged: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def subject(self) -> str:
        """Name of the evaluated map."""
        return self.maps[0] if self.maps else MODEL

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the metrics with a score."""
        return tuple(str(one["key"]) for one in self.measures)

    def about(self, key: str) -> Mapping[str, Any]:
        """Return what a metric means, as JSON values.

        Raises:
            ValueError: The metric was not computed; the message has the reason and the available
                keys.
        """
        for one in self.measures:
            if one["key"] == key:
                return one
        why = f": {self.skipped[key]}" if key in self.skipped else ""
        raise ValueError(f"no scores of {key!r}{why}: use one of {', '.join(self.keys)}")

    def values(self, key: str, map: str | None = None) -> Numbers:
        """Return the scores per sample; a metric of the model has one row for all maps."""
        self.about(key)
        if (MODEL, key) in self.numbers:
            return self.numbers[MODEL, key]
        found = self.numbers.get((map or self.subject, key))
        if found is None:
            raise ValueError(f"unknown map {map!r}: use one of {', '.join(self.maps)}")
        return found

    def _gives(self, key: str, map: str | None) -> bool:
        """Return whether this map has scores by this metric; some have none, as constant maps."""
        if map is not None and map not in self.maps:
            raise ValueError(f"unknown map {map!r}: use one of {', '.join(self.maps)}")
        return any((name, key) in self.numbers for name in (MODEL, map or self.subject))

    # --- statistics

    @cached_property
    def intervals(self) -> Mapping[tuple[str, str], Interval]:
        """Mean, 95 % interval over clusters and n by (map, key); Wilson's interval for shares.

        One infinite score makes the mean infinite, as for `kl`.
        """
        pairs = list(self.numbers)
        if not pairs:
            return {}
        table = torch.from_numpy(np.stack([self.numbers[pair] for pair in pairs]))
        shares = [
            self.about(key)["low"] == 0 and bool(((row == 0) | (row == 1) | row.isnan()).all())
            for (_, key), row in zip(pairs, table, strict=True)
        ]
        return dict(zip(pairs, intervals(table, self.clusters, shares), strict=True))

    def version(self, key: str) -> int:
        """Return the version of a metric's definition; 1 for scorecards without versions."""
        return int(self.about(key).get("version", 1))

    def trust(self, key: str) -> Trust | None:
        """Return how often a metric ranked the truthful map of a planted model first, if known."""
        return find_trust(key, self.version(key))

    def against(self, control: str) -> tuple[Difference, ...]:
        """Compare the evaluated map with another map of this scorecard, by each metric of maps.

        Args:
            control: Name of the other map.

        Returns:
            One paired difference per metric, cached.
        """
        if control not in self.maps:
            raise ValueError(f"unknown map {control!r}: use one of {', '.join(self.maps)}")
        if control not in self._against:
            keys = [key for key in self.keys if (self.subject, key) in self.numbers]
            keys = [key for key in keys if (control, key) in self.numbers]
            pairs = [(self.numbers[self.subject, k], self.numbers[control, k]) for k in keys]
            found = self._differences(keys, pairs, self.subject, control)
            self._against[control] = found
        return self._against[control]

    @cached_property
    def _against(self) -> dict[str, tuple[Difference, ...]]:
        return {}

    def compare(self, other: "Scorecard", map: str | None = None) -> tuple[Difference, ...]:
        """Compare the evaluated map with that of another model, on the same samples by id.

        Metrics that depend on the number of keys are left out where the two differ in it, and so
        are metrics with different versions of their definition: `not_compared` lists them.

        Args:
            other: The scorecard of the other model.
            map: Name of the map to compare; by default the evaluated ones.

        Returns:
            One paired difference per metric.

        Raises:
            UserError: The samples differ.
        """
        for known, of_map, found in self._compared:
            if known is other and of_map == map:
                return found
        order = _match_order(self, other)
        left_out = (*self._on_other_scales(other), *self._of_other_versions(other))
        keys = [key for key in self.keys if self._gives(key, map) and other._gives(key, map)]
        keys = [key for key in keys if key not in left_out]
        pairs = [(self.values(key, map), other.values(key, map)[order]) for key in keys]
        made = self._differences(keys, pairs, self.name, other.name)
        self._compared.append((other, map, made))
        return made

    @cached_property
    def _compared(self) -> list[tuple["Scorecard", str | None, tuple[Difference, ...]]]:
        return []

    def not_compared(self, other: "Scorecard") -> str:
        """List the metrics that `compare` leaves out, with the reason; empty if there are none."""
        excluded, found = self._on_other_scales(other), self._other_keys(other)
        said = []
        if excluded and found is not None:
            at, ours, theirs = found
            said.append(
                f"{', '.join(excluded)} (they depend on the number of keys, which for "
                f"{self.ids[at]!r} is {ours} in {self.name} and {theirs} in {other.name})"
            )
        said += [
            f"{key} (definition {self.version(key)} in {self.name} and "
            f"{other.version(key)} in {other.name}: evaluate both again)"
            for key in self._of_other_versions(other)
        ]
        return f"not compared: {', '.join(said)}" if said else ""

    def _of_other_versions(self, other: "Scorecard") -> tuple[str, ...]:
        """List the metrics that both have, with different versions of their definition."""
        both = (key for key in self.keys if key in other.keys)
        return tuple(key for key in both if self.version(key) != other.version(key))

    def _on_other_scales(self, other: "Scorecard") -> tuple[str, ...]:
        """List the metrics of shape that both have, if their maps differ in the number of keys."""
        if self._other_keys(other) is None:
            return ()
        both = (key for key in self.keys if key in other.keys)
        return tuple(key for key in both if self.about(key)["question"] == SHAPE)

    def _other_keys(self, other: "Scorecard") -> tuple[int, int, int] | None:
        """Return the first sample with different numbers of keys, and both numbers."""
        if self.key_counts is None or other.key_counts is None:
            return None
        ours, theirs = self.key_counts, other.key_counts[_match_order(self, other)]
        differ = np.flatnonzero(np.abs(ours - theirs) > 0)  # unknown (NaN) is not a difference
        if not len(differ):
            return None
        at = int(differ[0])
        return at, int(ours[at]), int(theirs[at])

    def _differences(
        self,
        keys: Sequence[str],
        pairs: Sequence[tuple[Numbers, Numbers]],
        first: str,
        second: str,
    ) -> tuple[Difference, ...]:
        rows = [paired_gaps(ours, theirs) for ours, theirs in pairs]
        directions = [str(self.about(key)["direction"]) for key in keys]
        return differences(keys, rows, (first, second), directions, self.seed, self.clusters)

    # --- as values, as text, as a page of a notebook

    def to_dict(self) -> dict[str, Any]:
        """Return the scorecard as JSON values, without scores per sample and timings."""
        comparisons = {
            control: {one.key: to_json_values(asdict(one)) for one in self.against(control)}
            for control in self.maps[1:]
        }
        return {
            "format": FORMAT,
            "name": self.name,
            "data": dict(self.data),
            "seed": self.seed,
            "n": len(self),
            "clusters": len(set(self.clusters)),
            "judged": self.judged,
            "maps": list(self.maps),
            "measures": [
                {
                    **one,
                    "values": {
                        name: to_json_values(asdict(self.intervals[name, one["key"]]))
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
        """Return header and lines: a metric per line, a map per column, means with intervals."""
        header = ["measure", "", "n", *self.maps]
        lines = []
        for one in self.measures:
            key = str(one["key"])
            arrow = _ARROWS[str(one["direction"])].strip()
            if (MODEL, key) in self.intervals:
                found = self.intervals[MODEL, key]
                rest = [""] * (len(self.maps) - 1) if self.maps else []
                lines.append([key, arrow, str(found.count), format_interval(found), *rest])
                continue
            there = [self.intervals.get((name, key)) for name in self.maps]
            count = format_counts(one for one in there if one is not None)
            lines.append([key, arrow, count, *(_format_cell(x, count) for x in there)])
        return header, lines

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dictionary per map and metric: mean, interval, n, unit, difference, p.

        A map that is compared with the evaluated one has the entries of the difference, the others
        have not. `pandas.DataFrame(records)` and `polars.DataFrame(records)` make tables of them.
        """
        beside = {
            (one.second, one.key): one for name in self.maps[1:] for one in self.against(name)
        }
        records = []
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
                records.append(dict(zip(_COLUMNS, cells, strict=False)))
        return records

    def to_sample_records(self) -> list[dict[str, Any]]:
        """Return one dictionary per sample, map and metric: id, cluster, measure, map, value."""
        return [
            {"id": one, "cluster": cluster, "measure": key, "map": name, "value": float(value)}
            for (name, key), values in self.numbers.items()
            for one, cluster, value in zip(self.ids, self.clusters, values, strict=True)
        ]

    def to_pandas(self) -> Any:
        """Return `to_records` as a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed.
        """
        require_package("pandas")
        import pandas

        return pandas.DataFrame(self.to_records(), columns=_COLUMNS)

    def to_csv(self) -> str:
        """Return CSV with one line per record of `to_records`."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for record in self.to_records():
            writer.writerow([_cell(value) for value in record.values()])
        return text.getvalue()

    def __repr__(self) -> str:
        maps = f"{', '.join(self.maps)}" if self.maps else "no map"
        return f"Scorecard({self.title}: {len(self.keys)} metrics of {maps})"

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
        """Model, dataset, number of samples and seed in one line."""
        data, n = self.data, len(self)
        items = data.get("items", n)
        count = f"{n} samples" + (f" of {items} items" if items != n else "")
        return f"{self.name} on {data['name']} {data['split']}, {count}, seed {self.seed}"

    def notes(self) -> Iterator[str]:
        """List notes for the reader, such as controls that the map beats and skipped metrics."""
        if self.judged:
            yield f"evaluated: {self.judged}."
        yield from self._counting()
        beaten = []
        for control in (name for name in self.maps[1:] if name in CONTROLS):
            gaps = [one for one in self.against(control) if one.direction != "neither"]
            good = sum(one.verdict == "better" for one in gaps)
            if gaps:
                beaten.append(f"{control} on {good} of {len(gaps)}")
        if beaten:
            yield f"{self.subject} beats {', '.join(beaten)} metrics."
        known = [(key, self.trust(key)) for key in self.keys]
        counted = [f"{key} {one.share:.0%}" for key, one in known if one is not None]
        if counted:
            yield f"ranks the truthful map of planted models first: {', '.join(counted)}."
        reasons: dict[str, list[str]] = {}
        for key, why in self.skipped.items():
            reasons.setdefault(why.partition(". ")[0], []).append(key)
        for why, keys in reasons.items():
            yield f"not computed: {', '.join(keys)} ({why})"

    def _counting(self) -> Iterator[str]:
        """State by which definition cells count as inside the target."""
        for version in sorted({self.version(key) for key in self.keys if self._is_location(key)}):
            keys = [k for k in self.keys if self._is_location(k) and self.version(k) == version]
            how = "count every cell that the ground truth touches as inside"
            if version > 1:
                how = "weight each cell by the share of it that the ground truth covers"
            yield f"{', '.join(keys)} {how} (definition {version})."

    def _is_location(self, key: str) -> bool:
        return bool(self.about(key)["question"] == LOCATION)

    def _repr_html_(self) -> str:
        """Return the table as HTML for a notebook, with intervals and explanations as tooltips."""
        # the catalog imports every metric, which printing a stored scorecard does not need
        from overt.metrics.scorecard.catalog import describe

        header, _ = self.table()
        heads = "".join(f"<th>{escape(word)}</th>" for word in header)
        rows = []
        for one in self.measures:
            key = str(one["key"])
            names = self.maps if (self.subject, key) in self.intervals else (MODEL,)
            known = [self.intervals[name, key] for name in names if (name, key) in self.intervals]
            count = format_counts(known)
            cells = []
            for name in names:
                found = self.intervals.get((name, key))
                if found is None:
                    cells.append("<td></td>")
                    continue
                ends = f"{found.low:.4g} to {found.high:.4g}"
                around = f"{'no interval' if math.isnan(found.low) else ends}, n = {found.count}"
                cells.append(
                    f'<td title="{escape(around)}">{escape(_format_cell(found, count))}</td>'
                )
            said = describe(key) or str(one["unit"])
            meaning = escape(f"{said}. Cannot show: {one['cannot_say']}")
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

        The same scores give the same bytes, except for clock.json, which has timings.
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
        overt_io.write_arrays(folder / SAMPLES, arrays)
        overt_io.write_text(folder / CSV, self.to_csv())
        overt_io.write_json(folder / JSON, self.to_dict())
        overt_io.write_json(folder / CLOCK, {key: round(s, 3) for key, s in self.seconds.items()})

    @classmethod
    def load(cls, folder: Path | str) -> "Scorecard":
        """Read a scorecard that `save` has written.

        Raises:
            UserError: The folder has no scorecard.
            CorruptFileError: The files are not a scorecard.
        """
        folder = Path(folder)
        if not (folder / JSON).is_file():
            raise UserError(f"{folder} does not contain a scorecard: {JSON} is missing.")
        said = overt_io.read_json(folder / JSON)
        arrays = overt_io.read_arrays(folder / SAMPLES)
        try:
            if said["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT!r}, got {said['format']!r}")
            ids = tuple(str(name) for name in arrays.pop("id"))
            clusters = tuple(str(name) for name in arrays.pop("cluster"))
            counts = arrays.pop(KEY_COUNT, None)
            if counts is not None and counts.shape != (len(ids),):
                raise ValueError(
                    f"{KEY_COUNT!r} must have one number for each of {len(ids)} samples"
                )
            numbers = {}
            for name, values in arrays.items():
                which, bar, key = name.partition("|")
                if not bar or values.shape != (len(ids),):
                    raise ValueError(
                        f"{name!r} must have one number for each of {len(ids)} samples"
                    )
                numbers[which, key] = values
            clock = overt_io.read_json(folder / CLOCK) if (folder / CLOCK).is_file() else {}
            measures = tuple(
                {name: value for name, value in one.items() if name != "values"}
                for one in said["measures"]
            )
            return cls(
                said["name"], said["data"], said["seed"], tuple(said["maps"]), measures,
                ids, clusters, numbers, said["skipped"], clock, counts, str(said.get("judged", "")),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as problem:
            raise CorruptFileError(f"{folder / JSON} is not a scorecard: {problem}.") from problem


def mean_over_runs(
    cards: Sequence[Scorecard], others: Sequence[Scorecard] = (), map: str | None = None
) -> dict[str, Interval]:
    """Compute the mean by metric over runs with different seeds, and over samples (two levels).

    A metric with different versions among the scorecards is left out. One with an infinite score
    has an infinite mean, and NaN where both sides have one. The interval counts the noise of runs
    and of clusters of samples, so it is about the method and not about these runs.

    Args:
        cards: The scorecards of the runs, on the same samples.
        others: The runs of another method, to subtract; without metrics that depend on the number
            of keys where that differs.
        map: Name of the map; by default the evaluated one.

    Returns:
        An interval by metric.

    Raises:
        ValueError: There is no scorecard.

    Example:
        >>> mean_over_runs([])
        Traceback (most recent call last):
        ValueError: a mean over runs needs at least 1 scorecard, got 0
    """
    if not cards:
        raise ValueError("a mean over runs needs at least 1 scorecard, got 0")
    first = cards[0]
    everyone = (*cards, *others)
    unlike = {key for one in others for key in first._on_other_scales(one)}
    keys = [key for key in first.keys if all(one._gives(key, map) for one in everyone)]
    keys = [key for key in keys if key not in unlike]
    keys = [key for key in keys if len({one.version(key) for one in everyone}) == 1]
    found = {}
    for key in keys:
        ours = _stack_runs(first, cards, key, map)
        theirs = _stack_runs(first, others, key, map) if others else torch.zeros(1, 1)
        if ours.isinf().any() or theirs.isinf().any():
            mean = float(ours.nanmean() - theirs.nanmean())
            found[key] = Interval(mean, math.nan, math.nan, int((~ours.isnan()).any(dim=0).sum()))
        elif others:
            found[key] = statistics.two_level_difference(ours, theirs, clusters=first.clusters)
        else:
            found[key] = statistics.two_level_interval(ours, clusters=first.clusters)
    return found


def _stack_runs(
    first: Scorecard, cards: Sequence[Scorecard], key: str, map: str | None
) -> Float[Tensor, "s b"]:
    rows = [one.values(key, map)[_match_order(first, one)] for one in cards]
    return torch.from_numpy(np.stack(rows))


def _match_order(first: Scorecard, second: Scorecard) -> NDArray[np.int64]:
    """Return where the samples of the first scorecard are in the second."""
    place = {name: at for at, name in enumerate(second.ids)}
    missing = [name for name in first.ids if name not in place]
    if missing or len(first) != len(second):
        example = missing[0] if missing else next(n for n in second.ids if n not in set(first.ids))
        raise UserError(
            f"{first.name} and {second.name} have different samples, such as {example!r}: evaluate "
            "both on the same data with the same --limit."
        )
    return np.array([place[name] for name in first.ids], dtype=np.int64)


def format_interval(one: Interval) -> str:
    """Format a mean with its interval, or the mean alone without an interval.

    >>> format_interval(Interval(0.51234, 0.4, 0.62, 20))
    '0.512 [0.400, 0.620]'
    """
    if not one.count or math.isnan(one.mean):
        return "–"
    ends = [one.mean] if math.isnan(one.low) else [one.low, one.high, one.mean]
    digits = 3 if max(map(abs, ends)) < 100 else 1
    if math.isnan(one.low):
        return f"{one.mean:.{digits}f}"
    return f"{one.mean:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"


def format_counts(there: Iterable[Interval]) -> str:
    """Format the number of samples of a line: one number, or the smallest to the largest.

    >>> format_counts([Interval(0.5, 0.4, 0.6, 40), Interval(0.5, 0.4, 0.6, 10)])
    '10 to 40'
    """
    counts = sorted({one.count for one in there})
    return " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1]))) if counts else ""


def _format_cell(one: Interval | None, count: str) -> str:
    """Format a mean with its interval, and its own n if the line has several."""
    if one is None:
        return ""
    return (
        format_interval(one)
        if count == str(one.count)
        else f"{format_interval(one)} (n = {one.count})"
    )


def to_json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert NaN to None and infinity to "inf" or "-inf", which JSON lacks."""
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.9g}"
    return value
