"""From a question to a reply: answers with their chances, panels to draw, the code behind them."""

import math
import time
from typing import Any

from overt.recipes.looking import Viewed, view
from overt.recipes.opening import Subject
from overt.serve.questions import MOST_WEIGHTS, Question


def reply(subject: Subject, folder: str, question: Question) -> dict[str, Any]:
    """Everything that a page shows of one model's answer, as plain values."""
    from overt.show.browse import Photos, told

    began = time.perf_counter()
    viewed = view(subject, question.given(), question.wish())
    photos = Photos()
    drawn = told(viewed.panels, viewed.choices, photos, MOST_WEIGHTS)
    return {
        "model": question.model,
        "answers": [
            {"name": name, "chance": None if math.isnan(chance) else round(chance, 6)}
            for name, chance in viewed.answers
        ],
        "notes": list(viewed.notes),
        "view": {
            **drawn,
            "photos": photos.addresses,
            "removed": {
                "without": question.without,
                "unsaid": question.unsaid,
                "origin": viewed.origin,
            },
        },
        "code": code(folder, question),
        "seconds": round(time.perf_counter() - began, 3),
    }


def picture(subject: Subject, question: Question) -> bytes:
    """The same view as a PNG."""
    from overt.errors import BadInput
    from overt.show import look as drawing

    viewed: Viewed = view(subject, question.given(), question.wish())
    if not viewed.panels:
        raise BadInput(f"{subject.name} attends to nothing, so there is no map to draw.")
    return drawing.png(viewed.panels, viewed.choices)


def code(folder: str, question: Question) -> str:
    """Five lines of Python that show the same in a file; photo.png is the picture given."""
    given = {
        "text": question.text or None,
        "photo": None if question.picture is None else _Plain('looking.photo("photo.png")'),
        "without": tuple(question.without) or None,
        "unsaid": tuple(question.unsaid) or None,
        "boxes": tuple(question.boxes) or None,
    }
    wish = {
        "layer": question.layer,
        "head": question.head,
        "query": question.query or None,
        "way": question.map if question.map != "raw" else None,
    }
    return "\n".join(
        (
            "from overt.recipes import looking",
            f"model = looking.open_model(looking.locate({folder!r}))",
            f"given = looking.Given({_said(given)})",
            f"seen = looking.view(model, given, looking.Wish({_said(wish)}))",
            'looking.write("view.html", seen)',
        )
    )


class _Plain(str):
    """A piece of code that stands for itself."""

    def __repr__(self) -> str:
        return str(self)


def _said(values: dict[str, Any]) -> str:
    """Named arguments as they are written, without those that are not given."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)
