"""What a network of Sort-of-CLEVR has learned by the time it was stopped, or ended.

    python benchmarks/han_stopped.py FOLDER [--cells 25 12] [--blind] [--pictures 200] [--out FILE]

FOLDER is a saved network. Its accuracy on test pictures is told by kind of question, with what its
kept cells cover of the deciding things, and how many different cells a picture has kept over its
questions: as many as each of them keeps, where the choice does not listen. With `--cells` it keeps
so many cells of the largest norm, whatever it was trained with. With `--blind` it is asked once
more with cells that are chosen by the image alone: what it loses is what listening was worth.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from overt.data import SortOfClevr
from overt.data.shapes import KINDS
from overt.models import HAN
from overt.models.hard.attention import unasked
from overt.models.hard.selection import Selection, keep_top

PORTION = 10  # pictures at a time


def on_its_grid(model: HAN, pictures: int) -> SortOfClevr:
    """Test pictures whose deciding things are told on the grid of this network's cells."""
    with torch.no_grad():
        cells = model(SortOfClevr("test", count=1).batch([0])).looking_at("image").keys
    rows, columns = cells.spans[0].shape
    return SortOfClevr("test", count=pictures, cells=(rows, columns))


def looked_at(model: HAN, data: SortOfClevr, pictures: int) -> dict[str, Any]:
    """Accuracy and cover by kind of question, and cells kept in a picture."""
    each = len(data) // pictures
    right, covered, kept = [], [], []
    for start in range(0, pictures, PORTION):
        stop = min(start + PORTION, pictures)
        batch = data.batch(range(start * each, stop * each))
        assert batch.labels is not None and batch.target is not None
        with torch.no_grad():
            output = model(batch)
        cells, truth = output.looking_at("image").weights, batch.target.weights
        right.append((output.prediction.argmax(dim=-1) == batch.labels).float())
        covered.append(((cells * truth).sum(dim=-1) / truth.sum(dim=-1)).flatten())
        kept.append(cells.flatten(1).unflatten(0, (stop - start, each)))
    kinds = torch.from_numpy(data.questions.kinds[:pictures].reshape(-1))
    asked = {name: kinds == number for number, name in enumerate(KINDS) if (kinds == number).any()}
    asked |= {"one thing": kinds < 3, "relational": kinds >= 3}
    cells = torch.cat(kept)
    return {
        "questions": len(kinds),
        "accuracy": {name: float(torch.cat(right)[of].mean()) for name, of in asked.items()},
        "covered": {name: float(torch.cat(covered)[of].mean()) for name, of in asked.items()},
        "cells_of_a_question": float(cells.sum(dim=-1).mean()),
        "cells_of_a_picture": float(cells.amax(dim=1).sum(dim=-1).mean()),
    }


def main() -> None:
    """Look, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", type=int, nargs="+", default=[])
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    data = on_its_grid(HAN.from_pretrained(given.folder).eval(), given.pictures)
    found: dict[str, Any] = {}
    for count in given.cells or [None]:
        for blind in (False, True) if given.blind else (False,):
            model = HAN.from_pretrained(given.folder).eval()
            name = "as it is" if count is None else f"{count} cells"
            if count is not None:
                model.attend.selection = Selection(partial(keep_top, count=count))
            if blind:
                model.attend.score, name = unasked, f"{name}, blind"
            found[name] = looked_at(model, data, given.pictures)
            print(name, json.dumps(found[name], indent=1))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
