"""What a model is given to look at: a picture, a text or both, made into the inputs it takes."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput, Failed
from overt.recipes.opening import Subject

if TYPE_CHECKING:
    from torch import Tensor

NEW_TOKENS = 32  # how much of an answer is written by a model that reads first and then writes
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # how such classes end
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")

MOST_CAPTIONS = 64  # that a picture is held against at once

Call = Callable[[Mapping[str, Any]], Any]
Box = tuple[float, float, float, float]
Piece = tuple[int, int, int, int]  # characters of a text (from, to) stand for those (from, to)


@dataclass(frozen=True, eq=False)
class Given:
    """What the model is to look at, and what of it is removed.

    `without` are boxes of the photo, (left, top, right, bottom) as shares of its width and height;
    `unsaid` are ranges of characters of the text. `boxes` are what a network that looks at boxes
    has to choose from; without them the photo is cut into tiles. `origin` says which characters of
    the text as it was asked those of `text` stand for, where some were covered up; None is each for
    itself.
    """

    text: str | None = None
    photo: Any = None
    without: tuple[Box, ...] = ()
    unsaid: tuple[tuple[int, int], ...] = ()
    boxes: tuple[Box, ...] = ()
    origin: tuple[Piece, ...] | None = None


@dataclass(frozen=True, eq=False)
class Asked:
    """Inputs for a model, what calls it, and what to know of both.

    `text` is the text that was tokenised, which may be the one given inside a prompt, or one of its
    lines; `origin` leads back to what was given. `captions` are the lines of the text, each with
    the chance that it is the one that fits, where that is what a model can tell. `wrote` is what a
    model has written in answer, which is what it reads meanwhile.
    """

    inputs: Mapping[str, Any]
    call: Call
    given: Given
    text: str | None = None
    notes: tuple[str, ...] = ()
    origin: tuple[Piece, ...] | None = None
    captions: tuple[tuple[str, float], ...] = ()
    wrote: str | None = None


def run(name: str, asked: Asked) -> Any:
    """Call the model; what it makes of an input that it cannot take is one sentence."""
    import torch

    try:
        return asked.call(asked.inputs)
    except (BadInput, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
        raise Failed(f"{name} could not be run on this input ({said[:300]}).") from error


def is_picture(word: str) -> bool:
    """Whether an input names a file, or would if there were one: it ends as pictures do."""
    with suppress(OSError, ValueError):  # a long text is no path at all
        if Path(word).is_file():
            return True
    return " " not in word.strip() and word.lower().endswith(PICTURES)


def read(inputs: Sequence[str]) -> Given:
    """The photo and the text among the inputs."""
    from overt.data.images import open_image

    text, photo = None, None
    for word in inputs:
        if is_picture(word):
            photo = open_image(Path(word))[0]
        elif not word.strip():
            raise BadInput("the text is empty; there is nothing in it to look at.")
        elif any("\ud800" <= sign <= "\udfff" for sign in word):
            raise BadInput("the text is not UTF-8; write it in the encoding of this terminal.")
        else:
            text = word
    return Given(text, photo)


def photo(path: Path | str) -> Any:
    """The pixels of a picture in a file."""
    from overt.data.images import open_image

    return open_image(Path(path))[0]


def hidden(subject: Subject, given: Given) -> tuple[Given, tuple[str, ...]]:
    """The input with what is removed covered up, for models that take no masks, and a note on how.

    Boxes are painted in the mean colour of the photo. Ranges of the text become the mask token of
    the tokenizer where it has one, and are left out where it has none.
    """
    notes = []
    if given.without and given.photo is not None:
        photo = given.photo.copy()
        height, width = photo.shape[:2]
        mean = given.photo.reshape(-1, 3).mean(axis=0).round()
        for left, top, right, bottom in given.without:
            rows = slice(max(0, round(top * height)), max(0, round(bottom * height)))
            photo[rows, max(0, round(left * width)) : max(0, round(right * width))] = mean
        given = replace(given, photo=photo)
        notes.append("What was removed of the picture is painted in its mean colour.")
    if given.unsaid and given.text is not None:
        sign = getattr(subject.tokenizer, "mask_token", None) or ""
        text, origin = _without(given.text, given.unsaid, sign)
        if not text.strip():
            raise BadInput("every word was removed; leave one.")
        given = replace(given, text=text, origin=origin)
        notes.append(
            f"Each word that was removed is {sign}."
            if sign
            else "Words that were removed are gone."
        )
    return replace(given, without=(), unsaid=()), tuple(notes)


def _without(
    text: str, ranges: Sequence[tuple[int, int]], sign: str
) -> tuple[str, tuple[Piece, ...]]:
    """A text with a sign in the place of each range, and where each part of it comes from."""
    parts: list[str] = []
    pieces: list[Piece] = []
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


def traced(given: Given, text: str, start: int = 0, end: int | None = None) -> Any:
    """What characters of `text` stand for, in which `given.text[start:end]` stands somewhere.

    None is each for itself; nothing is traced where the words of the given text are not found.
    """
    if text == given.text:
        return given.origin
    assert given.text is not None
    end = len(given.text) if end is None else end
    at = text.find(given.text[start:end])
    if at < 0:
        return ()
    whole = (0, len(given.text), 0, len(given.text))
    found: list[Piece] = []
    for first, last, begin, stop in (whole,) if given.origin is None else given.origin:
        low, high = max(first, start), min(last, end)
        if low < high and last - first == stop - begin:  # character by character
            begin, stop = begin + low - first, begin + high - first
        if low < high:
            found.append((low + at - start, high + at - start, begin, stop))
    return tuple(found)


def ask(subject: Subject, given: Given, most: float = math.inf) -> Asked:
    """The inputs that a model takes for what is given, and how it is called with them.

    A text that would take more than `most` floating-point operations is refused before it is read.
    """
    if subject.transform is not None:
        return _ask_timm(subject, given)
    config = subject.model.config
    reads, sees = _senses(subject)
    if not reads and not sees:
        wants = getattr(subject.model, "main_input_name", "something else")
        raise BadInput(f"{subject.name} takes neither text nor pictures but {wants}.")
    if given.photo is not None and not sees:
        raise BadInput(f"{subject.name} does not look at pictures; give it a text.")
    if given.text is not None and not reads:
        raise BadInput(f"{subject.name} does not read; give it a picture.")
    if given.photo is not None and subject.image_processor is None:
        raise BadInput(
            f"{subject.name} has no preprocessor_config.json that can be used here, so how it "
            "wants its pictures is not known."
        )
    if given.text is not None and subject.tokenizer is None:
        raise BadInput(f"{subject.name} has no tokenizer beside it, so it cannot be given a text.")
    towers = _towers(subject.model)
    if given.photo is None or given.text is None:
        if given.text is None and _captions(subject.model):
            return _captioned(subject, given)
        if reads and sees and towers is None:
            raise BadInput(f"{subject.name} wants a picture and a text together.")
        return _ask_one(subject, given, towers, most)
    captions, best = _compared(subject, given, most) if towers is not None else ((), 0)
    if len(captions) > 1:
        start, text = _lines(given.text)[best]
        origin = traced(given, text, start, start + len(text))
    else:
        text = _prompt(subject, given.text)
        origin = traced(given, text)
    encoded = _encode(subject, text, given.photo)
    _afford(subject, encoded, most)
    inputs, wrote = _writing(subject, encoded)
    call, notes = keyword_call(subject.model), _cut(subject, encoded, config)
    return Asked(inputs, call, given, text, notes, origin, captions, wrote)


def _lines(text: str) -> list[tuple[int, str]]:
    """The lines of a text that say something, and where each begins."""
    found, at = [], 0
    for line in text.split("\n"):
        if line.strip():
            found.append((at + len(line) - len(line.lstrip()), line.strip()))
        at += len(line) + 1
    return found


def _compared(
    subject: Subject, given: Given, most: float
) -> tuple[tuple[tuple[str, float], ...], int]:
    """Captions, a line each, held against the picture: how likely each is, and which is the best.

    CLIP was trained to choose one of several, so its chances are shares among the captions, and of
    one caption it says nothing. SigLIP judges each caption by itself.
    """
    import torch

    assert given.text is not None
    lines = [line for _, line in _lines(given.text)]
    if len(lines) < 2 and not _pads(subject):
        return (), 0
    if len(lines) > MOST_CAPTIONS:
        raise BadInput(
            f"{len(lines)} captions are too many to choose from; {MOST_CAPTIONS} lines are not."
        )
    encoded = _encode(subject, lines, given.photo)
    _afford(subject, encoded, most)
    with torch.no_grad():
        scores = getattr(keyword_call(subject.model)(encoded), "logits_per_image", None)
    if scores is None or scores.shape != (1, len(lines)):
        return (), 0
    scores = scores[0].float()
    chances = (scores.sigmoid() if _pads(subject) else scores.softmax(dim=-1)).tolist()
    return tuple(zip(lines, chances, strict=True)), int(scores.argmax())


def _afford(subject: Subject, encoded: Mapping[str, Any], most: float) -> None:
    """Refuse a text that would keep the machine busy for too long, in a sentence."""
    if "input_ids" not in encoded:
        return
    rows, count = (int(size) for size in encoded["input_ids"].shape)
    work = rows * operations(subject.model, count)
    if work > most:
        raise BadInput(
            f"{subject.name} would need {work:.1e} operations to read {count:,} tokens, and more "
            f"than {most:.0e} are not done here; shorten the text, or use `overt look`."
        )


def operations(model: Any, tokens: int) -> float:
    """About how many floating-point operations it takes a model to read so many tokens.

    Two for each weight and token, and four for each pair of tokens, feature and layer.
    """
    config = getattr(model.config, "text_config", model.config)
    layers = getattr(config, "num_hidden_layers", 1) or 1
    width = getattr(config, "hidden_size", 1) or 1
    weights = sum(one.numel() for one in model.parameters())
    return 2.0 * weights * tokens + 4.0 * layers * width * tokens**2


def _senses(subject: Subject) -> tuple[bool, bool]:
    """Whether a model reads text, and whether it looks at pictures."""
    config = subject.model.config
    parts = {name for name in ("vision_config", "text_config") if hasattr(config, name)}
    if parts == {"vision_config", "text_config"}:
        return True, True
    takes = inspect.signature(subject.model.forward).parameters
    return "input_ids" in takes, "pixel_values" in takes


def _towers(model: Any) -> tuple[Any, Any] | None:
    """The encoders of text and of pictures, where each can run by itself."""
    text, vision = getattr(model, "text_model", None), getattr(model, "vision_model", None)
    return None if text is None or vision is None else (text, vision)


def _ask_one(subject: Subject, given: Given, towers: tuple[Any, Any] | None, most: float) -> Asked:
    """A picture or a text alone."""
    if given.photo is not None:
        encoded = subject.image_processor(images=_picture(given.photo), return_tensors="pt")
        model = subject.model if towers is None else towers[1]
        return Asked(_on(subject, encoded), keyword_call(model), given)
    assert given.text is not None
    encoded = _on(subject, _tokenized(subject, given.text))
    _afford(subject, encoded, most)
    model = subject.model if towers is None else towers[0]
    notes = _cut(subject, encoded, subject.model.config)
    inputs, wrote = _writing(subject, encoded)
    call = keyword_call(model)
    return Asked(inputs, call, given, given.text, notes, given.origin, wrote=wrote)


def _captions(model: Any) -> bool:
    """Whether a model writes about a picture without being asked anything.

    One that chats wants to be told where among its words the picture stands.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    chats = any(hasattr(config, name) for name in ("image_token_id", "image_token_index"))
    writes = "decoder_input_ids" in takes or type(model).__name__.endswith(WRITERS)
    asked = "decoder_input_ids" in takes and "input_ids" in takes  # BLIP for questions
    return "pixel_values" in takes and model.can_generate() and writes and not chats and not asked


