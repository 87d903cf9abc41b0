"""Collate an image, a text and boxes into the batch of a network of overt."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from overt.errors import CorruptFileError, UserError, rust_panic_as_corrupt_file
from overt.experiments.inference_spec import FILE, BackboneSpec, Canvas, ImageInput, InferenceSpec
from overt.inspect.inputs import Box, ModelInput
from overt.inspect.loaded_model import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

    from overt.attention import Layout
    from overt.data.batch import Batch
    from overt.data.vocabulary import Tokenizer
    from overt.geometry import RegionGeometry
    from overt.nn.image_backbones.frozen import FrozenBackbone

TILES_PER_SIDE = 4  # tiles per side, if no boxes are given
CAPTION_SEPARATORS = (" / ", "\n")  # between two captions; galleries use the first
PAIRED_NETWORK = "VLBert"  # takes one or two captions


def make_batch(loaded: LoadedModel, model_input: ModelInput) -> "Batch":
    """Return the input as a batch of one sample.

    Raises:
        UserError: if the network cannot take the input.
    """
    import torch

    from overt.data.batch import Batch

    known = loaded.spec
    assert known is not None
    _check(loaded.name, known, model_input)
    parts: dict[str, Any] = {}
    if known.pixels is not None:
        parts |= _image_inputs(known, model_input)
    if known.takes_text and model_input.text is not None:
        parts |= _text_inputs(known, model_input.text)
    # A model without parameters runs on the CPU.
    device = next(loaded.model.parameters(), torch.zeros(())).device
    return Batch(("asked",), **parts).to(device)


def _check(name: str, known: InferenceSpec, model_input: ModelInput) -> None:
    wants = (
        (
            "an image",
            known.pixels is not None,
            known.pixels is not None,
            model_input.photo is not None,
        ),
        (
            "a text",
            known.takes_text,
            known.takes_text and not known.generates_text,
            model_input.text is not None,
        ),
    )
    for what, takes, needs, there in wants:
        if needs and not there:
            raise UserError(f"{name} needs {what}: add it.")
        if there and not takes:
            raise UserError(f"{name} does not take {what}: leave it out.")
    if model_input.boxes and not known.uses_boxes:
        raise UserError(f"{name} does not take boxes: leave them out.")


# --- images


def _image_inputs(known: InferenceSpec, model_input: ModelInput) -> dict[str, Any]:
    """Return the image inputs of the network: pixels, features of a frozen CNN, or boxes."""
    import torch

    from overt.data.images import crop, prepare_image, stretch

    assert known.pixels is not None
    how = stretch if known.canvas is Canvas.STRETCH else crop
    pixels, geometry = prepare_image(model_input.photo, known.pixels, how)
    images = pixels[None]
    found: dict[str, Any] = {"geometry": geometry}
    if known.uses_boxes:
        height, width = model_input.photo.shape[:2]
        # From fractions to pixels of the original photo, as in datasets.
        shares = torch.tensor(model_input.boxes or tuple(tile_boxes(TILES_PER_SIDE)))
        boxes = (shares * torch.tensor([width, height, width, height]))[None].float()
        found |= {"boxes": boxes, "region_mask": torch.ones(boxes.shape[:2], dtype=torch.bool)}
    match known.image_input:
        case ImageInput.PIXELS | ImageInput.BOXES:
            return {**found, "images": images}
        case ImageInput.CELLS:
            return {**found, "features": _backbone(known).cells(images).float()}
        case ImageInput.REGIONS:
            return {
                **found,
                "features": _region_features(_backbone(known), images, geometry, found["boxes"]),
            }
        case ImageInput.CROPS:
            from overt.nn.vlbert.regions import normalize_boxes
            from overt.papers.a2.data import crop_features

            # `shape[:1:-1]` is (width, height): boxes in pixels of the resized image.
            size = torch.tensor([*images.shape[:1:-1]] * 2)
            return {
                **found,
                "features": crop_features(images, normalize_boxes(found["boxes"], geometry) * size),
            }


def tile_boxes(side: int) -> list[Box]:
    """Cut an image into `side` x `side` boxes, as fractions of its width and height.

    >>> tile_boxes(2)[1]
    (0.5, 0.0, 1.0, 0.5)
    """
    steps = [number / side for number in range(side + 1)]
    return [
        (left, top, right, bottom)
        for top, bottom in pairwise(steps)
        for left, right in pairwise(steps)
    ]


def _region_features(
    net: "FrozenBackbone", images: "Tensor", geometry: Any, boxes: "Tensor"
) -> "Tensor":
    """Average the cells of a frozen CNN under each box."""
    from overt.nn.vlbert.regions import pool_boxes

    cells = net.cells(images).float()
    side = round(cells.shape[1] ** 0.5)
    # From (1, cells, features) to (1, features, rows, columns).
    return pool_boxes(cells.mT.unflatten(2, (side, side)), boxes, geometry)


def _backbone(known: InferenceSpec) -> "FrozenBackbone":
    """Return the frozen CNN that the network was trained with; raise if its weights differ."""
    assert known.backbone is not None
    found = _load_backbone(known.backbone)
    if found.weights != known.backbone.weights:
        raise UserError(
            f"This network was trained on features of {known.backbone.name} whose weights differ "
            "from the installed ones."
        )
    return found


# Backbones are large: keep the last two.
@lru_cache(maxsize=2)
def _load_backbone(backbone: BackboneSpec) -> "FrozenBackbone":
    from overt.papers.han.features import frozen_backbone

    return frozen_backbone(backbone.name)


# --- texts


def text_reader(known: InferenceSpec) -> "Tokenizer":
    """Return the network's vocabulary, or the tokenizer of its pretrained model."""
    import json

    from overt.data.vocabulary import HubTokenizer, Vocabulary

    if known.words is not None:
        return Vocabulary(known.words)
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        with rust_panic_as_corrupt_file("the tokenizers library failed"):
            made = Tokenizer.from_str(json.dumps(known.tokenizer))
    except Exception as error:  # the library raises plain Exception
        message = " ".join(str(error).split())[:200]
        raise CorruptFileError(f"the tokenizer in {FILE} cannot be used ({message}).") from error
    return HubTokenizer(PreTrainedTokenizerFast(tokenizer_object=made))


