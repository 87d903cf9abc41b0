"""Panels: grouping of calls, names of positions, and attribution maps."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from overt.attention import Layout, Span, grid
from overt.capture import watch
from overt.capture.discovery import attention_modules
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.inspect import panels
from overt.inspect.inputs import ModelInput, PreparedCall, prepare_call
from overt.inspect.load_model import load_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import view_model
from overt.inspect.panels import ViewOptions
from overt.viz.panel import grid_spans, pixel_geometry
from tests.capture.layouts import vision_language as families
from tests.experiments import foreign

TEXT = "the small red ball lies on the grassland"
PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    shelf = foreign.Shelf(tmp_path_factory.mktemp("models"))
    return {name: load_model(shelf[name]) for name in foreign.MAKERS}


def test_sequences_of_equal_length_are_distinguished_by_module_name() -> None:
    call: Any = SimpleNamespace(cross=False, name="text_model.layers.0.attn")
    assert panels._match_layout(["vision", "text"], call, 2) == "text"
    call = SimpleNamespace(cross=True, name="decoder.layers.0.encoder_attn")
    assert panels._match_layout(["encoder", "decoder"], call, 2) == "decoder"
    assert panels._match_layout(["encoder", "decoder"], call, 3) == "encoder"


@pytest.mark.parametrize("build", [partial(families.qwen, "Qwen2VL"), families.internvl])
def test_patches_and_words_of_equal_number_are_distinguished_by_the_module(build: Any) -> None:
    """The encoder of Qwen is called `visual`, and its merged patches may be as many as words."""
    model, _ = build()
    count = 6
    words = Layout((Span("text", (count,), slice(0, count)),), count)
    prepared = PreparedCall({}, lambda model, inputs: None, ModelInput())
    for only in ({}, {"vision": grid(2, 3)}):
        names = panels.AxisNames(None, prepared, {"language": words, **only}, model)
        found = {}
        for name, module in attention_modules(model).items():
            call: Any = SimpleNamespace(
                cross=False, name=name, module=module, shape=(1, 2, count, count)
            )
            layout, _ = names.axis(call, 3)
            found[name] = layout.spans[0].name
            assert names.reads_answer(call) == (found[name] == "text")
        encoder = {one for name, one in found.items() if "visual" in name or "vision" in name}
        decoder = {one for name, one in found.items() if "language_model" in name}
        assert decoder == {"text"} and encoder == {"image" if only else "positions"}
        assert len(found) == 4


def test_a_too_large_map_is_shown_for_one_query(subjects: dict[str, LoadedModel]) -> None:
    full = view_model(subjects["gpt2"], ModelInput(TEXT)).panels[0]
    viewed = view_model(subjects["gpt2"], ModelInput(TEXT), ViewOptions(max_weights=100))
    (one,), (choice,) = viewed.panels, viewed.choices
    assert one.queries == ("land",) and "numbers; this panel has one query" in one.about
    torch.testing.assert_close(one.attention.weights, full.attention.weights[..., [-1], :])
    (ball,) = view_model(
        subjects["gpt2"], ModelInput(TEXT), ViewOptions(query="ball", max_weights=100)
    ).panels
    torch.testing.assert_close(ball.attention.weights, full.attention.weights[..., [3], :])
    assert choice.query == 0


def test_the_default_query_is_the_one_of_the_prediction(subjects: dict[str, LoadedModel]) -> None:
    transformers = foreign.transformers
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=40, **foreign.SIZES)
    model = foreign.lively(transformers.BertForSequenceClassification(config))
    loaded = LoadedModel("bert", model, tokenizer=subjects["bert"].tokenizer)
    assert (
        view_model(loaded, ModelInput(TEXT), ViewOptions(method="relevance")).choices[0].query == 0
    )  # [CLS]
    for way in ("attention", "rollout"):
        assert view_model(loaded, ModelInput(TEXT), ViewOptions(method=way)).choices[0].query == 0
    assert view_model(loaded, ModelInput(TEXT), ViewOptions(query="mean")).choices[0].query is None
    assert (
        view_model(subjects["bert"], ModelInput(TEXT)).choices[0].query is None
    )  # without a head there is no prediction
    ball = view_model(loaded, ModelInput(TEXT), ViewOptions(method="relevance", query="ball"))
    assert ball.choices[0].query == 4


def test_a_learned_query_is_named_global() -> None:
    """SigLIP pools its patches with one learned query."""
    transformers = foreign.transformers
    config = transformers.SiglipVisionConfig(image_size=32, patch_size=8, **foreign.SIZES)
    pixels = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    model = transformers.SiglipVisionModel(config).eval()
    viewed = view_model(
        LoadedModel("siglip", model, image_processor=pixels), ModelInput(None, PHOTO)
    )
    head = viewed.panels[-1]
    assert head.queries == ("global",) and head.keys[0] == "image 0,0"
    assert viewed.choices[-1].query == 0


def test_positions_are_named_by_words_and_cells(subjects: dict[str, LoadedModel]) -> None:
    (text,) = view_model(subjects["bert"], ModelInput(TEXT)).panels
    words = ["[CLS]", *TEXT.replace("grassland", "grass land").split(), "[SEP]"]
    assert list(text.keys) == words
    assert text.attention.keys.find("text").geometry.texts == (TEXT,)  # type: ignore[union-attr]
    (photo,) = view_model(subjects["dino"], ModelInput(None, PHOTO)).panels
    assert photo.keys[:5] == ("class", "registers 0", "registers 1", "registers 2", "image 0,0")
    assert photo.photos["image"] is PHOTO
    answer, _, language = view_model(subjects["llava"], ModelInput("what is this", PHOTO)).panels
    assert language.keys[0] == "image 0,0" and language.keys[16:19] == ("what", "is", "this")
    assert answer.keys == language.keys == language.queries
    cross = view_model(subjects["t5"], ModelInput(TEXT)).panels[2]
    assert cross.queries[0] == "[PAD]" and list(cross.keys) == words and not cross.same


@pytest.mark.parametrize("way", ["values", "gradient", "rollout", "relevance"])
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_attribution_maps_equal_those_of_the_library(
    subjects: dict[str, LoadedModel], name: str, way: str
) -> None:
    from overt.attribution import attention_rollout, gradients, value_weighted

    loaded = subjects[name]
    given = ModelInput(TEXT) if name == "gpt2" else ModelInput(None, PHOTO)
    (found,) = view_model(loaded, given, ViewOptions(method=way)).panels
    prepared = prepare_call(loaded, given)
    with watch(loaded.model) as trace:
        logits = prepared.call(prepared.inputs).logits
    target = (logits[:, -1] if logits.ndim == 3 else logits).amax()
    wanted = {
        "values": lambda: (
            value_weighted.value_norms(
                trace, None, value_weighted.find_output_projection(loaded.model)
            ).values
        ),
        "gradient": lambda: gradients.gradient_attention(trace, target).values.clamp_min(0),
        "rollout": lambda: attention_rollout.rollout(trace).values,
        "relevance": lambda: gradients.relevance(trace, target).values,
    }[way]()
    torch.testing.assert_close(found.attention.values, wanted.detach())
    assert panels.MAPS[way] in found.about
    assert all(p.grad is None for p in loaded.model.parameters())


def test_relevance_needs_a_prediction(subjects: dict[str, LoadedModel]) -> None:
    with pytest.raises(UserError, match=r"BertModel.*scores"):
        view_model(subjects["bert"], ModelInput(TEXT), ViewOptions(method="relevance"))


def test_the_photo_is_placed_by_the_processor(subjects: dict[str, LoadedModel]) -> None:
    (one,) = view_model(subjects["dino"], ModelInput(None, PHOTO)).panels
    (span,) = grid_spans(one.attention.keys)
    wanted = PixelGeometry.identity(1, (60, 90)).resize((40, 60)).crop(4, 14, 32, 32)
    found = pixel_geometry(span)
    assert found is not None
    torch.testing.assert_close(found.cells((4, 4)), wanted.cells((4, 4)), atol=0.1, rtol=0)


def test_one_window_is_shown_and_an_unknown_layout_is_noted() -> None:
    transformers = foreign.transformers
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4
    )
    loaded = LoadedModel(
        "swin",
        transformers.SwinModel(config).eval(),
        image_processor=transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
    )
    viewed = view_model(loaded, ModelInput(None, PHOTO))
    (one,) = viewed.panels
    assert "4 separate attention windows" in one.about
    assert len(one.keys) == 16 and one.keys[3] == "3"
    assert any("could not be identified: swin" in note for note in viewed.notes)
    with pytest.raises(UserError, match="4 attention windows"):
        view_model(loaded, ModelInput(None, PHOTO), ViewOptions(method="rollout"))


def make_captioners() -> dict[str, Any]:
    """Make two captioning models: BLIP, and an encoder-decoder of ViT and GPT-2."""
    transformers = foreign.transformers
    marks = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    text = {"vocab_size": 30, "encoder_hidden_size": 32, "max_position_embeddings": 40, **marks}
    vision = {"image_size": 32, "patch_size": 8, **foreign.SIZES}
    blip = transformers.BlipConfig(
        text_config={**text, **foreign.SIZES},
        vision_config=vision,
        image_text_hidden_size=32,
        projection_dim=32,
    )
    words = transformers.GPT2Config(
        vocab_size=30, n_positions=40, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True
    )
    both = transformers.VisionEncoderDecoderModel(
        encoder=transformers.ViTModel(transformers.ViTConfig(**vision)),
        decoder=transformers.GPT2LMHeadModel(words),
    )
    both.generation_config.update(decoder_start_token_id=2, eos_token_id=3, pad_token_id=0)
    return {"blip": transformers.BlipForConditionalGeneration(blip), "both": both}


@pytest.mark.parametrize("name", ["blip", "both"])
def test_captioning_models_are_shown_for_an_image_without_text(
    subjects: dict[str, LoadedModel], name: str
) -> None:
    torch.manual_seed(0)
    model = foreign.lively(make_captioners()[name])
    pixels = foreign.transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    tokenizer = subjects["bert"].tokenizer
    loaded = LoadedModel(name, model, image_processor=pixels, tokenizer=tokenizer)
    viewed = view_model(loaded, ModelInput(None, PHOTO))
    cross = viewed.panels[-1]
    assert "cross-attention" in cross.title and cross.keys[1] == "image 0,0"
    pixel_values = prepare_call(loaded, ModelInput(None, PHOTO)).inputs["pixel_values"]
    (written,) = model.generate(
        pixel_values=pixel_values, max_new_tokens=32, do_sample=False
    ).tolist()
    words = [tokenizer.decode([one]).strip() for one in written[:-1]]
    # An empty token is named by its position, with "text" if the layout is known.
    place = "text {}" if name == "both" else "{}"
    first = 1 if name == "both" else 0
    expected = [word or place.format(at - first) for at, word in enumerate(words)]
    assert list(cross.queries) == expected
    caption = tokenizer.decode(written, skip_special_tokens=True)
    note = f"It writes: {caption}" if caption.strip() else "It writes an empty text."
    assert note in viewed.notes and viewed.answers[0][0] == caption


def test_a_vqa_model_without_a_question_raises(
    subjects: dict[str, LoadedModel],
) -> None:
    for name in ("blip", "llava"):
        with pytest.raises(UserError, match=r"image.*text"):
            view_model(subjects[name], ModelInput(None, PHOTO))
