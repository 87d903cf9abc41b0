"""Find the inputs and token ids of a Hugging Face model that hold images, video or audio.

The rules do not depend on model families. An input tensor that is not a text input is media. A
token id named in the configuration or a sub-configuration that is not a special token of texts
marks media. A model type with an image processor or a feature extractor and no tokenizer has no
text.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

# Inputs that describe text tokens, and targets.
TEXT_INPUTS = frozenset(
    "input_ids attention_mask token_type_ids position_ids labels head_mask cache_position "
    "decoder_input_ids decoder_attention_mask decoder_position_ids decoder_head_mask "
    "cross_attn_head_mask global_attention_mask bbox langs lengths special_tokens_mask "
    "offset_mapping length overflow_to_sample_mapping start_positions end_positions "
    "next_sentence_label sentence_order_label num_items_in_batch past_key_values "
    "xpath_tags_seq xpath_subs_seq mm_token_type_ids".split()
)
# Special tokens of texts; any other `*_token_id` in a configuration marks media.
TEXT_TOKENS = frozenset(
    "bos eos pad unk sep cls mask decoder_start forced_bos forced_eos begin_suppress suppress "
    "decoder_bos decoder_eos decoder_pad prompt mem entity_pad entity_mask "
    "think_start think_end user system assistant im_start im_end eod start end blank question "
    "document pred".split()
)
_CODEBOOKS = ("num_codebooks", "n_codes_total")  # of models that read audio codes
_ENDINGS = ("_token_id", "_token_index", "_token_ids")


def media_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensor inputs of a model that are not text.

    An entry that is not a parameter of `forward` counts only if it holds floating-point values: a
    batch may contain labels and targets of other names.
    """
    named = inspect.signature(model.forward).parameters
    found = []
    for name, value in inputs.items():
        tensors = list(_tensors(value))
        if name in TEXT_INPUTS or not tensors:
            continue
        if name in named or any(one.is_floating_point() for one in tensors):
            found.append(name)
    return sorted(found)


def float_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of the media inputs with floating-point values: pixels and recordings."""
    return [
        name
        for name in media_inputs(model, inputs)
        if any(one.is_floating_point() for one in _tensors(inputs[name]))
    ]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def media_tokens(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the token ids in a configuration that are not special tokens of texts.

    Sub-configurations are included; names of entries are dotted paths.
    """
    found: dict[str, tuple[int, ...]] = {}
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    for name, value in _walk(settings, ""):
        last = name.rsplit(".", 1)[-1]
        stem = next((last[: -len(end)] for end in _ENDINGS if last.endswith(end)), None)
        if stem is None or stem in TEXT_TOKENS:
            continue
        # Negative ids mean "none".
        ids = tuple(n for n in _integers(value) if n >= 0)
        if ids:
            found[name] = ids
    return found


def _walk(settings: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _integers(one)


def media_token_masks(
    config: Any, ids: Int[Tensor, "b n"], real: Bool[Tensor, "b n"]
) -> dict[str, Bool[Tensor, "b n"]]:
    """Return the positions of media token ids, by their name in the configuration.

    Ids outside of the vocabulary count as media. Positions that are not `real` (padding) do not.
    """
    found = {
        name: torch.isin(ids, torch.tensor(values)) & real
        for name, values in media_tokens(config).items()
    }
    sizes = vocabulary_sizes(config)
    if sizes:
        found["an id outside the vocabulary"] = ((ids < 0) | (ids >= max(sizes))) & real
    return {name: where for name, where in found.items() if bool(where.any())}


def vocabulary_sizes(config: Any) -> list[int]:
    """Return the vocabulary sizes in a configuration and its sub-configurations."""
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    named = _walk(settings, "")
    return [n for name, v in named if name.rsplit(".", 1)[-1] == "vocab_size" for n in _integers(v)]


def reads_no_text(config: Any) -> bool:
    """Return whether a model type has a media processor but no tokenizer in transformers.

    The `input_ids` of such a model (ImageGPT) are colours or codes, not words; so are those of a
    decoder of audio codes (MusicGen), recognized by its number of codebooks.
    """
    kind = getattr(config, "model_type", None)
    if any(isinstance(n := getattr(config, name, 0), int) and n > 1 for name in _CODEBOOKS):
        return True
    try:
        from transformers.models.auto.feature_extraction_auto import (
            FEATURE_EXTRACTOR_MAPPING_NAMES as AUDIO,
        )
        from transformers.models.auto.image_processing_auto import (
            IMAGE_PROCESSOR_MAPPING_NAMES as IMAGES,
        )
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as BOTH
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES as TEXTS
    except ImportError:
        return False
    return (kind in AUDIO or kind in IMAGES) and kind not in TEXTS and kind not in BOTH


def media_error(kind: str, names: Collection[str], hand: str) -> ValueError:
    """Return the error for media tokens that cannot be located."""
    return ValueError(
        f"expected text tokens, or image tokens with known cells, got "
        f"{', '.join(sorted(names))} of {kind}: these tokens are not text, and there is no layout "
        f"rule for them; {hand}"
    )
