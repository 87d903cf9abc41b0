"""No token of an image, a video or a recording is called text, in any family of models."""

import pytest
import torch
from torch import nn

from overt.capture.layouts.hf_layouts import layouts_of
from overt.capture.layouts.media_tokens import (
    media_error,
    media_inputs,
    media_token_masks,
    media_tokens,
    reads_no_text,
    vocabulary_sizes,
)

transformers = pytest.importorskip("transformers", reason="models come from transformers")

LAYERS = (
    "num_hidden_layers encoder_layers decoder_layers depth num_layers layers n_layer num_blocks"
)
VIDEO = {"pixel_values_videos": (1, 8, 3, 56, 56)}
PATCHES = {"pixel_values_videos": (16, 1176), "video_grid_thw": [[1, 4, 4]]}
SOUND = {"input_features": (1, 128, 300)}
# The class, its media inputs, the setting that names the placeholder where it has one.
FAMILIES = [
    ("FuyuForCausalLM", {"image_patches": (1, 4, 2700)}, "image_token_id"),
    ("Gemma4ForConditionalGeneration",
     {"pixel_values": (1, 9, 768), "image_position_ids": [[[0, 0]] * 9]}, "image_token_id"),
    ("Gemma4ForConditionalGeneration", SOUND, "audio_token_id"),
    ("Kosmos2ForConditionalGeneration",
     {"pixel_values": (1, 3, 224, 224), "image_embeds_position_mask": [[0] * 9]}, None),
    ("Kosmos2_5ForConditionalGeneration",
     {"flattened_patches": (1, 9, 770), "image_embeds_position_mask": [[0] * 9]}, None),
    ("VideoLlavaForConditionalGeneration", VIDEO, "video_token_index"),
    ("LlavaNextVideoForConditionalGeneration", VIDEO, "video_token_index"),
    ("LlavaOnevisionForConditionalGeneration", VIDEO, "video_token_index"),
    ("Qwen2VLForConditionalGeneration", PATCHES, "video_token_id"),
    ("Qwen2_5_VLForConditionalGeneration", PATCHES, "video_token_id"),
    ("Qwen3VLForConditionalGeneration", PATCHES, "video_token_id"),
    ("Qwen3_5ForConditionalGeneration", PATCHES, "video_token_id"),
    ("Qwen2AudioForConditionalGeneration", SOUND, "audio_token_index"),
    ("Qwen2_5OmniThinkerForConditionalGeneration", SOUND, "audio_token_index"),
    ("Qwen2_5OmniThinkerForConditionalGeneration", PATCHES, "video_token_index"),
    ("Qwen3OmniMoeThinkerForConditionalGeneration", SOUND, "audio_token_id"),
    ("VoxtralForConditionalGeneration", SOUND, None),
    ("AudioFlamingo3ForConditionalGeneration", SOUND, "audio_token_id"),
    ("MusicFlamingoForConditionalGeneration", SOUND, "audio_token_id"),
    ("GraniteSpeechForConditionalGeneration", {"input_features": (1, 100, 160)},
     "audio_token_index"),
    ("Phi4MultimodalForCausalLM",
     {"image_pixel_values": (1, 2, 3, 448, 448), "image_sizes": [[448, 448]]},
     "vision_config.image_token_id"),
    ("Phi4MultimodalForCausalLM", {"audio_input_features": (1, 40, 80)},
     "audio_config.audio_token_id"),
]  # fmt: skip


def shallow(config):
    """The configuration with one layer in every stack."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shallow(value)
        elif name in LAYERS.split() and isinstance(value, int):
            setattr(config, name, 1)
        elif name == "layer_types" and value:
            setattr(config, name, value[-1:])
    return config


def model_of(name):
    """A model of the family's own sizes, without memory for its weights."""
    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(shallow(kind.config_class())).eval()


def given(media):
    return {
        name: torch.randn(value) if isinstance(value, tuple) else torch.tensor(value)
        for name, value in media.items()
    }


