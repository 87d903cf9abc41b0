"""The tables there are, and how one is filled: rows of recipes, each run for several seeds.

A run that is finished is never run again: one in the table's folder is used if its files are whole
and its recipe, settings and seed are those asked for; so is a result that is committed under
`benchmarks/<table>/<row>/seed-<n>/`, or under `benchmarks/<table>-<name>/` for another schedule. A
row that belongs to another table is looked for under that one's name, and in a folder that both
tables fill it is run once. A run that fails is reported and does not stop the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import checks, folder, settings
from overt.recipes.comparison import Entry, Filled, Row, Table, write
from overt.recipes.recipe import Recipe

HELD_OUT = ("data.held_out=relate",)
COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks"


def tables() -> dict[str, Table]:
    """Every table by name."""
    from overt.recipes import baselines, scenes
    from overt.recipes.a2 import tables as a2_tables
    from overt.recipes.han import tables as han_tables
    from overt.recipes.ltpa import tables as ltpa_tables
    from overt.recipes.ssa import tables as ssa_tables
    from overt.recipes.vgp import tables as vgp_tables

    attention = ("accuracy", "pointing", "mass_inside", "rank_correlation", "deletion")
    every = (
        Table(
            "scenes",
            "Questions about scenes: what attention adds, and what teaching it the truth adds.",
            (
                Row("question-only", scenes.scenes_question),
                Row("no-attention", scenes.scenes_none),
                Row("soft-attention", scenes.scenes_soft),
                Row("truth-supervised", scenes.scenes_truth),
                Row("soft-held-out", scenes.scenes_soft, HELD_OUT),
                Row("truth-held-out", scenes.scenes_truth, HELD_OUT),
            ),
            (*attention, "accuracy_held_out", "mass_inside_held_out"),
        ),
        Table(
            "baselines",
            "Plain models on data sets from disk, beside the papers' baselines.",
            (
                Row("cifar10", baselines.cifar10_cnn),
                Row("cifar100", baselines.cifar100_cnn),
                Row("trec", baselines.trec_attention),
                Row("easyvqa", baselines.easyvqa_soft),
            ),
            ("accuracy", "deletion", "entropy"),
        ),
        *ltpa_tables.tables(),
        *ssa_tables.tables(),
        *han_tables.tables(),
        *vgp_tables.tables(),
        *a2_tables.tables(),
    )
    return {table.name: table for table in every}


def find(name: str) -> Table:
    """The table of this name; another name is answered with the nearest."""
    known = tables()
    if name not in known:
        raise BadInput(f"there is no table {name[:60]!r}; {settings.offer(name, known)}.")
    return known[name]


def pick(table: Table, labels: Sequence[str]) -> tuple[Row, ...]:
    """The rows called so, in the table's order; all, when none is named or one is `all`."""
    known = [row.label for row in table.rows]
    for label in labels:
        if label not in (*known, "all"):
            raise BadInput(
                f"table {table.name} has no row {label[:60]!r}; {settings.offer(label, known)}."
            )
    everything = not labels or "all" in labels
    return tuple(row for row in table.rows if everything or row.label in labels)


def made(row: Row, sets: Sequence[str]) -> Recipe:
    """The recipe of a row with its changes, and the user's after them."""
    return settings.apply(settings.apply(row.recipe(), row.changes), sets)


def run_table(
    table: Table,
    out: Path,
    *,
    rows: Sequence[str] = (),
    seeds: int = 3,
    device: str = "auto",
    data_root: Path | None = None,
    sets: Sequence[str] = (),
    resume: bool = False,
    command: Sequence[str] = (),
    jobs: int = 1,
    show_progress: bool = True,
    say: Callable[[str], None] = print,
    committed: Path = COMMITTED,
) -> Filled:
    """Run these rows (all, when none is named) for seeds 0, 1, ... and write the table into `out`.

    What cannot be started is refused before the first run starts. The table's two files are
    written anew after each run; they also show finished rows that were not asked for this time.
    With several `jobs` so many runs go on at a time, each in a process of its own, and what a run
    says is in a file beside its folder; where there are several cards, they are shared out.
    """
    folder.usable(out)
    source = _Source(table, out, committed)
    work = [_Job(row, made(row, sets), seed) for row in pick(table, rows) for seed in range(seeds)]
    found = [source.at_hand(job) for job in work]
    for job, entry in zip(work, found, strict=True):
        if entry is None:
            checks.data(job.recipe, data_root)
            begun = folder.begun(source.place(job))
            folder.claim(source.place(job), job.recipe, job.seed, resume=resume and begun)
    others = source.others(work, sets, seeds)
    missing = [number for number, entry in enumerate(found) if entry is None]
    options = {"device": device, "data_root": data_root, "command": command}

    def what(number: int) -> str:
        return f"[{number + 1}/{len(work)}] {work[number].row.label}, seed {work[number].seed}:"

    def begins(number: int) -> None:
        say(f"{what(number)} runs in {source.place(work[number])}")

    def ended() -> Iterator[tuple[int, Entry]]:
        yield from ((number, entry) for number, entry in enumerate(found) if entry is not None)
        if jobs == 1:
            for number in missing:
                begins(number)
                place = source.place(work[number])
                yield number, _run(work[number], place, show_progress=show_progress, **options)
        else:
            todo = {number: (work[number], source.place(work[number])) for number in missing}
            yield from _run_beside(todo, jobs, begins, **options)

    with files.lock(out):
        filled = _filled(table, [*zip(work, found, strict=True), *others])
        for number, entry in ended():
            found[number] = entry
            how = f"{_HOW[entry.source]} {entry.place}{entry.error and f': {entry.error}'}"
            say(f"{what(number)} {how}")
            filled = _filled(table, [*zip(work, found, strict=True), *others])
            write(filled, out)
    return filled