def _text_inputs(known: InferenceSpec, text: str) -> dict[str, Any]:
    from overt.data.vocabulary import pad
    from overt.geometry import TextGeometry

    reader = text_reader(known)
    if known.network == PAIRED_NETWORK:
        ids, spans = _caption_tokens(reader, text)
    else:
        ids, spans = reader.read(text)
    if not any(end > start for start, end in spans):
        raise UserError("The text has no words.")
    tokens, present, ranges = pad([ids], [spans], reader.padding)
    return {"tokens": tokens, "token_mask": present, "text": TextGeometry((text,), ranges)}


def _caption_tokens(reader: "Tokenizer", text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokenize one or two captions with begin and end tokens; spans refer to the whole text."""
    from overt.data.vocabulary import ABSENT, BEGIN, END, Vocabulary

    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for number, (start, caption) in enumerate(split_captions(text)):
        found, where = reader.read(caption)
        if isinstance(reader, Vocabulary):  # other tokenizers add their own special tokens
            found, where = [BEGIN, *found, END], [ABSENT, *where, ABSENT]
        skip = 1 if number else 0  # only one begin token
        ids += found[skip:]
        moved = [(a + start, b + start) if a >= 0 else ABSENT for a, b in where]
        spans += moved[skip:]
    return ids, spans


def split_captions(text: str) -> Sequence[tuple[int, str]]:
    """Split a text into one or two captions, separated by a line break or ' / ', with offsets.

    >>> split_captions("a dog / a cat")
    [(0, 'a dog'), (8, 'a cat')]
    """
    # The first separator divides the text.
    cuts = sorted(
        (text.find(sign), len(sign)) for sign in CAPTION_SEPARATORS if sign in text.strip()
    )
    if not cuts:
        return [(0, text)]
    at, wide = cuts[0]
    first, second = text[:at], text[at + wide :]
    if any(sign in second.strip() for sign in CAPTION_SEPARATORS):
        raise UserError("Expected one or two captions, one per line, got more.")
    if not first.strip() or not second.strip():
        return [(0, text)]
    return [(0, first), (at + wide, second)]


# --- removed parts


def keep_masks(where: Mapping[str, "Layout"], model_input: ModelInput) -> dict[str, "Tensor"]:
    """Return masks of the cells, boxes and words that are kept: 0 if at least half was removed."""
    import torch

    from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry

    found = {}
    for name, layout in where.items():
        span = layout.find(name)
        if isinstance(span.geometry, PixelGeometry) and model_input.removed_boxes:
            # From (height, width) to (x, y), as in boxes.
            size = span.geometry.size[0].flip(0).double()
            boxes = torch.tensor(
                model_input.removed_boxes, dtype=torch.float64
            ) * size.cpu().repeat(2)
            covered = span.geometry.cover_any_boxes(
                boxes[None].float().to(span.geometry.size.device), span.shape
            )
            found[name] = (covered.sum(dim=1) < 0.5).float()
        if isinstance(span.geometry, RegionGeometry) and model_input.removed_boxes:
            found[name] = (_removed_share(span.geometry, model_input) < 0.5).float()
        if isinstance(span.geometry, TextGeometry) and model_input.removed_ranges:
            found[name] = (span.geometry.cover([model_input.removed_ranges]) < 0.5).float()
    return found


def _removed_share(where: "RegionGeometry", model_input: ModelInput) -> "Tensor":
    """Return the fraction of each box that is removed, assuming non-overlapping removed boxes."""
    import torch

    height, width = model_input.photo.shape[:2]
    size = torch.tensor([width, height] * 2, dtype=torch.float64)
    gone = torch.tensor(model_input.removed_boxes, dtype=torch.float64) * size
    ours = where.boxes.cpu().double()[:, :, None]
    low = torch.maximum(ours[..., :2], gone[:, :2])
    high = torch.minimum(ours[..., 2:], gone[:, 2:])
    both = (high - low).clamp_min(0).prod(dim=-1).sum(dim=-1)
    area = (ours[..., 2:] - ours[..., :2]).clamp_min(0).prod(dim=-1)[..., 0]
    return (both / area.clamp_min(1e-12)).to(where.boxes.device)
