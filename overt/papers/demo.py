"""The demo: five papers on synthetic images, each beside its control, in minutes on two cores.

Each row is a recipe with a short schedule, run in its own process; as many run in parallel as there
are cores, because small networks do not scale over several. Finished rows are reused, so adding a
row only costs that row. Rows without a paper ask whether attention helps to answer questions.
Schedules were chosen with another seed and another world.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overt import io, system
from overt.errors import RunError, RunInterrupted, UserError
from overt.experiments import run_folder, scenes_recipes, settings
from overt.experiments.recipe import Recipe
from overt.experiments.runner import stop_on_sigterm
from overt.experiments.table import RowSpec
from overt.experiments.workers import RunRequest, run_parallel
from overt.papers import demo_chapters
from overt.papers.a2 import config as a2
from overt.papers.han import config as han
from overt.papers.ltpa import config as ltpa
from overt.papers.ssa import config as ssa
from overt.papers.vgp import config as vgp

SHORT_VQA = (
    *("data.train=4000", "data.val=100", "data.test=504"),
    *("train.epochs=10", "train.save_every=400"),
)
SHORT_LTPA = (
    *("data.train=3000", "data.val=100", "data.test=504", "model.width=0.125"),
    *("train.epochs=5", "train.batch=64", "train.precision=fp32", "train.save_every=400"),
    *("judge.items=200", "judge.fgsm=0", "judge.pgd=0"),
)
SHORT_SSA = (
    *("data.train=3000", "data.val=100", "data.test=504", "model.width=0.5"),
    *("train.epochs=8", "train.batch=32", "surrogate.probes=24", "supervise.loss=kl"),
)
SHORT_HAN = (
    *("data.train=2000", "data.val=100", "data.test=100"),
    *("train.epochs=8", "train.batch=16", "train.rate=1e-3", "model.aggregate=sum"),
)
SHORT_VGP = (
    *("data.train=3000", "data.val=100", "data.test=300"),
    *("model.width=0.25", "model.features=256", "model.layers=2"),
    *("train.epochs=12", "train.batch=32", "train.rate=3e-3", "after.epochs=0"),
)
SHORT_A2 = (
    *("data.train=1500", "data.val=60", "data.test=200", "model.width=0.125", "model.layers=2"),
    *("train.epochs=12", "train.batch=32", "train.rate=2e-3"),
)
# The control of each paper, then its method.
ROWS = (
    RowSpec("average-pooling", ltpa.ltpa_scenes, (*SHORT_LTPA, "model.score=uniform")),
    RowSpec("learned-attention", ltpa.ltpa_scenes, SHORT_LTPA),
    RowSpec("unsupervised", ssa.ssa_shapes, (*SHORT_SSA, "supervise.target=none")),
    RowSpec("self-supervised", ssa.ssa_shapes, SHORT_SSA),
    RowSpec("random-cells", han.han_sortclevr, (*SHORT_HAN, "model.select=random")),
    RowSpec("hard-attention", han.han_sortclevr, (*SHORT_HAN, "model.select=top")),
    RowSpec("adaptive-attention", han.han_sortclevr, (*SHORT_HAN, "model.select=above-uniform")),
    RowSpec("ungrounded", vgp.vgp_scenes, (*SHORT_VGP, "supervise.way=none")),
    RowSpec("grounded", vgp.vgp_scenes, SHORT_VGP),
    RowSpec("plain-captions", a2.a2_scenes, (*SHORT_A2, "align.fuse=none")),
    RowSpec("aligned-captions", a2.a2_scenes, SHORT_A2),
    RowSpec("question-only", scenes_recipes.scenes_question, SHORT_VQA),
    RowSpec("no-attention", scenes_recipes.scenes_none, SHORT_VQA),
    RowSpec("soft-attention", scenes_recipes.scenes_soft, SHORT_VQA),
    RowSpec("truth-supervised", scenes_recipes.scenes_truth, SHORT_VQA),
)
DEFAULT_ROWS = tuple(
    row.label
    for row in ROWS
    if any(one.paper and row.label in (one.control, one.method) for one in demo_chapters.CHAPTERS)
)

REPORT = "report.html"
PrintFn = Callable[[str], None]


def select_rows(labels: Sequence[str]) -> tuple[RowSpec, ...]:
    """Return the rows with these labels and their controls.

    Without labels they are the rows of the papers, and for `all` every row.
    """
    known = [row.label for row in ROWS]
    for label in labels:
        if label not in (*known, "all"):
            near = settings.suggest_names(label, known)
            raise UserError(f"the demo has no row {label[:60]!r}; {near}")
    wanted = demo_chapters.with_controls(known if "all" in labels else labels or DEFAULT_ROWS)
    return tuple(row for row in ROWS if row.label in wanted)


def demo_recipe(row: RowSpec) -> Recipe:
    """Return the recipe of a row with its short schedule."""
    return settings.apply(row.recipe(), row.changes)


def run_demo(
    out: Path,
    rows: Sequence[RowSpec],
    *,
    seed: int = 0,
    device: str = "auto",
    data_root: Path | None = None,
    say: PrintFn = print,
) -> list[dict[str, Any]]:
    """Run these rows under `out`, one folder each, and write one page about all of them.

    Unfinished rows are resumed. A row that was run with other settings or another seed raises an
    error before anything starts.
    """
    run_folder.refuse_run_folder(out)
    folders = [out / row.label for row in rows]
    requests: dict[str, RunRequest] = {}
    # Check all rows before the first one starts.
    for row, folder in zip(rows, folders, strict=True):
        resume = run_folder.has_progress(folder)
        run = run_folder.check_claim(folder, demo_recipe(row), seed, resume=resume)
        if run is not None and run.is_finished:
            io.verify(folder)
            say(f"{row.label}: already finished in {folder}")
        else:
            options = ["--seed", str(seed), "--device", device, *(["--resume"] if resume else [])]
            options += ["--data", str(data_root)] if data_root is not None else []
            requests[row.label] = RunRequest.from_recipe(
                demo_recipe(row),
                folder,
                data_root,
                seed=seed,
                device=device,
                resume=resume,
                command=row_command(row, folder, options),
                title=row_title(row),
            )
    # A row may start from the files of another one, such as its control.
    io.write_json(out / run_folder.ROWS, {"rows": [row.label for row in rows]})
    # Controls first; of the rest the last rows, which are the slowest.
    last_first = list(reversed(requests))
    controls = [label for label in last_first if not _is_method(label)]
    methods = [label for label in last_first if _is_method(label)]
    run_requests({label: requests[label] for label in (*controls, *methods)}, say)
    write_pages(out, rows)
    return [dict(io.read_json(folder / run_folder.RESULTS)) for folder in folders]


def row_title(row: RowSpec) -> str:
    """Return the label of a row as words: "learned attention", "self-supervised"."""
    return row.label.replace("-", " ").replace(" supervised", "-supervised")


def _is_method(label: str) -> bool:
    """Return whether a row waits for controls: a method may start from the files of its control."""
    return any(one.method == label for one in demo_chapters.CHAPTERS)


def write_pages(out: Path, rows: Sequence[RowSpec]) -> None:
    """Write the page of all chapters and a full report of each; of rows alone, their report."""
    from overt.viz import chapter_page, report_page

    labels = [row.label for row in rows]
    chapters = demo_chapters.read_chapters(out, labels)
    if not chapters:
        report_page.write_report(out / REPORT, [out / label for label in labels])
        return
    for chapter in chapters:
        runs = [chapter.control.folder, chapter.method.folder]
        report_page.write_report(out / chapter.report, runs)
    page = chapter_page.render_chapters(
        demo_chapters.TITLE, demo_chapters.LEAD, chapters, foot=demo_chapters.FOOT
    )
    io.write_text(out / REPORT, page)


def comparison_table(out: Path, rows: Sequence[RowSpec]) -> list[list[str]]:
    """Return a header and a line per metric of each chapter of these rows; empty without any."""
    from overt.viz import chapter_page

    chapters = demo_chapters.read_chapters(out, [row.label for row in rows])
    lines = [
        [
            chapter.name,
            f"{one.metric} {one.arrow}".rstrip(),
            one.control,
            one.method,
            f"{one.difference} ({one.interval})" if one.interval else one.difference,
            one.verdict,
        ]
        for chapter, many in zip(chapters, chapter_page.chapter_lines(chapters), strict=True)
        for one in many
    ]
    header = ["paper", "metric", "control", "method", "difference (95 %)", "method is"]
    return [header, *lines] if lines else []


def row_command(row: RowSpec, folder: Path, options: Sequence[str]) -> list[str]:
    """Return the command line that would run one row by itself."""
    changes = [word for change in row.changes for word in ("--set", change)]
    named = ["--out", str(folder), "--title", row_title(row)]
    return ["overt", "run", demo_recipe(row).name, *named, *options, *changes]


def run_requests(requests: Mapping[str, RunRequest], say: PrintFn) -> None:
    """Run rows by label, as many in parallel as there are cores, and print their output.

    The first failure is raised after the other rows have ended. Ctrl-C and SIGTERM reach all
    running rows, which save their state; waiting rows are not started.
    """
    labels = list(requests)

    def on_output(index: int, line: str) -> None:
        say(f"{labels[index]}: {line}")

    try:
        with stop_on_sigterm():
            ends = sorted(
                run_parallel(list(requests.values()), system.available_cores(), on_output=on_output)
            )
    except (KeyboardInterrupt, RunInterrupted) as stopped:
        # A signal ends a process with 128 + its number, as a shell reports it; the error takes the
        # number.
        raise RunInterrupted(
            "the demo was interrupted and saved: run the same command to resume.",
            stopped.code - 128 if isinstance(stopped, RunInterrupted) else signal.SIGINT,
        ) from None
    for number, code, why in ends:
        # A worker reports 2 for what the user can change, as in `RunRequest.run`.
        if code:
            raise (UserError if code == 2 else RunError)(f"{labels[number]}: {why}")
