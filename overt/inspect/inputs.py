"""Input of a model: an image, a text or both, preprocessed into forward arguments."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.errors import RunError, UserError, rust_panic_as_corrupt_file
from overt.inspect.loaded_model import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

MAX_NEW_TOKENS = 32  # of an encoder-decoder model
# of class names
GENERATIVE_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")

MAX_CAPTIONS = 64

Forward = Callable[[Mapping[str, Any]], Any]
Box = tuple[float, float, float, float]
# (start, end) in the displayed text, (start, end) in the input text
TextRange = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class ModelInput:
    """An image, a text or both, and the parts to remove.

    `removed_boxes` are boxes of the photo, (left, top, right, bottom) as fractions of its width and
    height. `removed_ranges` are character ranges of the text. `boxes` are the candidate regions of
    a network over boxes; by default the photo is cut into tiles. `origin` maps characters of `text`
    to those of the original text after words were masked; None is the identity. `frames` are the
    photos of a video, all of one size, in place of `photo`.

    Args:
        text: The text, if any.
        photo: The photo, as a PIL image or an array, if any.
        removed_boxes: Boxes of the photo to remove.
        removed_ranges: Ranges of characters to remove.
        boxes: Candidate regions, for a network over boxes.
        origin: Characters of `text` for those of the original text.
        frames: Photos of a video.

    Example:
        >>> ModelInput("what colour is the ball", removed_ranges=((5, 11),)).removed_ranges
        ((5, 11),)
    """

    text: str | None = None
    photo: Any = None
    removed_boxes: tuple[Box, ...] = ()
    removed_ranges: tuple[tuple[int, int], ...] = ()
    boxes: tuple[Box, ...] = ()
    origin: tuple[TextRange, ...] | None = None
    frames: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class WrittenAnswer:
    """An answer that a decoder generated: `ids` of its tokens, and their words.

    `word_of_token` is the word of each token, -1 for special tokens and whitespace.
    """

    ids: "Tensor"
    words: tuple[str, ...]
    word_of_token: "Tensor"

    @property
    def text(self) -> str:
        """The words, joined by spaces."""
        return " ".join(self.words)


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """Forward arguments, the function to call, and notes.

    `text` is the tokenized text: the input text, possibly inside a prompt, or one of its lines.
    `origin` maps its characters to the input text. `captions` are the lines of the text with their
    matching probabilities, for models that match images and text. `generated` is the text that the
    model generated and attends from. If a vision-language model wrote an answer, `inputs` are the
    prompt and all tokens of `answer` but the last, and `prompt` has the inputs without it.
    """

    inputs: Mapping[str, Any]
    call: Forward
    model_input: ModelInput
    text: str | None = None
    notes: tuple[str, ...] = ()
    origin: tuple[TextRange, ...] | None = None
    captions: tuple[tuple[str, float], ...] = ()
    generated: str | None = None
    answer: WrittenAnswer | None = None
    prompt: Mapping[str, Any] | None = None


def run_model(name: str, prepared: PreparedCall) -> Any:
    """Call the model.

    Raises:
        RunError: if the model fails on this input; one line with its error.
    """
    with model_errors(name):
        return prepared.call(prepared.inputs)


@contextmanager
def model_errors(name: str) -> Iterator[None]:
    """Turn any error of a model into a `RunError` of one line that names the model."""
    import torch

    try:
        yield
    # These say what to do, or that memory is missing, and are not errors of the model.
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        kind, line = type(error).__name__, first_line(error)
        message = f"{kind}: {line}" if line else kind
        # contextlib takes a RuntimeError with this cause for the one that Python makes of a
        # StopIteration in a generator, and raises the StopIteration again.
        cause = None if isinstance(error, StopIteration) else error
        raise RunError(f"{name} failed on this input ({message[:300]}).") from cause


def first_line(error: BaseException) -> str:
    """Return the first line of an error message without its full stop; empty if it has none."""
    return str(error).strip().partition("\n")[0].strip().rstrip(".")


def is_image_path(word: str) -> bool:
    """Return whether an input is a file or has an image suffix."""
    with suppress(OSError, ValueError):  # a long text is not a path
        if Path(word).is_file():
            return True
    return " " not in word.strip() and word.lower().endswith(IMAGE_SUFFIXES)


def read_inputs(inputs: Sequence[str]) -> ModelInput:
    """Read the photo and the text from the command line inputs; several images are a video."""
    text, photos = None, []
    for word in inputs:
        if is_image_path(word):
            photos.append(load_photo(word))
        elif not word.strip():
            raise UserError("The text is empty.")
        # Python reads invalid bytes of a command line as lone surrogates, which no tokenizer takes.
        elif any("\ud800" <= sign <= "\udfff" for sign in word):
            raise UserError("The text is not valid UTF-8.")
        else:
            text = word
    if len(photos) > 1:
        sizes = {photo.shape[:2] for photo in photos}
        if len(sizes) > 1:
            found = ", ".join(f"{width} x {height}" for height, width in sorted(sizes))
            raise UserError(f"The frames of a video need one size, got {found} pixels.")
        return ModelInput(text, frames=tuple(photos))
    return ModelInput(text, photos[0] if photos else None)


def load_photo(path: Path | str) -> Any:
    """Load the pixels of an image file."""
    from overt.data.images import open_image

    return open_image(Path(path))[0]


def cover_removed(
    loaded: LoadedModel, model_input: ModelInput
) -> tuple[ModelInput, tuple[str, ...]]:
    """Cover the removed parts, for models without masks, and return notes on how.

    Boxes are filled with the mean colour of the photo. Removed words become the tokenizer's mask
    token, or are deleted if it has none.
    """
    notes = []
    if model_input.removed_boxes and model_input.photo is not None:
        photo = model_input.photo.copy()
        height, width = photo.shape[:2]
        mean = model_input.photo.reshape(-1, 3).mean(axis=0).round()
        for left, top, right, bottom in model_input.removed_boxes:
            rows = slice(max(0, round(top * height)), max(0, round(bottom * height)))
            photo[rows, max(0, round(left * width)) : max(0, round(right * width))] = mean
        model_input = replace(model_input, photo=photo)
        notes.append("Removed parts of the image are filled with its mean colour.")
    if model_input.removed_ranges and model_input.text is not None:
        sign = getattr(loaded.tokenizer, "mask_token", None) or ""
        text, origin = _replace_ranges(model_input.text, model_input.removed_ranges, sign)
        if not text.strip():
            raise UserError("Every word was removed: keep at least one.")
        model_input = replace(model_input, text=text, origin=origin)
        notes.append(
            f"Removed words are replaced by {sign}." if sign else "Removed words are deleted."
        )
    return replace(model_input, removed_boxes=(), removed_ranges=()), tuple(notes)


def _replace_ranges(
    text: str, ranges: Sequence[tuple[int, int]], sign: str
) -> tuple[str, tuple[TextRange, ...]]:
    """Replace character ranges by a token; also return the mapping to the original text."""
    parts: list[str] = []
    pieces: list[TextRange] = []
    done = at = 0
    for start, end in [*sorted(ranges), (len(text), len(text))]:
        start, end = max(start, done), max(end, done)  # ranges may overlap
        parts.append(text[done:start])
        pieces.append((at, at + start - done, done, start))
        at += start - done
        if end > start:
            parts.append(sign)
            pieces.append((at, at + len(sign), start, end))
            at += len(sign)
        done = end
    return "".join(parts), tuple(one for one in pieces if one[0] < one[1])


def trace_origin(model_input: ModelInput, text: str, start: int = 0, end: int | None = None) -> Any:
    """Map the characters of `text`, which contains `text[start:end]` of the input, to the input.

    None is the identity; the mapping is empty if the input text is not found.
    """
    if text == model_input.text:
        return model_input.origin
    assert model_input.text is not None
    end = len(model_input.text) if end is None else end
    at = text.find(model_input.text[start:end])
    if at < 0:
        return ()
    whole = (0, len(model_input.text), 0, len(model_input.text))
    found: list[TextRange] = []
    for first, last, begin, stop in (whole,) if model_input.origin is None else model_input.origin:
        low, high = max(first, start), min(last, end)
        if low < high and last - first == stop - begin:  # one to one
            begin, stop = begin + low - first, begin + high - first
        if low < high:
            found.append((low + at - start, high + at - start, begin, stop))
    return tuple(found)


@rust_panic_as_corrupt_file("the tokenizer or processor files of this model are invalid")
def prepare_call(
    loaded: LoadedModel, model_input: ModelInput, max_flops: float = math.inf
) -> PreparedCall:
    """Preprocess the input for a model and return how to call it.

    Raises:
        UserError: if the model cannot take the input, or a text needs more than `max_flops`
            operations.
    """
    if model_input.frames:
        return _prepare_video(loaded, model_input, max_flops)
    if loaded.transform is not None:
        return _prepare_timm(loaded, model_input)
    config = loaded.model.config
    # Does the model take this input, and does its folder have the processors for it?
    reads, sees = _modalities(loaded)
    if not reads and not sees:
        wants = getattr(loaded.model, "main_input_name", "something else")
        raise UserError(f"{loaded.name} takes neither text nor images but {wants}.")
    if model_input.photo is not None and not sees:
        raise UserError(f"{loaded.name} takes text, not images: give it a text.")
    if model_input.text is not None and not reads:
        raise UserError(f"{loaded.name} takes images, not text: give it an image.")
    if model_input.photo is not None and loaded.image_processor is None:
        raise UserError(
            f"{loaded.name} has no usable preprocessor_config.json, which defines its image "
            "preprocessing."
        )
    if model_input.text is not None and loaded.tokenizer is None:
        raise UserError(f"{loaded.name} has no tokenizer files: it cannot take a text.")
    # One input alone: an image to caption, one tower of a dual encoder, or the only input.
    towers = _encoders(loaded.model)
    if model_input.photo is None or model_input.text is None:
        if model_input.text is None and _is_captioner(loaded.model):
            return _prepare_captioner(loaded, model_input)
        if reads and sees and towers is None:
            raise UserError(f"{loaded.name} needs an image and a text together.")
        return _prepare_single(loaded, model_input, towers, max_flops)
    # An image and a text: several lines are captions, of which the best is viewed.
    captions, best = (
        _rank_captions(loaded, model_input, max_flops) if towers is not None else ((), 0)
    )
    if len(captions) > 1:
        start, text = _lines(model_input.text)[best]
        origin = trace_origin(model_input, text, start, start + len(text))
    else:
        text = _prompt(loaded, model_input.text)
        origin = trace_origin(model_input, text)
    # An encoder-decoder model generates its text first, and is then viewed while it reads that.
    encoded = _encode(loaded, text, model_input.photo)
    check_cost(loaded, encoded, max_flops)
    inputs, generated = _decoder_inputs(loaded, encoded)
    call, notes = keyword_call(loaded.model), _truncation_notes(loaded, encoded, config)
    return PreparedCall(inputs, call, model_input, text, notes, origin, captions, generated)


def takes_video(loaded: LoadedModel) -> bool:
    """Return whether a model has a token for videos, and its processor takes them."""
    config = getattr(loaded.model, "config", None)
    known = any(hasattr(config, name) for name in ("video_token_id", "video_token_index"))
    if not known or loaded.processor is None or loaded.tokenizer is None:
        return False
    return "videos" in inspect.signature(loaded.processor.__call__).parameters


def require_video(loaded: LoadedModel) -> None:
    """Raise `UserError` if a model takes no video."""
    if not takes_video(loaded):
        raise UserError(
            f"{loaded.name} takes no video, or has no processor for one: give it one image."
        )


def _prepare_video(loaded: LoadedModel, model_input: ModelInput, max_flops: float) -> PreparedCall:
    """Prepare a video and a text."""
    import numpy as np

    require_video(loaded)
    if model_input.text is None:
        raise UserError(f"{loaded.name} needs a text with the video.")
    text = _prompt(loaded, model_input.text, "video")
    _check_tokens(loaded, text)
    encoded = _to_device(
        loaded,
        loaded.processor(text=text, videos=[np.stack(model_input.frames)], return_tensors="pt"),
    )
    check_cost(loaded, encoded, max_flops)
    notes = _truncation_notes(loaded, encoded, loaded.model.config)
    origin = trace_origin(model_input, text)
    return PreparedCall(encoded, keyword_call(loaded.model), model_input, text, notes, origin)


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the non-empty lines of a text with their offsets."""
    found, at = [], 0
    for line in text.split("\n"):
        if line.strip():
            found.append((at + len(line) - len(line.lstrip()), line.strip()))
        at += len(line) + 1
    return found