def _captioned(subject: Subject, given: Given) -> Asked:
    """A picture alone: what the model writes about it is what it then reads, word by word."""
    photo = subject.image_processor(images=_picture(given.photo), return_tensors="pt")
    encoded = _on(subject, photo)
    read, wrote = _write(subject, encoded)
    takes = inspect.signature(subject.model.forward).parameters
    name = "decoder_input_ids" if "decoder_input_ids" in takes else "input_ids"
    return Asked({**encoded, name: read}, keyword_call(subject.model), given, wrote=wrote)


def _write(subject: Subject, encoded: Mapping[str, Any]) -> "tuple[Tensor, str | None]":
    """What a model writes when it is given this: the tokens that it reads meanwhile, and words."""
    import torch

    with torch.no_grad():
        written = subject.model.generate(**encoded, max_new_tokens=NEW_TOKENS, do_sample=False)
    tokenizer = subject.tokenizer
    told = None if tokenizer is None else tokenizer.decode(written[0], skip_special_tokens=True)
    return written[:, : max(1, written.shape[1] - 1)], told  # the last one is written, not read


def _tokenized(subject: Subject, text: str | list[str]) -> Any:
    limit = getattr(subject.model.config, "max_position_embeddings", None)
    most = min(subject.tokenizer.model_max_length, limit or 1 << 20, 1 << 20)
    padding = "max_length" if _pads(subject) else isinstance(text, list)
    return subject.tokenizer(
        text, return_tensors="pt", truncation=True, max_length=most, padding=padding
    )


