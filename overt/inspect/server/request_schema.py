"""Request schema of the server, with limits on every field."""

import base64
import binascii
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from overt.errors import UserError
from overt.inspect.inputs import ModelInput
from overt.inspect.panels import ALL_LAYER_MAPS, MAPS, ViewOptions

MAX_IMAGE_BYTES = 8 * 2**20  # of an image
MAX_PIXELS = 24_000_000
MAX_CHARACTERS = 20_000  # of text
# Base64 has four characters for three bytes.
MAX_BODY = 4 * MAX_IMAGE_BYTES // 3 + 8 * MAX_CHARACTERS + 65_536  # of a request, as JSON
MAX_WEIGHTS = 1_500_000  # per panel of a response
MAX_FLOPS = 4e12  # of one forward pass: a minute on a few cores
MAX_REMOVED = 1_024
MAX_BOXES = 100  # candidate regions

Share = Annotated[float, Field(ge=0, le=1)]
CharIndex = Annotated[int, Field(ge=0, le=MAX_CHARACTERS)]


class InspectRequest(BaseModel):
    """An image, a text or both for one model, the map, and the parts to remove.

    `picture` is an image file in base64, with or without the prefix of a data URI. `without` are
    its removed boxes as fractions of its sides, `unsaid` the removed character ranges of `text`.
    `boxes`, also fractions, are the candidate regions of a network over boxes. `deletion` compares
    the maps of written words with random cells.
    """

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=300)]
    text: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    picture: Annotated[str, Field(max_length=4 * MAX_IMAGE_BYTES // 3 + 100)] | None = None
    map: str = "attention"
    layer: Annotated[str, Field(max_length=300)] | None = None
    head: Annotated[int, Field(ge=-4096, le=4096)] | None = None
    query: Annotated[str, Field(max_length=300)] | None = None
    boxes: Annotated[list[tuple[Share, Share, Share, Share]], Field(max_length=MAX_BOXES)] = []
    without: Annotated[list[tuple[Share, Share, Share, Share]], Field(max_length=MAX_REMOVED)] = []
    deletion: bool = False
    unsaid: Annotated[list[tuple[CharIndex, CharIndex]], Field(max_length=MAX_REMOVED)] = []

    @field_validator("map")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in MAPS:
            raise ValueError(f"unknown map '{value[:40]}': choose one of {', '.join(MAPS)}")
        return value

    def view_options(self) -> ViewOptions:
        """Return the view options."""
        if self.map in ALL_LAYER_MAPS and (self.layer is not None or self.head is not None):
            raise UserError(
                f"the map '{self.map}' combines all layers and heads: leave out layer and head."
            )
        choice = self.layer, self.head, self.query or None, self.map
        return ViewOptions(*choice, MAX_WEIGHTS, MAX_FLOPS, self.deletion)

    def model_input(self) -> ModelInput:
        """Decode the model input."""
        from overt.data.images import open_image

        photo = None
        if self.picture is not None:
            photo = open_image(decode_image(self.picture), MAX_PIXELS)[0]
        text = self.text if self.text and self.text.strip() else None
        if text is None and photo is None:
            raise UserError("no input: give an image, a text, or both.")
        every = (*self.boxes, *self.without)
        if any(left >= right or top >= bottom for left, top, right, bottom in every):
            raise UserError("a box needs left < right and top < bottom.")
        return ModelInput(text, photo, tuple(self.without), tuple(self.unsaid), tuple(self.boxes))


def decode_image(picture: str) -> bytes:
    """Decode a base64 image."""
    head, comma, body = picture.partition(",")
    try:
        # Without `validate`, characters outside of the alphabet are skipped.
        data = base64.b64decode(
            body if comma and head.startswith("data:") else picture, validate=True
        )
    except (binascii.Error, ValueError) as error:
        raise UserError("the image is not valid base64.") from error
    if len(data) > MAX_IMAGE_BYTES:
        raise UserError(
            f"the image has {len(data) / 2**20:.1f} MiB, at most {MAX_IMAGE_BYTES // 2**20} MiB "
            "are allowed: make it smaller."
        )
    return data
