"""The demo: the same questions answered with and without attention, in minutes on two cores.

Each row is a recipe with a short plan. Finished rows are kept and used again, so asking for one
more row costs no more than that row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overt.errors import BadInput
from overt.recipes import folder, scenes, settings
from overt.recipes.comparison import Row
from overt.recipes.recipe import Recipe

SHORT = (
    "data.train=4000",
    "data.val=100",
    "data.test=500",
    "train.epochs=8",
    "train.save_every=400",
)
ROWS = (
    Row("question-only", scenes.scenes_question, SHORT),
    Row("no-attention", scenes.scenes_none, SHORT),
    Row("soft-attention", scenes.scenes_soft, SHORT),
    Row("truth-supervised", scenes.scenes_truth, SHORT),
)
FIRST = tuple(row.label for row in ROWS)


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
    command: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Run these rows under `out`, a folder each, and write one page about all of them.

    A row that was begun goes on where it stopped. One that was run with other settings or another
    seed is refused by name.
    """
    from overt.recipes import running
    from overt.show import page

    places = [out / row.label for row in rows]
    results = []
    for row, place in zip(rows, places, strict=True):
        held = folder.look(place)
        say(f"{row.label}: {'at hand in' if held is not None and held.done else 'into'} {place}")
        results.append(
            running.run(
                recipe_of(row),
                place,
                seed=seed,
                device=device,
                data_root=data_root,
                resume=held is not None,
                command=command,
                title=row.label,
            )
        )
    page.report(out / "report.html", places)
    return results
