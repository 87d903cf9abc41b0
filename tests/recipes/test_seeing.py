"""Panels: the right calls together, the right names at their positions, the map that was asked."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from overt.capture import watch
from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.recipes import seeing
from overt.recipes.asking import Given, ask
from overt.recipes.looking import view
from overt.recipes.opening import Subject, open_model
from overt.recipes.seeing import Wish
from overt.show.panel import geometry, grids
from tests.recipes import foreign

TEXT = "the small red ball lies on the grassland"
PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    shelf = foreign.Shelf(tmp_path_factory.mktemp("models"))
    return {name: open_model(shelf[name]) for name in foreign.MAKERS}


def test_sequences_of_one_length_are_told_apart_by_their_module() -> None:
    call: Any = SimpleNamespace(cross=False, name="text_model.layers.0.attn")
    assert seeing._likeliest(["vision", "text"], call, 2) == "text"
    call = SimpleNamespace(cross=True, name="decoder.layers.0.encoder_attn")
    assert seeing._likeliest(["encoder", "decoder"], call, 2) == "decoder"
    assert seeing._likeliest(["encoder", "decoder"], call, 3) == "encoder"


def test_a_map_too_large_to_keep_is_one_query(subjects: dict[str, Subject]) -> None:
    whole = view(subjects["gpt2"], Given(TEXT)).panels[0]
    viewed = view(subjects["gpt2"], Given(TEXT), Wish(most=100))
    (one,), (choice,) = viewed.panels, viewed.choices
    assert one.queries == ("land",) and "numbers; this has one query" in one.about
    torch.testing.assert_close(one.attention.weights, whole.attention.weights[..., [-1], :])
    (ball,) = view(subjects["gpt2"], Given(TEXT), Wish(query="ball", most=100)).panels
    torch.testing.assert_close(ball.attention.weights, whole.attention.weights[..., [3], :])
    assert choice.query == 0


def test_relevance_is_read_where_the_answer_is_made(subjects: dict[str, Subject]) -> None:
    transformers = foreign.transformers
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=40, **foreign.SIZES)
    model = foreign.lively(transformers.BertForSequenceClassification(config))
    subject = Subject("bert", model, tokenizer=subjects["bert"].tokenizer)
    assert view(subject, Given(TEXT), Wish(way="relevance")).choices[0].query == 0  # [CLS]
    for way in ("raw", "rollout"):
        assert view(subject, Given(TEXT), Wish(way=way)).choices[0].query == 0
    assert view(subject, Given(TEXT), Wish(query="mean")).choices[0].query is None
    assert view(subjects["bert"], Given(TEXT)).choices[0].query is None  # it answers nothing
    asked = view(subject, Given(TEXT), Wish(way="relevance", query="ball"))
    assert asked.choices[0].query == 4


def test_a_query_that_is_no_position_is_called_global() -> None:
    """SigLIP looks at its patches from one learned query."""
    transformers = foreign.transformers
    config = transformers.SiglipVisionConfig(image_size=32, patch_size=8, **foreign.SIZES)
    pixels = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    model = transformers.SiglipVisionModel(config).eval()
    viewed = view(Subject("siglip", model, image_processor=pixels), Given(None, PHOTO))
    head = viewed.panels[-1]
    assert head.queries == ("global",) and head.keys[0] == "image 0,0"
    assert viewed.choices[-1].query == 0


def test_positions_have_their_words_and_cells(subjects: dict[str, Subject]) -> None:
    (text,) = view(subjects["bert"], Given(TEXT)).panels
    words = ["[CLS]", *TEXT.replace("grassland", "grass land").split(), "[SEP]"]
    assert list(text.keys) == words
    assert text.attention.keys.find("text").geometry.texts == (TEXT,)  # type: ignore[union-attr]
    (photo,) = view(subjects["dino"], Given(None, PHOTO)).panels
    assert photo.keys[:5] == ("class", "registers 0", "registers 1", "registers 2", "image 0,0")
    assert photo.photos["image"] is PHOTO
    _, language = view(subjects["llava"], Given("what is this", PHOTO)).panels
    assert language.keys[0] == "image 0,0" and language.keys[-3:] == ("what", "is", "this")
    cross = view(subjects["t5"], Given(TEXT)).panels[2]
    assert cross.queries[0] == "[PAD]" and list(cross.keys) == words and not cross.same


@pytest.mark.parametrize("way", ["values", "gradient", "rollout", "relevance"])
@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_derived_maps_are_those_of_the_library(
    subjects: dict[str, Subject], name: str, way: str
) -> None:
    from overt.capture.derived import gradients, rolling, values

    subject = subjects[name]
    given = Given(TEXT) if name == "gpt2" else Given(None, PHOTO)
    (found,) = view(subject, given, Wish(way=way)).panels
    asked = ask(subject, given)
    with watch(subject.model) as seen:
        logits = asked.call(asked.inputs).logits
    target = (logits[:, -1] if logits.ndim == 3 else logits).amax()
    wanted = {
        "values": lambda: (
            values.value_norms(seen, None, values.projection_in(subject.model)).values
        ),
        "gradient": lambda: gradients.gradient_attention(seen, target).values.clamp_min(0),
        "rollout": lambda: rolling.rollout(seen).values,
        "relevance": lambda: gradients.relevance(seen, target).values,
    }[way]()
    torch.testing.assert_close(found.attention.values, wanted.detach())
    assert seeing.MAPS[way] in found.about
    assert all(p.grad is None for p in subject.model.parameters())


def test_a_map_that_explains_needs_an_answer(subjects: dict[str, Subject]) -> None:
    with pytest.raises(BadInput, match=r"BertModel\) gives no scores that a map could explain"):
        view(subjects["bert"], Given(TEXT), Wish(way="relevance"))


def test_the_photo_is_placed_by_the_processor(subjects: dict[str, Subject]) -> None:
    (one,) = view(subjects["dino"], Given(None, PHOTO)).panels
    (span,) = grids(one.attention.keys)
    wanted = PixelGeometry.identity(1, (60, 90)).resize((40, 60)).crop(4, 14, 32, 32)
    found = geometry(span)
    assert found is not None
    torch.testing.assert_close(found.cells((4, 4)), wanted.cells((4, 4)), atol=0.1, rtol=0)


def test_windows_are_shown_one_and_a_layout_that_is_not_known_is_said() -> None:
    transformers = foreign.transformers
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4
    )
    subject = Subject(
        "swin",
        transformers.SwinModel(config).eval(),
        image_processor=transformers.ViTImageProcessor(size={"height": 32, "width": 32}),
    )
    viewed = view(subject, Given(None, PHOTO))
    (one,) = viewed.panels
    assert "in 4 windows by themselves; this is the first" in one.about
    assert len(one.keys) == 16 and one.keys[3] == "3"
    assert any("could not be told: swin attends inside windows" in note for note in viewed.notes)
    with pytest.raises(BadInput, match="in 4 windows, and what passes through them"):
        view(subject, Given(None, PHOTO), Wish(way="rollout"))


def captioners() -> dict[str, Any]:
    """Models that write about a picture alone: one decoder reads, the other has its own name."""
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
def test_a_model_that_captions_is_shown_writing_about_a_picture_alone(
    subjects: dict[str, Subject], name: str
) -> None:
    torch.manual_seed(0)
    model = foreign.lively(captioners()[name])
    pixels = foreign.transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    tokenizer = subjects["bert"].tokenizer
    subject = Subject(name, model, image_processor=pixels, tokenizer=tokenizer)
    viewed = view(subject, Given(None, PHOTO))
    cross = viewed.panels[-1]
    assert "cross-attention" in cross.title and cross.keys[1] == "image 0,0"
    seen = ask(subject, Given(None, PHOTO)).inputs["pixel_values"]
    (written,) = model.generate(pixel_values=seen, max_new_tokens=32, do_sample=False).tolist()
    words = [tokenizer.decode([one]).strip() for one in written[:-1]]
    assert list(cross.queries) == [word or str(at) for at, word in enumerate(words)]
    said = tokenizer.decode(written, skip_special_tokens=True)
    told = f"It writes: {said}" if said.strip() else "It writes nothing that can be read."
    assert told in viewed.notes and viewed.answers[0][0] == said


def test_a_model_that_is_asked_about_a_picture_still_wants_a_question(
    subjects: dict[str, Subject],
) -> None:
    for name in ("blip", "llava"):
        with pytest.raises(BadInput, match="wants a picture and a text together"):
            view(subjects[name], Given(None, PHOTO))
