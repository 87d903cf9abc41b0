"""`overt bench`: explanation methods x models x metrics x data, in one folder that can be resumed.

    OUT/scorecards/MODEL-HASH/            a scorecard of one model on one dataset, with all methods
    OUT/scorecards/MODEL-HASH/finished/   its settings, and why some methods do not apply
    OUT/scorecards/MODEL-HASH/maps-NAME/  a scorecard of submitted maps on the same samples
    OUT/benchmark.json, benchmark.csv     means, intervals, ranks and trust of metrics
    OUT/index.html                        the same as a page

Pairs of a model and a dataset are independent: processes of `jobs`, or of `torchrun` on several
machines that share the folder, divide them.
"""

import csv
import hashlib
import io as text_io
import json
import math
import multiprocessing
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import io
from overt.errors import UserError
from overt.experiments.recipe_file import RecipeFile
from overt.inspect.map_methods import ATTENTION, METHODS, check_methods, method_maps
from overt.inspect.measure import (
    MeasuredModel,
    MeasureRequest,
    check_dataset_name,
    check_modality,
    check_request,
    measuring_errors,
    open_dataset,
    open_measured,
)

if TYPE_CHECKING:
    from overt.attention import AttentionMap
    from overt.data.batch import Batch
    from overt.data.dataset import Dataset
    from overt.metrics.scorecard.benchmark import Benchmark
    from overt.metrics.scorecard.metric_context import MapFunction
    from overt.metrics.scorecard.result import Scorecard
    from overt.metrics.scorecard.submission import Submission

MEASURES = (
    *("spearman", "mass_inside", "pointing_game", "js", "nss", "auc_shuffled", "token_auc"),
    *("deletion_area@mean", "insertion_area@mean", "comprehensiveness@mean", "sufficiency@mean"),
    *("infidelity@mean", "leave_one_out_agreement@mean"),
    *("deletion_area@imputed", "insertion_area@imputed"),
    *("deletion_area@mask", "insertion_area@mask", "leave_one_out_agreement@mask"),
)
RESULT, TABLE, PAGE = "benchmark.json", "benchmark.csv", "index.html"
SCORECARDS, FINISHED, SETTINGS = "scorecards", "finished", "settings.json"
SHARD = 64  # items after which a scorecard is saved
Say = Callable[[str], None]


@dataclass(frozen=True)
class BenchmarkRequest:
    """Arguments of `overt bench`.

    Args:
        models: Models as for `overt measure`, or NAME=MODEL; models with one name are runs of it
            with different seeds.
        data: Datasets as for `overt measure`; empty for the test sets of runs.
        methods: Words of `METHODS`; empty for all that apply.
        measures: Keys of metrics; empty for `MEASURES`.
        maps: Submitted maps: folders or .npz files.
        over: "image" or "text"; None for that of the target.
        limit: Most items of each dataset.
        seed: Seed of all random numbers.
        portion: Items per batch.
        files: Recipes of runs that are not of overt.
    """

    models: tuple[str, ...]
    data: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    maps: tuple[Path, ...] = ()
    over: str | None = None
    limit: int | None = None
    seed: int = 0
    portion: int = 8
    files: tuple[RecipeFile, ...] = ()


@dataclass(frozen=True)
class BenchmarkPair:
    """A model and a dataset.

    Args:
        name: Name of the model; empty for its own.
        model: The model, as for `overt measure`.
        data: The dataset; None for the test set of a run.
    """

    name: str
    model: str
    data: str | None

    @property
    def folder(self) -> str:
        """Name of the folder of its scorecard."""
        word = json.dumps([self.name, self.model, self.data])
        name = re.sub(r"[^\w.]+", "-", self.name or Path(self.model).name).strip("-.")[:40]
        return f"{name}-{hashlib.sha256(word.encode()).hexdigest()[:8]}"


def benchmark_pairs(request: BenchmarkRequest) -> tuple[BenchmarkPair, ...]:
    """Return every model with every dataset, after checking the arguments.

    Raises:
        UserError: An argument is invalid, or two are the same.
    """
    if not request.models:
        raise UserError("overt bench needs at least one --model: a run, a model or FILE.py:NAME.")
    check_methods(request.methods)
    for name in request.data:
        check_dataset_name(name)
    pairs = []
    for word in request.models:
        name, model = _split_name(word)
        for data in request.data or (None,):
            check_request(MeasureRequest(model, data), Path("-"))
            pairs.append(BenchmarkPair(name, model, data))
    if len(set(pairs)) < len(pairs):
        raise UserError("a model or a dataset was given twice.")
    return tuple(pairs)


