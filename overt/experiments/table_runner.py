"""Run a table: rows of recipes, each run with several seeds.

A finished run is not repeated. A run in the table's folder is reused if its files are intact and
its recipe, settings and seed match. So are results in a folder given as `reuse`, under
`<table>/<row>/seed-<n>/`, or `<table>-<name>/<row>/seed-<n>/` for another schedule. A row of
another table is searched under the name of that table; two tables in one folder run it once.
Kept results with an older version of a metric in the columns or of the data are only shown if
nothing has to be run: they would not be comparable with the new runs.
A failed run is reported and does not stop the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.experiments import preflight, run_folder, settings
from overt.experiments.data_versions import outdated_parts
from overt.experiments.recipe import Build, Recipe
from overt.experiments.recipe_file import RecipeFile, warn_of_other_code
from overt.experiments.result_archive import read_archived_run
from overt.experiments.table import RowSpec, TableResults, TableRun, TableSpec, write_table

REUSE_FOLDERS = ("results", "benchmarks")  # searched in the working directory by default


def default_reuse() -> Path | None:
    """Return the first of `REUSE_FOLDERS` in the working directory, or None."""
    return next((Path(name) for name in REUSE_FOLDERS if Path(name).is_dir()), None)


def select_rows(table: TableSpec, labels: Sequence[str]) -> tuple[RowSpec, ...]:
    """Return the rows with these labels, in the table's order; all for none or `all`."""
    known = [row.label for row in table.rows]
    for label in labels:
        if label not in (*known, "all"):
            suggestion = settings.suggest_names(label, known)
            raise UserError(f"table {table.name} has no row {label[:60]!r}; {suggestion}")
    everything = not labels or "all" in labels
    return tuple(row for row in table.rows if everything or row.label in labels)


def row_recipe(row: RowSpec, sets: Sequence[str]) -> Recipe:
    """Return the recipe of a row with its changes, then the user's."""
    return settings.apply(settings.apply(row.recipe(), row.changes), sets)


