"""Inference specs: the inputs that a saved model takes and the names of its answers.

A run writes `spoken.json` beside the weights of its model. With it, `overt look` and `overt serve`
can run the model on any image and text, and show its answer in words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import io
from overt.errors import CorruptFileError, UserError

if TYPE_CHECKING:
    from torch import nn

    from overt.data.batch import Batch
    from overt.data.vocabulary import Tokenizer

# Saved models have this file, so its name, its format and its keys stay.
FILE, FORMAT = "spoken.json", "overt spoken 1"
_KEYS = {"image_input": "sees"}  # keys of the file that differ from the names of the fields
MAX_SIDE = 4096  # maximum side of an input image, in pixels
MAX_CAPTION_TOKENS = 100_000  # maximum length of a caption


class ImageInput(StrEnum):
    """What a model receives of an image."""

    PIXELS = "pixels"  # the whole image
    CELLS = "cells"  # grid features of a frozen CNN
    BOXES = "boxes"  # the whole image and candidate boxes
    REGIONS = "regions"  # box features of a frozen CNN
    CROPS = "crops"  # small crops of boxes


class Canvas(StrEnum):
    """How an image is brought to the input size of a model."""

    CROP = "crop"
    STRETCH = "stretch"


@dataclass(frozen=True)
class BackboneSpec:
    """A frozen CNN that computes input features: its name in recipes, a hash of its weights."""

    name: str
    weights: str


@dataclass(frozen=True)
class InferenceSpec:
    """The inputs and outputs of a saved model.

    `network` is its class and `answers` are the names of its classes. `words` is the vocabulary;
    models with a pretrained tokenizer have `tokenizer` instead, in the format of the tokenizers
    library. `pixels` (height, width) is None for models without an image. `longest` is the maximum
    number of tokens of a caption. The file has `image_input` under the key `sees`.

    Args:
        network: The class of the model.
        answers: The names of its classes.
        words: Its vocabulary.
        pixels: Rows and columns of its images; None for models without an image.
        image_input: What it takes of an image.
        canvas: How a photo is resized.
        backbone: The pretrained backbone.
        tokenizer: Its pretrained tokenizer.
        longest: The largest number of tokens of a caption.

    Example:
        >>> spec = InferenceSpec("VQA", ("red", "blue"), words=("what", "colour"), pixels=(64, 64))
        >>> spec.takes_text, spec.generates_text
        (True, False)
    """

    network: str
    answers: tuple[str, ...]
    words: tuple[str, ...] | None = None
    pixels: tuple[int, int] | None = None
    image_input: ImageInput = ImageInput.PIXELS
    canvas: Canvas = Canvas.CROP
    backbone: BackboneSpec | None = None
    tokenizer: Mapping[str, Any] | None = None
    longest: int | None = None

    @property
    def takes_text(self) -> bool:
        """Whether the model takes a text."""
        return self.words is not None or self.tokenizer is not None

    @property
    def generates_text(self) -> bool:
        """Whether the model is a captioner: its text is an output, not a required input."""
        return self.longest is not None

    @property
    def uses_boxes(self) -> bool:
        """Whether the model takes boxes of the image."""
        return self.image_input in (ImageInput.BOXES, ImageInput.REGIONS, ImageInput.CROPS)


@dataclass(frozen=True)
class NotInteractive:
    """The reason why a saved model cannot be used interactively, as a clause."""

    reason: str


def make_spec(
    model: "nn.Module",
    answers: Sequence[str],
    reader: "Tokenizer | None",
    example: Callable[[], "Batch"],
    image_input: ImageInput = ImageInput.PIXELS,
    canvas: Canvas = Canvas.CROP,
    backbone: BackboneSpec | None = None,
    pixels: tuple[int, int] | None = None,
    longest: int | None = None,
) -> InferenceSpec | NotInteractive | None:
    """Describe the inputs of a saved model, for `overt look` and `overt serve`.

    `pixels` is needed where the batches have features instead of images.

    Returns:
        The spec; `NotInteractive` where the inputs cannot be given by hand; None for models that
        are not a `SavableModule`, whose folder has a format of its own.
    """
    from overt.nn.network import SavableModule

    if not isinstance(model, SavableModule):
        return None
    return describe_inputs(
        model, answers, reader, example, image_input, canvas, backbone, pixels, longest
    )


def describe_inputs(
    model: "nn.Module",
    answers: Sequence[str],
    reader: "Tokenizer | None",
    example: Callable[[], "Batch"],
    image_input: ImageInput = ImageInput.PIXELS,
    canvas: Canvas = Canvas.CROP,
    backbone: BackboneSpec | None = None,
    pixels: tuple[int, int] | None = None,
    longest: int | None = None,
) -> InferenceSpec | NotInteractive:
    """Describe the inputs of any model of batches; see `make_spec`."""
    from overt.data.vocabulary import HubTokenizer, Vocabulary

    batch = example()
    words = reader.words if isinstance(reader, Vocabulary) else None
    tokenizer = None
    if isinstance(reader, HubTokenizer):
        tokenizer = _tokenizer_json(reader)
    if batch.features is not None and image_input is ImageInput.PIXELS:
        return NotInteractive("its inputs are features of a model that overt does not have")
    if batch.tokens is not None and words is None and tokenizer is None:
        return NotInteractive("its tokenizer is unknown")
    if batch.images is not None and pixels is None:
        pixels = (int(batch.images.shape[-2]), int(batch.images.shape[-1]))
    if batch.images is None and batch.features is None:
        pixels = None
    return InferenceSpec(
        type(model).__name__,
        tuple(answers),
        words,
        pixels,
        image_input,
        canvas,
        backbone,
        tokenizer,
        longest,
    )


def _tokenizer_json(reader: Any) -> dict[str, Any]:
    """Return the contents of `tokenizer.json` of a tokenizer."""
    import json

    found: dict[str, Any] = json.loads(reader.tokenizer.backend_tokenizer.to_str())
    # A tokenizer keeps the padding and truncation of its last call: a saved one must have neither.
    return {**found, "padding": None, "truncation": None}


def spec_files(spec: InferenceSpec | NotInteractive | None) -> dict[str, dict[str, Any]]:
    """Return the JSON file to write beside the weights, by name; none where `spec` is None.

    Args:
        spec: The inputs and outputs of a model, or the reason why it has none.

    Returns:
        The values to write, by file name.

    Example:
        >>> spec = InferenceSpec("VQA", ("red", "blue"), words=("what", "colour"), pixels=(64, 64))
        >>> spec_files(spec)[FILE]["network"], spec_files(None)
        ('VQA', {})
    """
    match spec:
        case NotInteractive(reason=reason):
            return {FILE: {"format": FORMAT, "mute": reason}}
        case InferenceSpec():
            values = {_KEYS.get(n, n): v for n, v in asdict(spec).items() if v is not None}
            return {FILE: {"format": FORMAT, **values}}
    return {}


def read_values(folder: Path) -> dict[str, Any]:
    """Read the file of a model folder.

    Raises:
        CorruptFileError: The file is not in the right format.
        UserError: The model is `NotInteractive`.
    """
    path = folder / FILE
    value = io.read_json(path)
    if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
        raise CorruptFileError(f"{path} does not have the format {FORMAT!r}: run the recipe again.")
    if "mute" in value:
        raise UserError(
            f"the model in {folder} cannot be used interactively: {str(value['mute'])[:300]}; "
            "`overt report` shows the samples of its run."
        )
    return value


def read_spec(folder: Path) -> InferenceSpec:
    """Read the inference spec of a model folder; see `read_values` for errors."""
    path, value = folder / FILE, read_values(folder)
    # A model folder may come from anywhere: types are checked, and limits keep a damaged or hostile
    # file from requesting huge inputs.
    try:
        network, answers = value.pop("network"), _names(value.pop("answers"))
        words, pixels = value.pop("words", None), value.pop("pixels", None)
        backbone, tokenizer = value.pop("backbone", None), value.pop("tokenizer", None)
        longest = value.pop("longest", None)
        found = InferenceSpec(
            str(network),
            answers,
            None if words is None else _names(words),
            None if pixels is None else _size(pixels),
            ImageInput(value.pop("sees", ImageInput.PIXELS)),
            Canvas(value.pop("canvas", Canvas.CROP)),
            None
            if backbone is None
            else BackboneSpec(str(backbone["name"]), str(backbone["weights"])),
            None if tokenizer is None else _table(tokenizer),
            None if longest is None else _count(longest, MAX_CAPTION_TOKENS),
        )
        if value:
            raise ValueError(f"unknown keys: {', '.join(value)}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptFileError(f"{path} cannot be read ({error}): run the recipe again.") from error
    return found


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError("names must be a list of strings")
    return tuple(value)


def _size(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise TypeError("pixels must be [height, width]")
    return _count(value[0], MAX_SIDE), _count(value[1], MAX_SIDE)


def _count(value: Any, most: int) -> int:
    # `isinstance` would accept booleans.
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"expected a whole number from 1 to {most}, got {str(value)[:40]}")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("tokenizer must be an object")
    return value