def _rank_captions(
    loaded: LoadedModel, model_input: ModelInput, max_flops: float
) -> tuple[tuple[tuple[str, float], ...], int]:
    """Match captions, one per line, with the image: probability of each, and index of the best.

    CLIP was trained to choose among captions, so its probabilities are a softmax over them and a
    single caption has none. SigLIP scores each caption independently.
    """
    import torch

    assert model_input.text is not None
    lines = [line for _, line in _lines(model_input.text)]
    if len(lines) < 2 and not _always_pads(loaded):
        return (), 0
    if len(lines) > MAX_CAPTIONS:
        raise UserError(f"got {len(lines)} captions, expected at most {MAX_CAPTIONS} lines.")
    encoded = _encode(loaded, lines, model_input.photo)
    check_cost(loaded, encoded, max_flops)
    with torch.no_grad():
        scores = getattr(keyword_call(loaded.model)(encoded), "logits_per_image", None)
    if scores is None or scores.shape != (1, len(lines)):
        return (), 0
    scores = scores[0].float()
    chances = (scores.sigmoid() if _always_pads(loaded) else scores.softmax(dim=-1)).tolist()
    return tuple(zip(lines, chances, strict=True)), int(scores.argmax())


def check_cost(loaded: LoadedModel, encoded: Mapping[str, Any], max_flops: float) -> None:
    """Raise `UserError` if reading the text needs more than `max_flops` operations."""
    if "input_ids" not in encoded:
        return
    rows, count = (int(size) for size in encoded["input_ids"].shape)
    work = rows * estimate_flops(loaded.model, count)
    if work > max_flops:
        raise UserError(
            f"{loaded.name} would need {work:.1e} operations for {count:,} tokens, the limit is "
            f"{max_flops:.0e}: shorten the text, or use `overt look`."
        )


