"""Responses of the server: answers, panels to draw, and equivalent Python code."""

import math
import time
from typing import Any

from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import ModelView, view_model
from overt.inspect.server.request_schema import MAX_WEIGHTS, InspectRequest


def build_response(loaded: LoadedModel, folder: str, request: InspectRequest) -> dict[str, Any]:
    """Run the model and return its answers, panels and code as JSON values."""
    from overt.viz.browse_page import EmbeddedPhotos, page_data

    began = time.perf_counter()
    viewed = view_model(loaded, request.model_input(), request.view_options())
    photos = EmbeddedPhotos()
    drawn = page_data(viewed.panels, viewed.choices, photos, MAX_WEIGHTS)
    return {
        "model": request.model,
        "answers": [
            {"name": name, "chance": round(chance, 6) if math.isfinite(chance) else None}
            for name, chance in viewed.answers
        ],
        "notes": list(viewed.notes),
        "view": {
            **drawn,
            "photos": photos.addresses,
            "removed": {
                "without": request.without,
                "unsaid": request.unsaid,
                "origin": viewed.origin,
            },
        },
        "code": python_code(folder, request),
        "seconds": round(time.perf_counter() - began, 3),
    }


def view_png(loaded: LoadedModel, request: InspectRequest) -> bytes:
    """Return the view as a PNG."""
    from overt.errors import UserError
    from overt.viz import attention_figure as drawing

    viewed: ModelView = view_model(loaded, request.model_input(), request.view_options())
    if not viewed.panels:
        raise UserError(f"{loaded.name} has no attention to draw.")
    return drawing.panels_png(viewed.panels, viewed.choices)


def python_code(folder: str, request: InspectRequest) -> str:
    """Return Python code that writes the same view; photo.png is the input image."""
    given = {
        "text": request.text or None,
        "photo": None if request.picture is None else _Code('look.load_photo("photo.png")'),
        "removed_boxes": tuple(request.without) or None,
        "removed_ranges": tuple(request.unsaid) or None,
        "boxes": tuple(request.boxes) or None,
    }
    options = {
        "layer": request.layer,
        "head": request.head,
        "query": request.query or None,
        "method": request.map if request.map != "attention" else None,
        "deletion": request.deletion or None,
    }
    return "\n".join(
        (
            "from overt.inspect import look",
            f"model = look.load_model(look.locate_model({folder!r}))",
            f"inputs = look.ModelInput({_arguments(given)})",
            f"view = look.view_model(model, inputs, look.ViewOptions({_arguments(options)}))",
            'look.write_view("view.html", view)',
        )
    )


class _Code(str):
    """Code with itself as its repr."""

    def __repr__(self) -> str:
        return str(self)


def _arguments(values: dict[str, Any]) -> str:
    """Format keyword arguments, without those that are None."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value is not None)
