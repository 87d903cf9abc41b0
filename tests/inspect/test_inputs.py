"""Model inputs: images and texts, processors, captions, removed words, and unsupported inputs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from overt.errors import CorruptFileError, RunError, UserError
from overt.inspect.inputs import (
    ModelInput,
    PreparedCall,
    cover_removed,
    estimate_flops,
    is_image_path,
    load_photo,
    prepare_call,
    read_inputs,
    run_model,
    trace_origin,
)
from overt.inspect.load_model import load_model
from overt.inspect.loaded_model import LoadedModel
from tests.experiments import foreign

TEXT = "the small red ball lies on the grassland"
PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


def test_image_paths_are_files_or_names_with_an_image_suffix(tmp_path: Path) -> None:
    path = foreign.photo(tmp_path / "p.png").rename(tmp_path / "photo")
    assert is_image_path(str(path)) and is_image_path("gone.JPG") and is_image_path("a/b.webp")
    assert (
        not is_image_path(TEXT) and not is_image_path("see photo.png") and not is_image_path("dog")
    )
    assert (
        not is_image_path("x" * 5000)
        and not is_image_path("\0")
        and not is_image_path(str(tmp_path))
    )


def test_read_inputs_rejects_unreadable_images_and_invalid_texts(tmp_path: Path) -> None:
    given = read_inputs([TEXT, str(foreign.photo(tmp_path / "p.png", (60, 90)))])
    assert given.text == TEXT and given.photo.shape == (60, 90, 3)
    with pytest.raises(UserError, match=r"gone\.png.*read"):
        read_inputs([str(tmp_path / "gone.png")])
    (tmp_path / "note.txt").write_text("words")
    with pytest.raises(UserError, match=r"note\.txt.*JPEG.*PNG.*WEBP"):
        read_inputs([str(tmp_path / "note.txt")])
    (tmp_path / "cut.png").write_bytes((tmp_path / "p.png").read_bytes()[:60])
    with pytest.raises(CorruptFileError, match=r"cut.png"):
        read_inputs([str(tmp_path / "cut.png")])
    with pytest.raises(UserError, match="text is empty"):
        read_inputs(["  "])
    with pytest.raises(UserError, match="not valid UTF-8"):
        read_inputs(["dog \udcff"])


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("bert", ModelInput(None, PHOTO), "text, not images"),
        ("vit", ModelInput(TEXT), "images, not text"),
        ("vit", ModelInput(TEXT, PHOTO), "images, not text"),
        ("llava", ModelInput(TEXT), "image.* text"),
        ("llava", ModelInput(None, PHOTO), "image.* text"),
    ],
)
def test_unsupported_inputs_raise_a_user_error(
    shelf: foreign.Shelf, name: str, given: ModelInput, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare_call(load_model(shelf[name]), given)


def test_audio_models_are_rejected() -> None:
    transformers = foreign.transformers
    config = transformers.Wav2Vec2Config(
        **foreign.SIZES, conv_dim=(8,), conv_kernel=(4,), conv_stride=(2,),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_feat_extract_layers=1,
    )  # fmt: skip
    loaded = LoadedModel("sound", transformers.Wav2Vec2Model(config))
    with pytest.raises(UserError, match=r"text.*input_values"):
        prepare_call(loaded, ModelInput(TEXT))


def test_a_model_without_its_processor_raises(shelf: foreign.Shelf) -> None:
    vit, bert = load_model(shelf["vit"]), load_model(shelf["bert"])
    with pytest.raises(UserError, match="preprocessor_config"):
        prepare_call(LoadedModel("vit", vit.model), ModelInput(None, PHOTO))
    with pytest.raises(UserError, match="no tokenizer files"):
        prepare_call(LoadedModel("bert", bert.model), ModelInput(TEXT))


def test_inputs_equal_those_of_the_processors(shelf: foreign.Shelf) -> None:
    loaded = load_model(shelf["bert"])
    prepared = prepare_call(loaded, ModelInput(TEXT))
    expected = loaded.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    torch.testing.assert_close(prepared.inputs["input_ids"], expected)
    assert prepared.text == TEXT and prepared.notes == ()
    vit = load_model(shelf["vit"])
    prepared = prepare_call(vit, ModelInput(None, PHOTO))
    assert prepared.inputs["pixel_values"].shape == (1, 3, 32, 32)
    vit.model.to(torch.bfloat16)
    assert prepare_call(vit, ModelInput(None, PHOTO)).inputs["pixel_values"].dtype == torch.bfloat16


def test_two_encoders_run_separately_or_together(shelf: foreign.Shelf) -> None:
    loaded = load_model(shelf["clip"])
    with torch.no_grad():
        text, photo, both = (
            one.call(one.inputs)
            for one in (
                prepare_call(loaded, ModelInput(TEXT)),
                prepare_call(loaded, ModelInput(None, PHOTO)),
                prepare_call(loaded, ModelInput(TEXT, PHOTO)),
            )
        )
    torch.testing.assert_close(
        text.last_hidden_state, both.text_model_output.last_hidden_state, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        photo.last_hidden_state, both.vision_model_output.last_hidden_state, atol=1e-5, rtol=1e-5
    )


def test_a_long_text_is_truncated_with_a_note(shelf: foreign.Shelf) -> None:
    prepared = prepare_call(load_model(shelf["bert"]), ModelInput("dog " * 100))
    assert prepared.inputs["input_ids"].shape[1] == 40
    assert prepared.notes == ("The text was truncated to 40 tokens.",)


def test_a_seq2seq_model_gets_its_generated_text_as_decoder_input(shelf: foreign.Shelf) -> None:
    loaded = load_model(shelf["t5"])
    prepared = prepare_call(loaded, ModelInput(TEXT))
    wanted = loaded.model.generate(prepared.inputs["input_ids"], max_new_tokens=32, do_sample=False)
    torch.testing.assert_close(prepared.inputs["decoder_input_ids"], wanted[:, :-1])


def test_a_chat_model_gets_the_image_before_the_text(shelf: foreign.Shelf) -> None:
    loaded = load_model(shelf["llava"])
    prepared = prepare_call(loaded, ModelInput("what is this", PHOTO))
    assert prepared.text == "<image>\nwhat is this"
    assert int((prepared.inputs["input_ids"] == 4).sum()) == 16
    loaded.processor.chat_template = (
        "{% for m in messages %}USER: {% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
    )
    prepared = prepare_call(loaded, ModelInput("what is this", PHOTO))
    assert prepared.text == "USER: <image>what is this ASSISTANT:"


def test_a_text_with_the_mark_of_an_image_raises(shelf: foreign.Shelf) -> None:
    loaded = load_model(shelf["llava"])
    for text in ("<image> what", "what <image>"):  # as prompts are written elsewhere
        prepared = prepare_call(loaded, ModelInput(text, PHOTO))
        assert int((prepared.inputs["input_ids"] == 4).sum()) == 16
    with pytest.raises(UserError, match="'<image>' 2 times"):
        prepare_call(loaded, ModelInput("<image> <image> what", PHOTO))
    loaded.processor.chat_template = "{{ messages }}"
    with pytest.raises(UserError, match="leave it out"):
        prepare_call(loaded, ModelInput("<image> what", PHOTO))


def test_an_error_of_a_processor_is_one_line(shelf: foreign.Shelf) -> None:
    loaded = load_model(shelf["llava"])
    loaded.processor.chat_template = "<image> <image>"  # more marks than images
    with pytest.raises(RunError, match="processor .*failed"):
        prepare_call(loaded, ModelInput("what", PHOTO))


def test_timm_models_take_an_image_only() -> None:
    shapes: list[Any] = []

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shapes.append(x.shape)
            return x

    def transform(picture: Any) -> torch.Tensor:
        return torch.zeros(3, *picture.size)

    loaded = LoadedModel("timm:x", Model(2, 2), transform=transform)
    prepared = prepare_call(loaded, ModelInput(None, PHOTO))
    prepared.call(prepared.inputs)
    assert shapes == [(1, 3, 90, 60)]
    with pytest.raises(UserError, match=r"images.*text"):
        prepare_call(loaded, ModelInput(TEXT))


def test_an_error_of_the_model_raises_a_run_error() -> None:
    def fail(inputs: Any) -> Any:
        raise AssertionError("Input height (224) doesn't match model (64).\nMore.")

    message = r"odd .*\(AssertionError: .* \(64\)\)\."
    with pytest.raises(RunError, match=message):
        run_model("odd", PreparedCall({}, fail, ModelInput()))

    def exhaust(inputs: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        run_model("odd", PreparedCall({}, exhaust, ModelInput()))


def test_load_photo_reads_an_image(tmp_path: Path) -> None:
    assert load_photo(str(foreign.photo(tmp_path / "p.png", (60, 90)))).shape == (60, 90, 3)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_estimated_flops_are_within_a_factor_of_two(shelf: foreign.Shelf, name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    loaded = load_model(shelf[name])
    tokens = torch.ones(1, 32, dtype=torch.long)
    loaded.model.set_attn_implementation("eager")  # the counter counts plain products
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        loaded.model(input_ids=tokens)
    estimated = estimate_flops(loaded.model, 32)
    assert counter.get_total_flops() / 2 < estimated < 2 * counter.get_total_flops()


# Character positions of words


def align_text(prepared: PreparedCall, text: str) -> list[tuple[str, str]]:
    """Return pieces of the shown text with the pieces of the given text they stand for."""
    assert prepared.text is not None
    if prepared.origin is None:
        return [(prepared.text, text)]
    return [(prepared.text[a:b], text[c:d]) for a, b, c, d in prepared.origin]


def test_positions_of_words_are_kept_when_others_are_removed(shelf: foreign.Shelf) -> None:
    loaded = load_model(shelf["bert"])
    text = "the small red ball"
    assert align_text(prepare_call(loaded, ModelInput(text)), text) == [(text, text)]
    masks = replace(loaded, tokenizer=SimpleNamespace(mask_token="[MASK]"))
    given, _ = cover_removed(masks, ModelInput(text, removed_ranges=((10, 13), (4, 9))))
    assert align_text(prepare_call(loaded, given), text) == [
        ("the ", "the "), ("[MASK]", "small"), (" ", " "), ("[MASK]", "red"), (" ball", " ball"),
    ]  # fmt: skip
    given, _ = cover_removed(
        loaded, ModelInput(text, removed_ranges=((4, 9), (6, 13)))
    )  # without a mask token
    assert given.text == "the  ball" and given.origin == ((0, 4, 0, 4), (4, 9, 13, 18))


def test_positions_of_words_are_found_inside_a_prompt(shelf: foreign.Shelf) -> None:
    text = "what is this"
    prepared = prepare_call(load_model(shelf["llava"]), ModelInput(text, PHOTO))
    assert prepared.text != text and align_text(prepared, text) == [(text, text)]
    assert trace_origin(ModelInput(text), "something else") == ()


# One image and several captions

CAPTIONS = "a red ball\n\n  the small dog \ngrass"


def test_several_captions_are_scored_for_an_image(shelf: foreign.Shelf) -> None:
    loaded = load_model(shelf["clip"])
    prepared = prepare_call(loaded, ModelInput(CAPTIONS, PHOTO))
    lines = [line.strip() for line in CAPTIONS.splitlines() if line.strip()]
    assert [line for line, _ in prepared.captions] == lines
    with torch.no_grad():  # one at a time, without padding
        each = [
            prepare_call(loaded, ModelInput(line, PHOTO)).call(
                prepare_call(loaded, ModelInput(line, PHOTO)).inputs
            )
            for line in lines
        ]
    scores = torch.cat([one.logits_per_image[0] for one in each])
    chances = torch.tensor([chance for _, chance in prepared.captions])
    torch.testing.assert_close(chances, scores.softmax(dim=-1), atol=1e-5, rtol=1e-4)
    assert prepared.text == lines[int(scores.argmax())]  # the view is of the best caption
    assert align_text(prepared, CAPTIONS) == [(prepared.text, prepared.text)]


def test_one_caption_is_not_ranked(shelf: foreign.Shelf) -> None:
    prepared = prepare_call(load_model(shelf["clip"]), ModelInput("a red ball", PHOTO))
    assert prepared.captions == () and prepared.text == "a red ball" and prepared.origin is None


def test_too_many_captions_are_rejected(shelf: foreign.Shelf) -> None:
    with pytest.raises(UserError, match=r"65 captions.* 64"):
        prepare_call(load_model(shelf["clip"]), ModelInput("ball\n" * 65, PHOTO))


def test_siglip_captions_have_independent_probabilities() -> None:
    """SigLIP pads texts, and its probabilities are sigmoids per caption."""
    transformers = foreign.transformers
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    small |= {"num_hidden_layers": 1}
    config = transformers.SiglipConfig(
        text_config={"vocab_size": 30, "max_position_embeddings": 12, **small},
        vision_config={"image_size": 32, "patch_size": 8, **small},
    )
    reader = foreign.tokenizer()
    reader.model_max_length = 12
    pixels = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
    model = transformers.SiglipModel(config).eval()
    loaded = LoadedModel("siglip", model, tokenizer=reader, image_processor=pixels)
    both = prepare_call(loaded, ModelInput("a red ball\nthe small dog", PHOTO))
    [alone] = prepare_call(loaded, ModelInput("the small dog", PHOTO)).captions
    with torch.no_grad():
        score = model(
            **prepare_call(loaded, ModelInput("the small dog", PHOTO)).inputs
        ).logits_per_image
    assert alone == ("the small dog", pytest.approx(float(score.sigmoid()), abs=1e-6))
    assert both.captions[1] == ("the small dog", pytest.approx(alone[1], abs=1e-6))


def test_a_thin_image_is_rejected_before_the_processor(shelf: foreign.Shelf) -> None:
    """A processor would enlarge its short side: 300,000 x 1 pixels to 15 billion numbers."""
    for size in ((1, 300_000, 3), (300_000, 1, 3)):
        with pytest.raises(UserError, match="300000.* pixels"):
            prepare_call(load_model(shelf["vit"]), ModelInput(photo=np.zeros(size, dtype=np.uint8)))
