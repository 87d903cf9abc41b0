"""Draw which cells networks of hard attention keep in an image, one question per row.

    python results/han_pictures.py scenes han=runs/han/model all=runs/all/model --out kept.png

One column per network, one row per question: kept cells are highlighted, target objects outlined.
`--picture` selects the test image, `--asked` its questions.
"""

import argparse
from pathlib import Path

import torch

from overt import viz
from overt.data import Scenes, SortOfClevr
from overt.data.batch import Batch
from overt.experiments.evaluate import gallery_fields
from overt.papers.han.networks import HAN

EACH = 20  # questions of a picture of Sort-of-CLEVR


def questions_about(
    data: str, picture: int, grid: tuple[int, int]
) -> tuple[Batch, tuple[str, ...]]:
    """Return all questions about one test image, and the names of the answers."""
    if data == "scenes":
        world = Scenes("test", 1, picture + 1, size=64, cells=grid)
        return world.batch([picture]), tuple(world.answers)
    drawn_ones = SortOfClevr("test", count=picture + 1, cells=grid)
    rows = range(EACH * picture, EACH * (picture + 1))
    return drawn_ones.batch(rows), tuple(drawn_ones.classes)


def grid_of(model: HAN, data: str) -> tuple[int, int]:
    """Return the rows and columns of the cells of a network."""
    with torch.no_grad():
        kept = model(questions_about(data, 0, (5, 5) if data == "sortclevr" else (8, 8))[0])
    rows, columns = kept.attention_to("image").keys.spans[0].shape
    return rows, columns


def predict_answers(
    model: HAN, data: str, picture: int, asked: list[int]
) -> list[viz.GallerySample]:
    """Return the answers of a network to the selected questions of an image."""
    batch, names = questions_about(data, picture, grid_of(model, data))
    with torch.no_grad():
        output = model(batch)
    assert batch.labels is not None
    sure = output.prediction.softmax(dim=-1).max(dim=-1)
    return [
        viz.GallerySample(
            id=batch.ids[row],
            prediction=names[int(sure.indices[row])],
            truth=names[int(batch.labels[row])],
            confidence=float(sure.values[row]),
            **gallery_fields(batch, output, row),
        )
        for row in asked
    ]


def main() -> None:
    """Draw the sheet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", choices=("scenes", "sortclevr"))
    parser.add_argument("networks", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--picture", type=int, default=0)
    parser.add_argument("--asked", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    columns = {}
    for one in args.networks:
        name, _, folder = one.partition("=")
        model = HAN.from_pretrained(Path(folder)).eval()
        columns[name] = predict_answers(model, args.data, args.picture, args.asked)
    viz.save_sample_sheet(columns, args.out, draw=viz.spotlight)


if __name__ == "__main__":
    main()