def run_table(
    table: TableSpec,
    out: Path,
    build: Build,
    *,
    rows: Sequence[str] = (),
    seeds: int = 3,
    first_seed: int = 0,
    device: str = "auto",
    data_root: Path | None = None,
    sets: Sequence[str] = (),
    resume: bool = False,
    command: Sequence[str] = (),
    jobs: int = 1,
    launcher: Sequence[str] = (),
    show_progress: bool = True,
    say: Callable[[str], None] = print,
    reuse: Path | None = None,
    file: RecipeFile | None = None,
) -> TableResults:
    """Run the missing runs of a table and write the table into `out`.

    All checks come before the first run. The table's files are written after each run; they also
    show finished runs of rows that were not selected.

    Args:
        table: The table.
        out: Folder of the table, with one folder per run.
        build: Turns a recipe into an experiment: `papers.catalog.build`, or your own function.
        rows: Labels of the rows to run; all by default.
        seeds: Number of seeds per row.
        first_seed: The first of these seeds; the others follow it.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        data_root: Folder of datasets.
        sets: Changes to the settings of all rows, as `KEY=VALUE`.
        resume: Continue unfinished runs.
        command: Command line, for results.json.
        jobs: Runs at a time. With more than one, each runs in a process of its own and logs to a
            file beside its folder; GPUs are distributed over the processes.
        launcher: Command that starts each of these processes, such as `srun` with its options; the
            machines must share `out`, `data_root` and this environment.
        show_progress: Print progress to stderr.
        say: Prints a line per run.
        reuse: Folder with results of earlier tables to reuse.
        file: The Python file that defines the table, which worker processes import as well.

    Returns:
        The results of all finished and failed runs.

    Raises:
        UserError: A row, a setting, the data or a folder cannot be used.
    """
    run_folder.refuse_run_folder(run_folder.check_folder_path(out))
    finished = _FinishedRuns(table, out, reuse)
    numbers = range(first_seed, first_seed + seeds)
    work = [
        _Job(row, row_recipe(row, sets), seed)
        for row in select_rows(table, rows)
        for seed in numbers
    ]
    found = [finished.find(job) for job in work]
    if any(run is None for run in found):
        found = [_if_comparable(run, table.columns, say) for run in found]
    for job, run in zip(work, found, strict=True):
        if run is None:
            preflight.check_dataset(job.recipe, data_root)
            folder = finished.folder(job)
            resuming = resume and run_folder.has_progress(folder)
            run_folder.check_claim(folder, job.recipe, job.seed, resume=resuming)
    others = finished.of_other_rows(work, sets, numbers)
    missing = [number for number, run in enumerate(found) if run is None]
    if missing:
        others = [(job, run) for job, run in others if _if_comparable(run, table.columns, say)]
    options = {"device": device, "data_root": data_root, "command": command}

    def label(number: int) -> str:
        return f"[{number + 1}/{len(work)}] {work[number].row.label}, seed {work[number].seed}:"

    def on_start(number: int) -> None:
        say(f"{label(number)} running in {finished.folder(work[number])}")

    def runs() -> Iterator[tuple[int, TableRun]]:
        yield from ((number, run) for number, run in enumerate(found) if run is not None)
        if jobs == 1 and not launcher:
            for number in missing:
                on_start(number)
                job = work[number]
                folder = finished.folder(job)
                path = None if file is None else file.path
                quiet = {"show_progress": show_progress, "file": path}
                yield number, _run(job, folder, build, **quiet, **options)
        else:
            todo = {number: (work[number], finished.folder(work[number])) for number in missing}
            word = None if file is None else file.word
            yield from _run_parallel(todo, jobs, launcher, on_start, file=word, **options)

    with io.lock(out):
        results = _collect(table, [*zip(work, found, strict=True), *others])
        for number, run in runs():
            found[number] = run
            error = f": {run.error}" if run.error else ""
            say(f"{label(number)} {_STATUS_TEXT[run.source]} {run.folder}{error}")
            results = _collect(table, [*zip(work, found, strict=True), *others])
            write_table(results, out)
    return results


def _if_comparable(
    run: TableRun | None, columns: tuple[str, ...], say: Callable[[str], None]
) -> TableRun | None:
    """Return the run, or None if it is a kept one that new runs cannot be compared with."""
    if run is None or run.source != "committed" or run.results is None:
        return run
    outdated = outdated_parts(run.results, columns)
    if not outdated:
        return run
    say(f"{run.row}, seed {run.seed}: {run.folder} has older versions of {', '.join(outdated)}")
    return None


_STATUS_TEXT = {
    "run": "done in",
    "reused": "reused from",
    "committed": "reused from",
    "failed": "failed in",
}


@dataclass(frozen=True)
class _Job:
    """One run of a table: a row and a seed."""

    row: RowSpec
    recipe: Recipe
    seed: int

    def result(self, folder: Path, source: str, **rest: Any) -> TableRun:
        return TableRun(self.row.label, self.seed, folder, source, **rest)


