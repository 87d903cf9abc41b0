"""What a network of Sort-of-CLEVR or scenes has learned by the time it was stopped, or ended.

    python benchmarks/han_stopped.py FOLDER [--cells 25 12] [--blind] [--pictures 200] [--out FILE]
    python benchmarks/han_stopped.py FOLDER --data scenes --blind

FOLDER is a saved network. Its accuracy on test pictures is told by kind of question, with what its
kept cells cover of the deciding things, and how many different cells a picture has kept over its
questions: as many as each of them keeps, where the choice does not listen. With `--cells` it keeps
so many cells of the largest norm, whatever it was trained with. With `--blind` it is asked once
more with cells that are chosen by the image alone: what it loses is what listening was worth.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from overt.data import Scenes, SortOfClevr
from overt.data.batch import Batch
from overt.data.shapes import KINDS
from overt.models import HAN
from overt.models.hard.attention import unasked
from overt.models.hard.selection import Selection, keep_top

PORTION = 10  # pictures at a time


@dataclass(frozen=True)
class Asked:
    """Test pictures a few at a time, how many questions each has, and the kind of every one."""

    batches: Sequence[Batch]
    each: int
    kinds: Sequence[str]


def asked_of(data: str, pictures: int, cells: tuple[int, int]) -> Asked:
    """The questions about the first test pictures, what decides them told on this grid."""
    starts = range(0, pictures, PORTION)
    if data == "scenes":
        world = Scenes("test", 1, pictures, size=64, cells=cells)
        batches = [world.batch(range(s, min(s + PORTION, pictures))) for s in starts]
        kinds = [kind for batch in batches for kind in batch.groups or ()]
        return Asked(batches, len(kinds) // pictures, kinds)
    drawn = SortOfClevr("test", count=pictures, cells=cells)
    each = len(drawn) // pictures
    batches = [drawn.batch(range(s * each, min(s + PORTION, pictures) * each)) for s in starts]
    return Asked(batches, each, [KINDS[kind] for kind in drawn.questions.kinds.reshape(-1)])


def grid_of(model: HAN, data: str) -> tuple[int, int]:
    """The rows and columns of cells that a network makes of a picture."""
    with torch.no_grad():
        output = model(asked_of(data, 1, (5, 5) if data == "sortclevr" else (8, 8)).batches[0])
    rows, columns = output.looking_at("image").keys.spans[0].shape
    return rows, columns


def looked_at(model: HAN, asked: Asked) -> dict[str, Any]:
    """Accuracy and cover by kind of question, and cells kept in a picture.

    A question that nothing in the picture decides, such as one after what is not there, has no
    cover.
    """
    right, covered, kept = [], [], []
    for batch in asked.batches:
        assert batch.labels is not None and batch.target is not None
        with torch.no_grad():
            output = model(batch)
        cells, truth = output.looking_at("image").weights, batch.target.weights
        right.append((output.prediction.argmax(dim=-1) == batch.labels).float())
        covered.append(((cells * truth).sum(dim=-1) / truth.sum(dim=-1)).flatten())
        kept.append(cells.flatten(1).unflatten(0, (-1, asked.each)))
    cells, kinds = torch.cat(kept), list(asked.kinds)
    of = {kind: torch.tensor([one == kind for one in kinds]) for kind in dict.fromkeys(kinds)}
    if set(of) <= set(KINDS):
        single = torch.tensor([one in KINDS[:3] for one in kinds])
        of |= {"one thing": single, "relational": ~single}
    return {
        "questions": len(kinds),
        "accuracy": {name: float(torch.cat(right)[rows].mean()) for name, rows in of.items()},
        "covered": {name: float(torch.cat(covered)[rows].nanmean()) for name, rows in of.items()},
        "cells_of_a_question": float(cells.sum(dim=-1).mean()),
        "cells_of_a_picture": float(cells.amax(dim=1).sum(dim=-1).mean()),
    }


def main() -> None:
    """Look, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", type=int, nargs="+", default=[])
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--data", choices=("sortclevr", "scenes"), default="sortclevr")
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    grid = grid_of(HAN.from_pretrained(given.folder).eval(), given.data)
    asked = asked_of(given.data, given.pictures, grid)
    found: dict[str, Any] = {}
    for count in given.cells or [None]:
        for blind in (False, True) if given.blind else (False,):
            model = HAN.from_pretrained(given.folder).eval()
            name = "as it is" if count is None else f"{count} cells"
            if count is not None:
                model.attend.selection = Selection(partial(keep_top, count=count))
            if blind:
                model.attend.score, name = unasked, f"{name}, blind"
            found[name] = looked_at(model, asked)
            print(name, json.dumps(found[name], indent=1))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