def _split_name(word: str) -> tuple[str, str]:
    """Split NAME=MODEL; the name is empty if there is none."""
    name, equals, model = word.partition("=")
    if not equals or "/" in name or ":" in name:
        return "", word
    if not name.strip() or not model:
        raise UserError(f"--model must be MODEL or NAME=MODEL, got {word!r}.")
    return name.strip(), model


def run_benchmark(
    request: BenchmarkRequest,
    out: Path,
    root: Path | None = None,
    device: str = "cpu",
    jobs: int = 1,
    command: str = "",
    say: Say = lambda line: None,
) -> "Benchmark | None":
    """Compute what is missing in the folder, and write the results and the page.

    Args:
        request: What to compute.
        out: The folder; finished scorecards in it are not computed again.
        root: Folder of datasets.
        device: Device of the models.
        jobs: Number of processes on this machine.
        command: The command line, for the page.
        say: Called with a line of progress.

    Returns:
        The benchmark; None in processes other than the first.

    Raises:
        UserError: An argument is invalid, a submission does not fit, or the folder holds a
            benchmark with other settings.
    """
    from overt.metrics.scorecard.submission import load_submission
    from overt.targets.surrogate.generate import wait_for_folders, worker_share

    pairs = benchmark_pairs(request)
    submissions = [load_submission(path) for path in request.maps]
    check_submitted_names([one.method for one in submissions])
    here = worker_share()
    mine = pairs[here.rank :: here.world]
    with io.lock(out / f"process-{here.rank}"):
        if jobs > 1 and len(mine) > 1:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(min(jobs, len(mine)), mp_context=context) as pool:
                # As text, because a recipe of a user's file is loaded again by its word.
                words = [one.word for one in request.files]
                plain = replace(request, files=())
                waiting = {
                    pair: pool.submit(_compute_in_process, plain, words, pair, out, root, device)
                    for pair in mine
                }
                for pair, future in waiting.items():
                    future.result()
                    say(f"{pair.folder}: finished.")
        else:
            for pair in mine:
                compute_pair(request, pair, out, root, device, say)
    if here.rank:
        return None
    wait_for_folders([out / SCORECARDS / pair.folder / FINISHED for pair in pairs], here)
    found = read_benchmark(request, pairs, submissions, out)
    write_benchmark(found, out, command)
    return found


def check_submitted_names(names: Sequence[str]) -> None:
    """Raise if submitted maps have the name of another map, or would share a folder with others."""
    from overt.metrics.scorecard.benchmark import CEILINGS
    from overt.metrics.scorecard.metric_context import ACTIVATION, CONTROLS, GRADIENT

    taken = {*METHODS, *CEILINGS, *CONTROLS, ACTIVATION, GRADIENT}
    folders = [_maps_folder(name).lower() for name in names]
    for name in names:
        if name in taken or folders.count(_maps_folder(name).lower()) > 1:
            raise UserError(
                f"submitted maps cannot be named {name!r}, which is the name of another map or "
                'differs from one in punctuation only: set "method" in maps.json.'
            )


def _compute_in_process(
    request: BenchmarkRequest,
    words: Sequence[str],
    pair: BenchmarkPair,
    out: Path,
    root: Path | None,
    device: str,
) -> None:
    """Compute a pair in a process of its own."""
    from overt.papers.catalog import load_recipe_files

    compute_pair(replace(request, files=load_recipe_files(words)), pair, out, root, device)