def asked(number=5):
    ids = torch.tensor([[3, 4, *[number] * 5, 6, 7]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def setting(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


NEWER = (
    "LlavaOnevisionForConditionalGeneration",
    "Phi4MultimodalForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
)


@pytest.mark.parametrize(
    ("name", "media", "token"),
    [
        pytest.param(*family, marks=pytest.mark.newer("transformers>=5"))
        if family[0] in NEWER
        else family
        for family in FAMILIES
    ],
)
def test_media_that_cannot_be_placed_are_refused(name, media, token):
    model = model_of(name)
    number = 5 if token is None else setting(model.config, token)
    with pytest.raises(ValueError, match=r"not text.*by hand"):
        layouts_of(model, {**asked(number), **given(media)})
    if token is not None:  # the placeholders are known by themselves, in sub-configurations too
        assert token in media_tokens(model.config)
        with pytest.raises(ValueError, match=token.replace(".", r"\.")):
            layouts_of(model, asked(number))


def test_a_video_beside_an_image_is_refused_as_a_whole():
    model = model_of("Qwen2VLForConditionalGeneration")
    image = {"pixel_values": torch.randn(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(ValueError, match=r"pixel_values_videos.*video_grid_thw.*qwen2_vl"):
        layouts_of(model, {**asked(), **image, **given(PATCHES)})


def test_ids_that_are_colours_are_not_text():
    with pytest.raises(ValueError, match=r"input_ids.*imagegpt"):
        layouts_of(model_of("ImageGPTModel"), asked())
    assert reads_no_text(transformers.ImageGPTConfig())
    assert not reads_no_text(transformers.BertConfig())
    assert not reads_no_text(transformers.CLIPConfig())
    assert not reads_no_text(None)


def test_codes_of_recordings_are_not_text():
    class Codes(nn.Module):
        config = transformers.T5Config()

        def forward(self, input_ids, decoder_input_ids=None):
            raise NotImplementedError

    with pytest.raises(ValueError, match="input_ids of t5"):
        layouts_of(Codes(), {"input_ids": torch.ones(1, 4, 8).long()})
    several = {**asked(), "decoder_input_ids": torch.ones(4, 6).long()}
    with pytest.raises(ValueError, match=r"got \(4, 6\)"):
        layouts_of(Codes(), several)


def test_what_is_no_tensor_or_a_target_is_no_media():
    model = model_of("Qwen2VLForConditionalGeneration")
    plain = {**asked(), "labels": torch.ones(1, 9), "use_cache": True, "texts": ["a"]}
    counted = {**plain, "mm_token_type_ids": torch.zeros(1, 9), "wanted": torch.ones(1, 9).long()}
    assert media_inputs(model, counted) == []
    assert media_inputs(model, {**plain, "wanted": torch.ones(1, 9)}) == ["wanted"]
    assert media_inputs(model, {**plain, "pixel_values": [torch.ones(3, 2, 2)]}) == ["pixel_values"]
    assert [span.name for span in layouts_of(model, plain)[""].spans] == ["text"]


def test_marks_are_found_by_name_and_beyond_the_vocabulary():
    config = transformers.Qwen2VLConfig(text_config={"vocab_size": 50}, image_token_id=9)
    assert vocabulary_sizes(config) == [50]
    assert media_tokens(config)["image_token_id"] == (9,)
    assert not any("pad" in name or "eos" in name for name in media_tokens(config))
    ids = torch.tensor([[1, 9, 50, -3, 9]])
    found = media_token_masks(config, ids, torch.tensor([[True, True, True, True, False]]))
    assert found["image_token_id"].tolist() == [[False, True, False, False, False]]
    assert found["an id outside the vocabulary"].tolist() == [[False, False, True, True, False]]
    assert media_token_masks(config, ids[:, :1], torch.tensor([[True]])) == {}


def test_the_error_says_what_came_and_what_to_do():
    assert str(media_error("fuyu", ["b", "a"], "build it by hand")) == (
        "expected text tokens, or image tokens with known cells, got a, b of fuyu: these tokens "
        "are not text, and there is no layout rule for them; build it by hand"
    )


def every_family():
    """The names of all classes of transformers that read or write texts beside other media."""
    from transformers.models.auto import modeling_auto

    found = set()
    for name, mapping in vars(modeling_auto).items():
        kinds = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL", "VISUAL_QUESTION", "SPEECH_SEQ", "TO_WAVEFORM")
        if name.endswith("_MAPPING_NAMES") and any(kind in name for kind in kinds):
            for value in mapping.values():
                found.update([value] if isinstance(value, str) else value)
    return sorted(found)


@pytest.mark.long
def test_no_family_calls_media_text():
    """Families in none of our lists, fed by rote: an error, or no media in the inputs."""
    media = {
        "an image": {"pixel_values": (1, 3, 224, 224)},
        "tiles": {"pixel_values": (1, 2, 3, 224, 224)},
        "a recording": {"input_features": (1, 80, 100)},
        "a video": {"pixel_values_videos": (1, 4, 3, 224, 224)},
    }
    tried, wrong = 0, []
    for name in every_family():
        try:
            model = model_of(name)
        except Exception:  # its own configuration by itself builds no model, or a library lacks
            continue
        tried += 1
        marks = media_tokens(model.config)
        number = next((ids[0] for key, ids in marks.items() if "image_token" in key), 5)
        for what, values in media.items():
            if model.config.model_type == "vilt" and what == "an image":
                continue  # placed by the order that it draws
            try:
                layouts_of(model, {**asked(number), **given(values)})
            except ValueError:
                continue
            wrong.append(f"{what} of {name}")
    assert tried > 100 and wrong == []