def estimate_flops(model: Any, tokens: int) -> float:
    """Estimate the floating-point operations of reading so many tokens.

    Two per weight and token, and four per pair of tokens, feature and layer.
    """
    config = getattr(model.config, "text_config", model.config)
    layers = getattr(config, "num_hidden_layers", 1) or 1
    width = getattr(config, "hidden_size", 1) or 1
    weights = sum(one.numel() for one in model.parameters())
    return 2.0 * weights * tokens + 4.0 * layers * width * tokens**2


def _modalities(loaded: LoadedModel) -> tuple[bool, bool]:
    """Return whether a model takes text, and whether it takes images."""
    config = loaded.model.config
    parts = {name for name in ("vision_config", "text_config") if hasattr(config, name)}
    if parts == {"vision_config", "text_config"}:
        return True, True
    takes = inspect.signature(loaded.model.forward).parameters
    return "input_ids" in takes, "pixel_values" in takes


def _encoders(model: Any) -> tuple[Any, Any] | None:
    """Return the text and image encoders, if each can run alone."""
    text, vision = getattr(model, "text_model", None), getattr(model, "vision_model", None)
    return None if text is None or vision is None else (text, vision)


def _prepare_single(
    loaded: LoadedModel, model_input: ModelInput, towers: tuple[Any, Any] | None, max_flops: float
) -> PreparedCall:
    """Prepare an image or a text alone."""
    if model_input.photo is not None:
        encoded = loaded.image_processor(images=_pil_image(model_input.photo), return_tensors="pt")
        model = loaded.model if towers is None else towers[1]
        return PreparedCall(_to_device(loaded, encoded), keyword_call(model), model_input)
    assert model_input.text is not None
    encoded = _to_device(loaded, _tokenized(loaded, model_input.text))
    check_cost(loaded, encoded, max_flops)
    model = loaded.model if towers is None else towers[0]
    notes = _truncation_notes(loaded, encoded, loaded.model.config)
    inputs, generated = _decoder_inputs(loaded, encoded)
    call = keyword_call(model)
    return PreparedCall(
        inputs, call, model_input, model_input.text, notes, model_input.origin, generated=generated
    )