@dataclass(frozen=True)
class _FinishedRuns:
    """Finds finished runs of a table in its folder and in the folder of results to reuse."""

    table: TableSpec
    out: Path
    reuse: Path | None

    def folder(self, job: _Job) -> Path:
        return self.out / job.row.label / f"seed-{job.seed}"

    def find(self, job: _Job) -> TableRun | None:
        """Return the finished run of a job; a damaged one counts as failed and is not changed."""
        folder = self.folder(job)
        try:
            existing = run_folder.read_run(run_folder.check_folder_path(folder))
            if existing is not None:
                # `check_claim` then says what differs.
                if not existing.is_finished or existing.differences(job.recipe, job.seed):
                    return None
                io.verify(folder)
                warn_of_other_code(existing.results, job.recipe, folder)
                return job.result(folder, "reused", results=existing.results)
        except CorruptFileError as error:
            return job.result(folder, "failed", error=str(error))
        for existing in self.reusable_runs(job):
            # Kept results are results.json alone, without a manifest.
            if existing.has_final_results and not existing.differences(job.recipe, job.seed):
                return job.result(existing.folder, "committed", results=existing.results)
        return None

    def reusable_runs(self, job: _Job) -> Iterator[run_folder.ExistingRun]:
        """Yield the kept runs of a job: of its table, or of variants `TABLE-NAME` of it.

        A table is a folder, or an archive with the suffix .zip.
        """
        if self.reuse is None:
            return
        home = job.row.home or self.table.name
        variants = sorted(self.reuse.glob(f"{home}-*"))
        for place in (self.reuse / home, self.reuse / f"{home}.zip", *variants):
            if place.is_dir():
                existing = run_folder.read_run(place / job.row.label / f"seed-{job.seed}")
            elif place.suffix == ".zip" and place.is_file():
                existing = read_archived_run(place, job.row.label, job.seed)
            else:
                continue
            if existing is not None:
                yield existing

    def of_other_rows(
        self, jobs: Sequence[_Job], sets: Sequence[str], seeds: Sequence[int]
    ) -> list[tuple[_Job, TableRun]]:
        """Return the finished runs of rows that are not among the jobs, with the same changes."""
        selected = {job.row.label for job in jobs}
        found = []
        for row in self.table.rows:
            try:
                recipe = row_recipe(row, sets)
            except UserError:  # this row does not have these settings, and was not selected
                continue
            for seed in seeds if row.label not in selected else ():
                job = _Job(row, recipe, seed)
                run = self.find(job)
                if run is not None and run.results is not None:
                    found.append((job, run))
        return found


def _collect(table: TableSpec, found: Sequence[tuple[_Job, TableRun | None]]) -> TableResults:
    """Collect the runs so far in the table's order; rows without runs are left out."""
    known = [(job, run) for job, run in found if run is not None]
    order = [row.label for row in table.rows]
    known.sort(key=lambda pair: (order.index(pair[0].row.label), pair[0].seed))
    recipes = {job.row.label: job.recipe for job, _ in known}
    return TableResults(table, recipes, tuple(run for _, run in known))


def _run(job: _Job, folder: Path, build: Build, **options: Any) -> TableRun:
    """Run one job; an error becomes a failed run, so that the others still run."""
    from overt.experiments import workers

    resume = run_folder.has_progress(folder)
    found = workers.run_or_error(job.recipe, folder, build, seed=job.seed, resume=resume, **options)
    if isinstance(found, Exception):
        return job.result(folder, "failed", error=str(found))
    return job.result(folder, "run", results=found)


def _run_parallel(
    todo: Mapping[int, tuple[_Job, Path]],
    jobs: int,
    launcher: Sequence[str],
    on_start: Callable[[int], None],
    **options: Any,
) -> Iterator[tuple[int, TableRun]]:
    """Run jobs by number, `jobs` at a time, and yield each when it ends."""
    from overt.experiments import workers
    from overt.experiments.runner import stop_on_sigterm

    numbers = list(todo)
    requests = [
        workers.RunRequest.from_recipe(
            job.recipe,
            folder,
            seed=job.seed,
            resume=run_folder.has_progress(folder),
            **options,
        )
        for job, folder in todo.values()
    ]
    with stop_on_sigterm():
        results = workers.run_parallel(
            requests, jobs, lambda index: on_start(numbers[index]), launcher=launcher
        )
        with closing(results) as ended:  # the runs are saved while signals are handled
            for result in ended:
                number = numbers[result.number]
                job, folder = todo[number]
                existing = run_folder.read_run(folder) if result.code == 0 else None
                if existing is None:
                    yield number, job.result(folder, "failed", error=result.reason)
                else:
                    yield number, job.result(folder, "run", results=existing.results)
