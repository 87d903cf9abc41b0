"""Evaluate a stopped or finished network of Sort-of-CLEVR or scenes.

    python results/han_stopped.py FOLDER [--cells 25 12] [--blind] [--pictures 200] [--out FILE]
    python results/han_stopped.py FOLDER --data scenes --blind

FOLDER is a saved network. Reported are its accuracy on test images by kind of question, the share
of target cells that its kept cells cover, and the number of distinct cells kept in an image over
all of its questions: as many as each question keeps if the selection ignores the question. With
`--cells` it keeps the given number of cells of the largest norm, whatever its training. With
`--blind` it is evaluated again with cells selected from the image alone: the difference is the
benefit of the question for the selection.
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
from overt.data.sort_of_clevr_world import KINDS
from overt.nn.hard_attention.attention import image_presence
from overt.nn.hard_attention.selection import Selection, keep_top
from overt.papers.han.networks import HAN

PORTION = 10  # pictures at a time


@dataclass(frozen=True)
class Questions:
    """Batches of test images, the questions per image, and the kind of each question."""

    batches: Sequence[Batch]
    each: int
    kinds: Sequence[str]


def load_questions(data: str, pictures: int, cells: tuple[int, int]) -> Questions:
    """Return the questions about the first test images, with targets on this grid."""
    starts = range(0, pictures, PORTION)
    if data == "scenes":
        world = Scenes("test", 1, pictures, size=64, cells=cells)
        batches = [world.batch(range(s, min(s + PORTION, pictures))) for s in starts]
        kinds = [kind for batch in batches for kind in batch.groups or ()]
        return Questions(batches, len(kinds) // pictures, kinds)
    drawn = SortOfClevr("test", count=pictures, cells=cells)
    each = len(drawn) // pictures
    batches = [drawn.batch(range(s * each, min(s + PORTION, pictures) * each)) for s in starts]
    return Questions(batches, each, [KINDS[kind] for kind in drawn.questions.kinds.reshape(-1)])


def grid_of(model: HAN, data: str) -> tuple[int, int]:
    """Return the rows and columns of the cells of a network."""
    with torch.no_grad():
        output = model(
            load_questions(data, 1, (5, 5) if data == "sortclevr" else (8, 8)).batches[0]
        )
    rows, columns = output.attention_to("image").keys.spans[0].shape
    return rows, columns


def evaluate(model: HAN, questions: Questions) -> dict[str, Any]:
    """Return accuracy and coverage by kind of question, and cells kept per image.

    A question without target objects, such as one about an absent object, has no coverage.
    """
    right, covered, kept = [], [], []
    for batch in questions.batches:
        assert batch.labels is not None and batch.target is not None
        with torch.no_grad():
            output = model(batch)
        cells, truth = output.attention_to("image").weights, batch.target.weights
        right.append((output.prediction.argmax(dim=-1) == batch.labels).float())
        covered.append(((cells * truth).sum(dim=-1) / truth.sum(dim=-1)).flatten())
        kept.append(cells.flatten(1).unflatten(0, (-1, questions.each)))
    cells, kinds = torch.cat(kept), list(questions.kinds)
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
    """Evaluate the network, print the results and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", type=int, nargs="+", default=[])
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--data", choices=("sortclevr", "scenes"), default="sortclevr")
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    grid = grid_of(HAN.from_pretrained(args.folder).eval(), args.data)
    questions = load_questions(args.data, args.pictures, grid)
    found: dict[str, Any] = {}
    for count in args.cells or [None]:
        for blind in (False, True) if args.blind else (False,):
            model = HAN.from_pretrained(args.folder).eval()
            name = "as it is" if count is None else f"{count} cells"
            if count is not None:
                model.attend.selection = Selection(partial(keep_top, count=count))
            if blind:
                model.attend.score, name = image_presence, f"{name}, blind"
            found[name] = evaluate(model, questions)
            print(name, json.dumps(found[name], indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