def _is_captioner(model: Any) -> bool:
    """Return whether a model captions an image without a prompt.

    Chat models need a prompt with the position of the image.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    chats = any(hasattr(config, name) for name in ("image_token_id", "image_token_index"))
    writes = "decoder_input_ids" in takes or type(model).__name__.endswith(GENERATIVE_SUFFIXES)
    prepared = "decoder_input_ids" in takes and "input_ids" in takes  # BLIP for VQA
    return (
        "pixel_values" in takes and model.can_generate() and writes and not chats and not prepared
    )


def _prepare_captioner(loaded: LoadedModel, model_input: ModelInput) -> PreparedCall:
    """Generate a caption for an image; its words become the queries."""
    photo = loaded.image_processor(images=_pil_image(model_input.photo), return_tensors="pt")
    encoded = _to_device(loaded, photo)
    read, generated = _generate(loaded, encoded)
    takes = inspect.signature(loaded.model.forward).parameters
    name = "decoder_input_ids" if "decoder_input_ids" in takes else "input_ids"
    return PreparedCall(
        {**encoded, name: read}, keyword_call(loaded.model), model_input, generated=generated
    )


def _generate(loaded: LoadedModel, encoded: Mapping[str, Any]) -> "tuple[Tensor, str | None]":
    """Generate text; return the tokens that the model attended from, and the text."""
    import torch

    with torch.no_grad():
        # Greedy, so that the same input gives the same view.
        written = loaded.model.generate(**encoded, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    tokenizer = loaded.tokenizer
    text = None if tokenizer is None else tokenizer.decode(written[0], skip_special_tokens=True)
    return written[:, : max(1, written.shape[1] - 1)], text  # nothing attends from the last token


def _tokenized(loaded: LoadedModel, text: str | list[str]) -> Any:
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    # A tokenizer without a limit states 1e30.
    max_tokens = min(loaded.tokenizer.model_max_length, limit or 1 << 20, 1 << 20)
    padding = "max_length" if _always_pads(loaded) else isinstance(text, list)
    _check_tokens(loaded, text)
    return loaded.tokenizer(
        text, return_tensors="pt", truncation=True, max_length=max_tokens, padding=padding
    )


def _check_tokens(loaded: LoadedModel, text: str | list[str]) -> None:
    """Raise if the tokenizer drops the whole text, as with control characters."""
    for one in [text] if isinstance(text, str) else text:
        begin = one.strip()[:200]  # a quick check of the beginning
        for part in (begin, one):
            if len(loaded.tokenizer(part, add_special_tokens=False)["input_ids"]):
                break
        else:
            raise UserError(f"The text {one[:40]!r} has no token for {loaded.name}: use words.")


def _always_pads(loaded: LoadedModel) -> bool:
    """SigLIP was trained with padding to the full length and is wrong without."""
    return str(loaded.model.config.model_type).startswith("siglip")


def _truncation_notes(
    loaded: LoadedModel, encoded: Mapping[str, Any], config: Any
) -> tuple[str, ...]:
    limit = getattr(config, "max_position_embeddings", None)
    max_tokens = min(loaded.tokenizer.model_max_length, limit or 1 << 20)
    if encoded["input_ids"].shape[-1] >= max_tokens and not _always_pads(loaded):
        return (f"The text was truncated to {max_tokens} tokens.",)
    return ()


def _prompt(loaded: LoadedModel, text: str, kind: str = "image") -> str:
    """Return the text as the prompt of a chat model, with the position of the image or video."""
    config = loaded.model.config
    token = getattr(config, f"{kind}_token_id", getattr(config, f"{kind}_token_index", None))
    if token is None:
        return text
    sign = getattr(loaded.processor, f"{kind}_token", None)
    sign = sign or loaded.tokenizer.convert_ids_to_tokens(int(token))
    template = getattr(loaded.processor, "chat_template", None)
    # A template adds the mark itself.
    if isinstance(sign, str) and text.count(sign) > (0 if template else 1):
        raise UserError(
            f"The text contains {sign!r} {text.count(sign)} times, which stands for "
            f"{'an image' if kind == 'image' else 'a video'}: "
            f"leave it out; it is added for the one {kind} that is given."
        )
    if template:
        turn = {"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}
        return str(loaded.processor.apply_chat_template([turn], add_generation_prompt=True))
    return text if sign in text else f"{sign}\n{text}"


def _encode(loaded: LoadedModel, text: str | list[str], photo: Any) -> Mapping[str, Any]:
    """Preprocess an image and a text, or an image and several texts."""
    if loaded.processor is not None:
        if loaded.tokenizer is not None:
            _check_tokens(loaded, text)
        padding = "max_length" if _always_pads(loaded) else isinstance(text, list)
        with model_errors(f"the processor of {loaded.name}"):
            encoded = loaded.processor(
                images=_pil_image(photo), text=text, return_tensors="pt", padding=padding
            )
        return _to_device(loaded, encoded)
    encoded = dict(_tokenized(loaded, text))
    encoded.update(loaded.image_processor(images=_pil_image(photo), return_tensors="pt"))
    return _to_device(loaded, encoded)


def _to_device(loaded: LoadedModel, encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Move tensors to the device and floating-point type of the model."""
    import torch

    model = loaded.model
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {
        name: value.to(model.device, kind if value.is_floating_point() else value.dtype)
        for name, value in encoded.items()
        if isinstance(value, torch.Tensor)
    }


