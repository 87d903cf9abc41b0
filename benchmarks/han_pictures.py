"""Draw which cells networks of hard attention keep of a picture, question by question.

    python benchmarks/han_pictures.py scenes han=runs/han/model all=runs/all/model --out kept.png

A column a network, a row a question: kept cells stand out, the deciding things are outlined.
`--picture` says which test picture, `--asked` which of its questions.
"""

import argparse
from pathlib import Path

import torch

from overt import show
from overt.data import Scenes, SortOfClevr
from overt.data.batch import Batch
from overt.models import HAN
from overt.recipes.evaluation import drawn

EACH = 20  # questions of a picture of Sort-of-CLEVR


def asked_about(data: str, picture: int, grid: tuple[int, int]) -> tuple[Batch, tuple[str, ...]]:
    """All questions about one test picture, and the names of answers."""
    if data == "scenes":
        world = Scenes("test", 1, picture + 1, size=64, cells=grid)
        return world.batch([picture]), tuple(world.answers)
    drawn_ones = SortOfClevr("test", count=picture + 1, cells=grid)
    rows = range(EACH * picture, EACH * (picture + 1))
    return drawn_ones.batch(rows), tuple(drawn_ones.classes)


def grid_of(model: HAN, data: str) -> tuple[int, int]:
    """The rows and columns of a network's cells."""
    with torch.no_grad():
        kept = model(asked_about(data, 0, (5, 5) if data == "sortclevr" else (8, 8))[0])
    rows, columns = kept.looking_at("image").keys.spans[0].shape
    return rows, columns


def answered(model: HAN, data: str, picture: int, asked: list[int]) -> list[show.Sample]:
    """The chosen questions of a picture as a network answers them."""
    batch, names = asked_about(data, picture, grid_of(model, data))
    with torch.no_grad():
        output = model(batch)
    assert batch.labels is not None
    sure = output.prediction.softmax(dim=-1).max(dim=-1)
    return [
        show.Sample(
            id=batch.ids[row],
            prediction=names[int(sure.indices[row])],
            truth=names[int(batch.labels[row])],
            confidence=float(sure.values[row]),
            **drawn(batch, output, row),
        )
        for row in asked
    ]


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", choices=("scenes", "sortclevr"))
    parser.add_argument("networks", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--picture", type=int, default=0)
    parser.add_argument("--asked", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    columns = {}
    for one in given.networks:
        name, _, folder = one.partition("=")
        model = HAN.from_pretrained(Path(folder)).eval()
        columns[name] = answered(model, given.data, given.picture, given.asked)
    show.picture(columns, given.out, draw=show.spotlight)


if __name__ == "__main__":
    main()