def _pads(subject: Subject) -> bool:
    """Whether texts are always filled up: SigLIP was trained so, and is wrong otherwise."""
    return str(subject.model.config.model_type).startswith("siglip")


def _cut(subject: Subject, encoded: Mapping[str, Any], config: Any) -> tuple[str, ...]:
    limit = getattr(config, "max_position_embeddings", None)
    most = min(subject.tokenizer.model_max_length, limit or 1 << 20)
    if encoded["input_ids"].shape[-1] >= most and not _pads(subject):
        return (f"The model reads {most} tokens: what comes after them was cut off.",)
    return ()


def _prompt(subject: Subject, text: str) -> str:
    """The text as a model that chats about pictures wants it, with the place of the picture."""
    config = subject.model.config
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if token is None:
        return text
    if getattr(subject.processor, "chat_template", None):
        turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        return str(subject.processor.apply_chat_template([turn], add_generation_prompt=True))
    sign = getattr(subject.processor, "image_token", None)
    sign = sign or subject.tokenizer.convert_ids_to_tokens(int(token))
    return text if sign in text else f"{sign}\n{text}"


def _encode(subject: Subject, text: str | list[str], photo: Any) -> Mapping[str, Any]:
    """The inputs of a picture and a text, or of a picture and several texts of one length."""
    if subject.processor is not None:
        padding = "max_length" if _pads(subject) else isinstance(text, list)
        encoded = subject.processor(
            images=_picture(photo), text=text, return_tensors="pt", padding=padding
        )
        return _on(subject, encoded)
    encoded = dict(_tokenized(subject, text))
    encoded.update(subject.image_processor(images=_picture(photo), return_tensors="pt"))
    return _on(subject, encoded)