def compute_pair(
    request: BenchmarkRequest,
    pair: BenchmarkPair,
    out: Path,
    root: Path | None = None,
    device: str = "cpu",
    say: Say = lambda line: None,
) -> None:
    """Compute the scorecards of a model on a dataset, unless they are finished.

    Args:
        request: What to compute.
        pair: The model and the dataset.
        out: Folder of the benchmark.
        root: Folder of datasets.
        device: Device of the model.
        say: Called with a line of progress.
    """
    from overt import metrics
    from overt.metrics.scorecard.submission import load_submission
    from overt.targets.surrogate.generate import WorkerShare

    folder = out / SCORECARDS / pair.folder
    opened = open_measured(pair.model, root, device, say, request.files)
    data = open_dataset(pair.data, opened, root)
    check_modality(opened, data)
    over = request.over or opened.over
    name = _model_name(pair, opened)
    settings = _settings(request, opened, data, over)
    ids = _sample_ids(data, request.limit, request.portion)
    submissions = [load_submission(path) for path in request.maps]
    chosen = [one for one in submissions if one.covers(name, data.name, ids)]
    done = folder / FINISHED
    held = io.read_json(done / SETTINGS) if done.is_dir() else None
    if held is not None and held["settings"] != settings:
        differ = [key for key in settings if held["settings"].get(key) != settings[key]]
        raise UserError(
            f"{folder} holds a scorecard with other {', '.join(differ)}: choose another --out."
        )

    def measure(looks: "Mapping[str, MapFunction]", place: Path) -> "Scorecard":
        with measuring_errors(name, data.name):
            return metrics.scorecard(
                opened.model,
                data,
                request.measures or MEASURES,
                looks,
                over=over,
                name=name,
                seed=request.seed,
                limit=request.limit,
                portion=request.portion,
                shard=SHARD,
                out=place,
                share=WorkerShare(),
                progress=lambda count, of: say(f"{name} on {data.name}: {count} of {of} items"),
            )

    looks: dict[str, MapFunction] = dict(opened.looks or {})
    found, unavailable = _applicable(request, opened, data, over)
    looks |= found
    if data.batch([0]).target is not None:
        looks["target"] = TargetMap()
    if held is None:
        measure(looks, folder)
        kept = {"name": name, "settings": settings, "unavailable": unavailable}
        with io.atomic_folder(done) as temporary:
            io.write_json(temporary / SETTINGS, kept)
    # The keys of a model without attention are those of its first map.
    first = dict(list(looks.items())[:1])
    for one in chosen:
        place = folder / _maps_folder(one.method)
        if not (place / "scorecard.json").is_file() or not _has_maps(place, one):
            measure(first | {one.method: one.maps}, place)


def _maps_folder(method: str) -> str:
    return "maps-" + re.sub(r"[^\w.]+", "-", method)


def _has_maps(place: Path, submission: "Submission") -> bool:
    """Return whether a finished scorecard is of these very maps."""
    held = io.read_json(place / "plan.json")
    return bool(held["maps"].get(submission.method) == submission.maps.digest)


def _model_name(pair: BenchmarkPair, opened: MeasuredModel) -> str:
    """Return the name of a model; runs with different seeds share one."""
    return pair.name or re.sub(r", seed \d+$", "", opened.name)


def _sample_ids(data: "Dataset", limit: int | None, portion: int) -> tuple[str, ...]:
    count = len(data) if limit is None else min(limit, len(data))
    return tuple(
        name
        for start in range(0, count, portion)
        for name in data.batch(range(start, min(start + portion, count))).ids
    )


def _settings(
    request: BenchmarkRequest, opened: MeasuredModel, data: "Dataset", over: str | None
) -> dict[str, Any]:
    """Return what a scorecard depends on, as JSON values."""
    from torch import nn

    from overt.targets.surrogate.generate import model_digest

    model = opened.model
    return {
        "model": model_digest(model) if isinstance(model, nn.Module) else opened.name,
        "data": data.digest(),
        "methods": list(request.methods),
        "metrics": list(request.measures or MEASURES),
        "over": over,
        "limit": request.limit,
        "seed": request.seed,
        "portion": request.portion,
    }


def _applicable(
    request: BenchmarkRequest, opened: MeasuredModel, data: "Dataset", over: str | None
) -> "tuple[dict[str, MapFunction], dict[str, str]]":
    """Return the methods that apply to a model, tried on one item, and why the others do not."""
    from torch import nn

    from overt.capture import UncapturedAttentionError
    from overt.capture.eval_mode import eval_mode
    from overt.metrics.metric import MetricUnavailableError
    from overt.metrics.scorecard.metric_context import MetricContext

    words = request.methods or tuple(METHODS)
    if not isinstance(opened.model, nn.Module):
        return {}, dict.fromkeys(words, "there are only maps and no model")
    parameter = next(opened.model.parameters(), None)
    batch = data.batch([0])
    batch = batch if parameter is None else batch.to(parameter.device)
    found, reasons = {}, {}
    rejected = (ValueError, RuntimeError, MetricUnavailableError, UncapturedAttentionError)
    with eval_mode(opened.model):
        for word in words:
            try:
                if word == ATTENTION:
                    # A scorecard has the model's own attention without being asked.
                    context = MetricContext(opened.model, batch, over=over)
                    if not context.output.attention:
                        raise ValueError("the model has no attention")
                    continue
                look = method_maps([word], opened.model, over, request.seed)[word]
                look(batch)
            except rejected as reason:
                if type(reason).__name__ == "OutOfMemoryError":
                    raise
                reasons[word] = " ".join(str(reason).split())[:200].rstrip(".")
                continue
            found[word] = look
    return found, reasons


