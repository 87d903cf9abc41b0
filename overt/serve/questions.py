"""What may be asked, and how large it may be: anything else is refused in a sentence."""

import base64
import binascii
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from overt.errors import BadInput
from overt.recipes.asking import Given
from overt.recipes.seeing import MAPS, THROUGH, Wish

MOST_BYTES = 8 * 2**20  # of a picture
MOST_PIXELS = 24_000_000
MOST_SIGNS = 20_000  # of a text
MOST_BODY = 4 * MOST_BYTES // 3 + 8 * MOST_SIGNS + 65_536  # of a whole question, as JSON
MOST_WEIGHTS = 1_500_000  # of one panel of a reply
MOST_WORK = 4e12  # floating-point operations of one pass: a minute on a few cores
MOST_REMOVED = 1_024
MOST_BOXES = 100  # that a person may draw

Share = Annotated[float, Field(ge=0, le=1)]
At = Annotated[int, Field(ge=0, le=MOST_SIGNS)]


class Question(BaseModel):
    """A picture, a text or both for one model, which map is wanted, and what is removed.

    `picture` is the file in base64, with or without the head of a data address. `without` are boxes
    of it as shares of its sides, `unsaid` ranges of characters of `text`. `boxes`, shares as well,
    are what a network that looks at boxes may choose from.
    """

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=300)]
    text: Annotated[str, Field(max_length=MOST_SIGNS)] | None = None
    picture: Annotated[str, Field(max_length=4 * MOST_BYTES // 3 + 100)] | None = None
    map: str = "raw"
    layer: Annotated[str, Field(max_length=300)] | None = None
    head: Annotated[int, Field(ge=-4096, le=4096)] | None = None
    query: Annotated[str, Field(max_length=300)] | None = None
    boxes: Annotated[list[tuple[Share, Share, Share, Share]], Field(max_length=MOST_BOXES)] = []
    without: Annotated[list[tuple[Share, Share, Share, Share]], Field(max_length=MOST_REMOVED)] = []
    unsaid: Annotated[list[tuple[At, At]], Field(max_length=MOST_REMOVED)] = []

    @field_validator("map")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in MAPS:
            raise ValueError(f"there is no map '{value[:40]}'; there are {', '.join(MAPS)}")
        return value

    def wish(self) -> Wish:
        """What of the maps is wanted."""
        if self.map in THROUGH and (self.layer is not None or self.head is not None):
            raise BadInput(f"the map '{self.map}' goes through all layers and heads; choose none.")
        wanted = self.layer, self.head, self.query or None, self.map
        return Wish(*wanted, MOST_WEIGHTS, MOST_WORK)

    def given(self) -> Given:
        """What the model is to look at, decoded."""
        from overt.data.images import open_image

        photo = None
        if self.picture is not None:
            photo = open_image(decoded(self.picture), MOST_PIXELS)[0]
        text = self.text if self.text and self.text.strip() else None
        if text is None and photo is None:
            raise BadInput("there is nothing to look at; give a picture, a text, or both.")
        if any(left >= right or top >= bottom for left, top, right, bottom in self.boxes):
            raise BadInput("a box is left, top, right and bottom, and is not empty.")
        return Given(text, photo, tuple(self.without), tuple(self.unsaid), tuple(self.boxes))


def decoded(picture: str) -> bytes:
    """The bytes of a picture that was sent as text."""
    head, comma, body = picture.partition(",")
    try:
        data = base64.b64decode(
            body if comma and head.startswith("data:") else picture, validate=True
        )
    except (binascii.Error, ValueError) as error:
        raise BadInput("the picture is not base64; send its bytes that way.") from error
    if len(data) > MOST_BYTES:
        raise BadInput(
            f"the picture has {len(data) / 2**20:.1f} MiB; more than {MOST_BYTES // 2**20} are not "
            "taken: make it smaller."
        )
    return data