def _on(subject: Subject, encoded: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors on the device of the model, in its number format."""
    import torch

    model = subject.model
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {
        name: value.to(model.device, kind if value.is_floating_point() else value.dtype)
        for name, value in encoded.items()
        if isinstance(value, torch.Tensor)
    }


def keyword_call(model: Any) -> Call:
    """What calls a model with those of the inputs that it takes."""
    takes = inspect.signature(model.forward).parameters
    free = any(one.kind is one.VAR_KEYWORD for one in takes.values())

    def call(inputs: Mapping[str, Any]) -> Any:
        return model(**{name: v for name, v in inputs.items() if free or name in takes})

    return call


def _writing(subject: Subject, encoded: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """For a model that reads and then writes: what it would write, as input of its decoder."""
    import torch

    model = subject.model
    decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters  # as BLIP does
    if not (getattr(model.config, "is_encoder_decoder", False) or decodes):
        return encoded, None
    if "input_ids" not in encoded:
        return encoded, None
    if model.can_generate():
        read, wrote = _write(subject, encoded)
    else:
        start = model.config.decoder_start_token_id or model.config.bos_token_id or 0
        read, wrote = torch.full((1, 1), start, device=model.device), None
    return {**encoded, "decoder_input_ids": read}, wrote


def _ask_timm(subject: Subject, given: Given) -> Asked:
    if given.text is not None:
        raise BadInput(f"{subject.name} does not read; give it a picture.")
    assert subject.transform is not None
    pixels = subject.transform(_picture(given.photo))[None]
    pixels = pixels.to(next(subject.model.parameters()))
    model = subject.model
    return Asked({"pixel_values": pixels}, lambda inputs: model(inputs["pixel_values"]), given)


def _picture(photo: Any) -> Any:
    from PIL import Image

    return Image.fromarray(photo)