_HOW = {"run": "done in", "reused": "reused from", "committed": "taken from", "failed": "failed in"}


@dataclass(frozen=True)
class _Job:
    """One run that a table consists of."""

    row: Row
    recipe: Recipe
    seed: int

    def entry(self, place: Path, source: str, **rest: Any) -> Entry:
        return Entry(self.row.label, self.seed, place, source, **rest)


@dataclass(frozen=True)
class _Source:
    """Where finished runs of a table are looked for."""

    table: Table
    out: Path
    committed: Path

    def place(self, job: _Job) -> Path:
        return self.out / job.row.label / f"seed-{job.seed}"

    def at_hand(self, job: _Job) -> Entry | None:
        """A finished run of this very job; a damaged one counts as failed and is left alone."""
        place = self.place(job)
        try:
            held = folder.look(folder.usable(place))
            if held is not None:
                if not held.done or held.differences(job.recipe, job.seed):
                    return None
                files.verify(place)
                return job.entry(place, "reused", results=held.results)
        except Damaged as error:
            return job.entry(place, "failed", error=str(error))
        for place in self.kept(job):
            held = folder.look(place)
            if held is not None and held.says_done and not held.differences(job.recipe, job.seed):
                return job.entry(place, "committed", results=held.results)
        return None

    def kept(self, job: _Job) -> Iterator[Path]:
        """Where a result of this job may be committed: under its table, or one kept beside it."""
        home = job.row.home or self.table.name
        beside = sorted(self.committed.glob(f"{home}-*")) if self.committed.is_dir() else []
        for each in (self.committed / home, *beside):
            yield each / job.row.label / f"seed-{job.seed}"

    def others(
        self, jobs: Sequence[_Job], sets: Sequence[str], seeds: int
    ) -> list[tuple[_Job, Entry]]:
        """The finished runs of rows that are not among the jobs, with the same changes."""
        taken = {job.row.label for job in jobs}
        found = []
        for row in self.table.rows:
            try:
                recipe = made(row, sets)
            except BadInput:  # a row that does not have these keys was not asked for
                continue
            for seed in range(seeds if row.label not in taken else 0):
                job = _Job(row, recipe, seed)
                entry = self.at_hand(job)
                if entry is not None and entry.results is not None:
                    found.append((job, entry))
        return found


def _filled(table: Table, found: Sequence[tuple[_Job, Entry | None]]) -> Filled:
    """What is known now, in the table's order; rows without any run are left out."""
    known = [(job, entry) for job, entry in found if entry is not None]
    order = [row.label for row in table.rows]
    known.sort(key=lambda pair: (order.index(pair[0].row.label), pair[0].seed))
    recipes = {job.row.label: job.recipe for job, _ in known}
    return Filled(table, recipes, tuple(entry for _, entry in known))


def _run(job: _Job, place: Path, **options: Any) -> Entry:
    """One run; whatever it fails of becomes a sentence, so that the other runs still come."""
    from overt.recipes import workers

    begun = folder.begun(place)
    found = workers.tried(job.recipe, place, seed=job.seed, resume=begun, **options)
    if isinstance(found, Exception):
        return job.entry(place, "failed", error=str(found))
    return job.entry(place, "run", results=found)


def _run_beside(
    todo: Mapping[int, tuple[_Job, Path]], jobs: int, begins: Callable[[int], None], **options: Any
) -> Iterator[tuple[int, Entry]]:
    """The runs by their numbers, so many at a time, each as it ends."""
    from overt.recipes import workers
    from overt.recipes.running import ending

    numbers = list(todo)
    orders = [
        workers.Order.of(job.recipe, place, seed=job.seed, resume=folder.begun(place), **options)
        for job, place in todo.values()
    ]
    with ending():
        for ended in workers.side_by_side(orders, jobs, lambda index: begins(numbers[index])):
            number = numbers[ended.number]
            job, place = todo[number]
            held = folder.look(place) if ended.code == 0 else None
            if held is None:
                yield number, job.entry(place, "failed", error=ended.why)
            else:
                yield number, job.entry(place, "run", results=held.results)
