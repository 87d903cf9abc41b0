"""The demo: the same questions answered with and without attention, in minutes on two cores.

Each row is a recipe with a short plan, run in a process of its own; as many run side by side as
there are cores, because small networks make poor use of several. Finished rows are kept and used
again, so asking for one more row costs no more than that row. The rows after the first four are
other tasks on scenes, one a paper.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overt import files
from overt.errors import BadInput, Failed, Stopped
from overt.recipes import checks, folder, scenes, settings
from overt.recipes.a2 import recipe as a2
from overt.recipes.comparison import Row
from overt.recipes.han import recipe as han
from overt.recipes.ltpa import recipe as ltpa
from overt.recipes.recipe import Recipe
from overt.recipes.running import ending
from overt.recipes.ssa import recipe as ssa
from overt.recipes.vgp import recipe as vgp
from overt.recipes.workers import Order, side_by_side

SHORT = (
    "data.train=4000",
    "data.val=100",
    "data.test=504",
    "train.epochs=10",
    "train.save_every=400",
)
LEARNED = (
    "data.train=3000",
    "data.val=100",
    "data.test=504",
    "model.width=0.125",
    "train.epochs=5",
    "train.precision=fp32",
    "train.save_every=400",
    "judge.items=200",
    "judge.fgsm=0",
    "judge.pgd=0",
)
OWN = (*SHORT, "supervise.loss=kl", "surrogate.probes=24")
HARD = (*SHORT, "model.select=top", "model.cells=16")
GROUNDED = (
    "data.train=3000",
    "data.val=100",
    "data.test=300",
    "data.expressions=300",
    "data.questions=300",
    "model.features=64",
    "train.epochs=4",
    "train.batch=32",
    "train.save_every=400",
    "after.epochs=1",
)
ALIGNED = (
    "data.train=1000",
    "data.val=60",
    "data.test=100",
    "model.width=0.125",
    "model.layers=2",
    "train.epochs=4",
    "train.batch=32",
    "train.rate=2e-3",
    "train.save_every=400",
    "critic.epochs=1",
    "critic.steps=12",
    "critic.batch=32",
)
ROWS = (
    Row("question-only", scenes.scenes_question, SHORT),
    Row("no-attention", scenes.scenes_none, SHORT),
    Row("soft-attention", scenes.scenes_soft, SHORT),
    Row("truth-supervised", scenes.scenes_truth, SHORT),
    Row("learned-attention", ltpa.ltpa_scenes, LEARNED),
    Row("hard-attention", han.han_scenes, HARD),
    Row("self-supervised", ssa.ssa_scenes, OWN),
    Row("grounded", vgp.vgp_scenes, GROUNDED),
    Row("aligned-captions", a2.a2_scenes, ALIGNED),
)
FIRST = tuple(row.label for row in ROWS[:4])

Say = Callable[[str], None]


def pick(labels: Sequence[str]) -> tuple[Row, ...]:
    """The rows called so, in our order: the first four when none is named, every one for `all`."""
    known = [row.label for row in ROWS]
    for label in labels:
        if label not in (*known, "all"):
            near = settings.offer(label, known)
            raise BadInput(f"the demo has no row {label[:60]!r}; {near}.")
    wanted = known if "all" in labels else labels or FIRST
    return tuple(row for row in ROWS if row.label in wanted)


def recipe_of(row: Row) -> Recipe:
    """The recipe of a row with its short plan."""
    return settings.apply(row.recipe(), row.changes)


def run_demo(
    out: Path,
    rows: Sequence[Row],
    *,
    seed: int = 0,
    device: str = "auto",
    data_root: Path | None = None,
    say: Say = print,
) -> list[dict[str, Any]]:
    """Run these rows under `out`, a folder each, and write one page about all of them.

    A row that was begun goes on where it stopped. One that was run with other settings or another
    seed is refused by name, before anything is started.
    """
    from overt.show import page

    places = [out / row.label for row in rows]
    waiting: dict[str, Order] = {}
    for row, place in zip(rows, places, strict=True):
        begun = folder.begun(place)
        held = folder.claim(place, recipe_of(row), seed, resume=begun)
        if held is not None and held.done:
            files.verify(place)
            say(f"{row.label}: at hand in {place}")
        else:
            options = ["--seed", str(seed), "--device", device, *(["--resume"] if begun else [])]
            options += ["--data", str(data_root)] if data_root is not None else []
            waiting[row.label] = Order.of(
                recipe_of(row),
                place,
                data_root,
                seed=seed,
                device=device,
                resume=begun,
                command=command(row, place, options),
                title=row.label,
            )
    run_orders(dict(reversed(waiting.items())), say)  # the slowest are the last: begin with them
    page.report(out / "report.html", places)
    return [dict(files.read_json(place / folder.RESULTS)) for place in places]


def command(row: Row, place: Path, options: Sequence[str]) -> list[str]:
    """The command line that would run one row by itself."""
    changes = [word for change in row.changes for word in ("--set", change)]
    named = ["--out", str(place), "--title", row.label]
    return ["overt", "run", recipe_of(row).name, *named, *options, *changes]


def run_orders(waiting: Mapping[str, Order], say: Say) -> None:
    """Run rows by their labels, as many at once as there are cores, and pass on what they say.

    The first that ends badly is raised once the others have come to their end. Ctrl-C and SIGTERM
    reach all of them, each saves what it has, and none that waits is started any more.
    """
    labels = list(waiting)

    def says(index: int, line: str) -> None:
        say(f"{labels[index]}: {line}")

    try:
        with ending():
            ends = sorted(side_by_side(list(waiting.values()), checks.cores(), says=says))
    except (KeyboardInterrupt, Stopped) as stopped:
        raise Stopped(
            "the demo was stopped and saved what it had; the same command goes on from there.",
            stopped.code - 128 if isinstance(stopped, Stopped) else signal.SIGINT,
        ) from None
    for number, code, why in ends:
        if code:
            raise (BadInput if code == 2 else Failed)(f"{labels[number]}: {why}")