@dataclass(frozen=True)
class TargetMap:
    """The target of the dataset as a map, which shows what a metric can reach."""

    digest: str = field(default="target")

    def __call__(self, batch: "Batch") -> "AttentionMap":
        """Return the target of every sample, over all queries."""
        assert batch.target is not None
        return batch.target


# --- results


def read_benchmark(
    request: BenchmarkRequest,
    pairs: Sequence[BenchmarkPair],
    submissions: "Sequence[Submission]",
    out: Path,
) -> "Benchmark":
    """Read the finished scorecards; models with one name and dataset are runs of one model."""
    from overt.metrics.scorecard.benchmark import Benchmark, ModelResult, merge_scorecards
    from overt.metrics.scorecard.result import Scorecard

    grouped: dict[tuple[str, str], tuple[list[Scorecard], dict[str, str]]] = {}
    fits = set()
    for pair in pairs:
        folder = out / SCORECARDS / pair.folder
        held = io.read_json(folder / FINISHED / SETTINGS)
        card = Scorecard.load(folder)
        name, data = str(held["name"]), f"{card.data['name']} {card.data['split']}"
        chosen = [one for one in submissions if one.covers(name, card.data["name"], card.ids)]
        fits |= {one.method for one in chosen}
        more = [Scorecard.load(folder / _maps_folder(one.method)) for one in chosen]
        cards, reasons = grouped.setdefault((name, data), ([], {}))
        cards.append(merge_scorecards(card, more))
        reasons |= held["unavailable"]
    for one in submissions:
        if one.method not in fits:
            raise UserError(
                f"{one.maps.where} has no map of any sample of these models and datasets: its "
                "maps need the ids of the samples, which samples.npz of a scorecard lists."
            )
    return Benchmark(
        tuple(
            ModelResult(name, data, tuple(cards), reasons)
            for (name, data), (cards, reasons) in grouped.items()
        )
    )


def write_benchmark(found: "Benchmark", out: Path, command: str = "") -> None:
    """Write benchmark.json, benchmark.csv and index.html."""
    from overt.viz.benchmark_page import render_benchmark

    io.write_json(out / RESULT, found.to_dict())
    records = found.to_records()
    text = text_io.StringIO()
    if records:
        writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    io.write_text(out / TABLE, text.getvalue())
    io.write_text(out / PAGE, render_benchmark(found, METHODS, command))


def standing_tables(found: "Benchmark") -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, header and lines for each model, by the reference metric or the first one."""
    from overt.metrics.scorecard.result import format_interval

    tables = []
    for one in found.results:
        if not one.keys:
            continue
        key = found.reference if found.reference in one.keys else one.keys[0]
        trust = one.cards[0].trust(key)
        known = "" if trust is None else f"; it {trust}"
        runs = f", {len(one.cards)} runs" if len(one.cards) > 1 else ""
        title = f"{one.model} on {one.data}, {len(one.cards[0])} samples{runs}: {key}{known}"
        lines = [
            [
                at.method,
                format_interval(at.interval),
                format_rank(at.first, at.last),
                "yes" if at.beats_controls else "no",
            ]
            for at in one.standings(key)
        ]
        for name in (*one.controls, *one.ceilings):
            interval = one.interval(key, name)
            if interval is not None:
                lines.append([f"({name})", format_interval(interval), "", ""])
        tables.append((title, ["method", "mean [95 %]", "rank", "beats all controls"], lines))
    return tables


def format_rank(first: int, last: int) -> str:
    """Format a set of ranks.

    >>> format_rank(1, 3), format_rank(2, 2)
    ('1–3', '2')
    """
    return str(first) if first == last else f"{first}–{last}"


def agreement_table(found: "Benchmark") -> tuple[list[str], list[list[str]]]:
    """Return header and lines: each metric, its trust, and how it orders methods."""
    lines = []
    for one in found.agreements:
        tau = "–" if math.isnan(one.mean) else f"{one.mean:+.2f}"
        lines.append([
            one.key,
            "–" if one.trust is None else f"{one.trust:.2f}",
            tau if len(one.taus) < 2 else f"{tau} ({len(one.taus)} models)",
        ])  # fmt: skip
    return ["metric", "planted tests", f"tau with {found.reference}"], lines