def keyword_call(model: Any) -> Forward:
    """Return a function that calls the model with the inputs that its forward takes."""
    takes = inspect.signature(model.forward).parameters
    free = any(one.kind is one.VAR_KEYWORD for one in takes.values())

    def call(inputs: Mapping[str, Any]) -> Any:
        return model(**{name: v for name, v in inputs.items() if free or name in takes})

    return call


def _decoder_inputs(
    loaded: LoadedModel, encoded: Mapping[str, Any]
) -> tuple[Mapping[str, Any], str | None]:
    """Add generated decoder inputs for an encoder-decoder model."""
    import torch

    model = loaded.model
    decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters  # BLIP
    if not (getattr(model.config, "is_encoder_decoder", False) or decodes):
        return encoded, None
    if "input_ids" not in encoded:
        return encoded, None
    if model.can_generate():
        read, generated = _generate(loaded, encoded)
    else:
        start = model.config.decoder_start_token_id or model.config.bos_token_id or 0
        read, generated = torch.full((1, 1), start, device=model.device), None
    return {**encoded, "decoder_input_ids": read}, generated


def _prepare_timm(loaded: LoadedModel, model_input: ModelInput) -> PreparedCall:
    if model_input.text is not None:
        raise UserError(f"{loaded.name} takes images, not text: give it an image.")
    assert loaded.transform is not None
    pixels = loaded.transform(_pil_image(model_input.photo))[None]
    pixels = pixels.to(next(loaded.model.parameters()))
    model = loaded.model
    return PreparedCall(
        {"pixel_values": pixels}, lambda inputs: model(inputs["pixel_values"]), model_input
    )


def _pil_image(photo: Any) -> Any:
    from PIL import Image

    from overt.data.images import check_aspect_ratio

    check_aspect_ratio("the image", (photo.shape[0], photo.shape[1]))
    return Image.fromarray(photo)
