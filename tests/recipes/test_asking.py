"""Inputs: what is a picture and what a text, what each model takes, and what it cannot."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from overt.errors import BadInput, Damaged, Failed
from overt.recipes.asking import (
    Asked,
    Given,
    ask,
    hidden,
    is_picture,
    operations,
    photo,
    read,
    run,
    traced,
)
from overt.recipes.opening import Subject, open_model
from tests.recipes import foreign

TEXT = "the small red ball lies on the grassland"
PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> foreign.Shelf:
    return foreign.Shelf(tmp_path_factory.mktemp("models"))


def test_a_file_is_a_picture_and_so_is_a_name_that_ends_like_one(tmp_path: Path) -> None:
    path = foreign.photo(tmp_path / "p.png").rename(tmp_path / "photo")
    assert is_picture(str(path)) and is_picture("gone.JPG") and is_picture("a/b.webp")
    assert not is_picture(TEXT) and not is_picture("see photo.png") and not is_picture("dog")
    assert not is_picture("x" * 5000) and not is_picture("\0") and not is_picture(str(tmp_path))


def test_pictures_are_opened_by_the_one_door_for_pictures(tmp_path: Path) -> None:
    given = read([TEXT, str(foreign.photo(tmp_path / "p.png", (60, 90)))])
    assert given.text == TEXT and given.photo.shape == (60, 90, 3)
    with pytest.raises(BadInput, match=r"gone.png cannot be read"):
        read([str(tmp_path / "gone.png")])
    (tmp_path / "note.txt").write_text("words")
    with pytest.raises(BadInput, match=r"note.txt is not a JPEG, PNG or WEBP picture"):
        read([str(tmp_path / "note.txt")])
    (tmp_path / "cut.png").write_bytes((tmp_path / "p.png").read_bytes()[:60])
    with pytest.raises(Damaged, match=r"cut.png"):
        read([str(tmp_path / "cut.png")])
    with pytest.raises(BadInput, match="the text is empty"):
        read(["  "])
    with pytest.raises(BadInput, match="not UTF-8"):
        read(["dog \udcff"])


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("bert", Given(None, PHOTO), "does not look at pictures; give it a text"),
        ("vit", Given(TEXT), "does not read; give it a picture"),
        ("vit", Given(TEXT, PHOTO), "does not read; give it a picture"),
        ("llava", Given(TEXT), "wants a picture and a text together"),
        ("llava", Given(None, PHOTO), "wants a picture and a text together"),
    ],
)
def test_what_a_model_cannot_take_is_said(
    shelf: foreign.Shelf, name: str, given: Given, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        ask(open_model(shelf[name]), given)


def test_a_model_of_sound_is_told_from_one_of_pictures() -> None:
    transformers = foreign.transformers
    config = transformers.Wav2Vec2Config(
        **foreign.SIZES, conv_dim=(8,), conv_kernel=(4,), conv_stride=(2,),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_feat_extract_layers=1,
    )  # fmt: skip
    subject = Subject("sound", transformers.Wav2Vec2Model(config))
    with pytest.raises(BadInput, match="takes neither text nor pictures but input_values"):
        ask(subject, Given(TEXT))


def test_a_model_without_its_processor_is_asked_for_it(shelf: foreign.Shelf) -> None:
    vit, bert = open_model(shelf["vit"]), open_model(shelf["bert"])
    with pytest.raises(BadInput, match=r"no preprocessor_config.json"):
        ask(Subject("vit", vit.model), Given(None, PHOTO))
    with pytest.raises(BadInput, match="no tokenizer beside it"):
        ask(Subject("bert", bert.model), Given(TEXT))


def test_the_inputs_are_those_of_the_processors(shelf: foreign.Shelf) -> None:
    subject = open_model(shelf["bert"])
    asked = ask(subject, Given(TEXT))
    expected = subject.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    torch.testing.assert_close(asked.inputs["input_ids"], expected)
    assert asked.text == TEXT and asked.notes == ()
    vit = open_model(shelf["vit"])
    asked = ask(vit, Given(None, PHOTO))
    assert asked.inputs["pixel_values"].shape == (1, 3, 32, 32)
    vit.model.to(torch.bfloat16)
    assert ask(vit, Given(None, PHOTO)).inputs["pixel_values"].dtype == torch.bfloat16


def test_two_encoders_run_one_by_one_or_together(shelf: foreign.Shelf) -> None:
    subject = open_model(shelf["clip"])
    with torch.no_grad():
        text, photo, both = (
            one.call(one.inputs)
            for one in (
                ask(subject, Given(TEXT)), ask(subject, Given(None, PHOTO)),
                ask(subject, Given(TEXT, PHOTO)),
            )
        )  # fmt: skip
    torch.testing.assert_close(
        text.last_hidden_state, both.text_model_output.last_hidden_state, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        photo.last_hidden_state, both.vision_model_output.last_hidden_state, atol=1e-5, rtol=1e-5
    )


def test_a_long_text_is_cut_and_it_is_said(shelf: foreign.Shelf) -> None:
    asked = ask(open_model(shelf["bert"]), Given("dog " * 100))
    assert asked.inputs["input_ids"].shape[1] == 40
    assert asked.notes == ("The model reads 40 tokens: what comes after them was cut off.",)


def test_a_model_that_writes_is_given_what_it_would_write(shelf: foreign.Shelf) -> None:
    subject = open_model(shelf["t5"])
    asked = ask(subject, Given(TEXT))
    wanted = subject.model.generate(asked.inputs["input_ids"], max_new_tokens=32, do_sample=False)
    torch.testing.assert_close(asked.inputs["decoder_input_ids"], wanted[:, :-1])


def test_a_model_that_chats_gets_the_picture_before_the_words(shelf: foreign.Shelf) -> None:
    subject = open_model(shelf["llava"])
    asked = ask(subject, Given("what is this", PHOTO))
    assert asked.text == "<image>\nwhat is this"
    assert int((asked.inputs["input_ids"] == 4).sum()) == 16
    subject.processor.chat_template = (
        "{% for m in messages %}USER: {% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
    )
    asked = ask(subject, Given("what is this", PHOTO))
    assert asked.text == "USER: <image>what is this ASSISTANT:"


def test_timm_takes_a_picture_alone() -> None:
    seen: list[Any] = []

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape)
            return x

    def transform(picture: Any) -> torch.Tensor:
        return torch.zeros(3, *picture.size)

    subject = Subject("timm:x", Model(2, 2), transform=transform)
    asked = ask(subject, Given(None, PHOTO))
    asked.call(asked.inputs)
    assert seen == [(1, 3, 90, 60)]
    with pytest.raises(BadInput, match="does not read"):
        ask(subject, Given(TEXT))


def test_a_model_that_fails_on_its_input_is_said_to() -> None:
    def fail(inputs: Any) -> Any:
        raise AssertionError("Input height (224) doesn't match model (64).\nMore.")

    said = r"odd could not be run on this input \(AssertionError: Input height .* model \(64\)\)\."
    with pytest.raises(Failed, match=said):
        run("odd", Asked({}, fail, Given()))

    def exhaust(inputs: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        run("odd", Asked({}, exhaust, Given()))


def test_a_photo_is_read_alone(tmp_path: Path) -> None:
    assert photo(str(foreign.photo(tmp_path / "p.png", (60, 90)))).shape == (60, 90, 3)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_work_of_a_pass_is_told_to_a_factor_of_two(shelf: foreign.Shelf, name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    subject = open_model(shelf[name])
    tokens = torch.ones(1, 32, dtype=torch.long)
    subject.model.set_attn_implementation("eager")  # the counter knows plain products best
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        subject.model(input_ids=tokens)
    told = operations(subject.model, 32)
    assert counter.get_total_flops() / 2 < told < 2 * counter.get_total_flops()


# Where a word of the text stands


def spelled(asked: Asked, text: str) -> list[tuple[str, str]]:
    """What is shown, piece by piece, and what it stands for in the text that was given."""
    assert asked.text is not None
    if asked.origin is None:
        return [(asked.text, text)]
    return [(asked.text[a:b], text[c:d]) for a, b, c, d in asked.origin]


def test_words_are_found_again_when_others_are_covered(shelf: foreign.Shelf) -> None:
    subject = open_model(shelf["bert"])
    text = "the small red ball"
    assert spelled(ask(subject, Given(text)), text) == [(text, text)]
    masks = replace(subject, tokenizer=SimpleNamespace(mask_token="[MASK]"))
    given, _ = hidden(masks, Given(text, unsaid=((10, 13), (4, 9))))
    assert spelled(ask(subject, given), text) == [
        ("the ", "the "), ("[MASK]", "small"), (" ", " "), ("[MASK]", "red"), (" ball", " ball"),
    ]  # fmt: skip
    given, _ = hidden(subject, Given(text, unsaid=((4, 9), (6, 13))))  # it has no such sign
    assert given.text == "the  ball" and given.origin == ((0, 4, 0, 4), (4, 9, 13, 18))


def test_words_are_found_again_inside_a_prompt(shelf: foreign.Shelf) -> None:
    text = "what is this"
    asked = ask(open_model(shelf["llava"]), Given(text, PHOTO))
    assert asked.text != text and spelled(asked, text) == [(text, text)]
    assert traced(Given(text), "something else") == ()


# A picture and several captions

CAPTIONS = "a red ball\n\n  the small dog \ngrass"


def test_captions_are_held_against_a_picture(shelf: foreign.Shelf) -> None:
    subject = open_model(shelf["clip"])
    asked = ask(subject, Given(CAPTIONS, PHOTO))
    lines = [line.strip() for line in CAPTIONS.splitlines() if line.strip()]
    assert [line for line, _ in asked.captions] == lines
    with torch.no_grad():  # one by one, without padding
        each = [
            ask(subject, Given(line, PHOTO)).call(ask(subject, Given(line, PHOTO)).inputs)
            for line in lines
        ]
    scores = torch.cat([one.logits_per_image[0] for one in each])
    chances = torch.tensor([chance for _, chance in asked.captions])
    torch.testing.assert_close(chances, scores.softmax(dim=-1), atol=1e-5, rtol=1e-4)
    assert asked.text == lines[int(scores.argmax())]  # what is shown is how the best one is read
    assert spelled(asked, CAPTIONS) == [(asked.text, asked.text)]


def test_one_caption_is_compared_and_not_chosen(shelf: foreign.Shelf) -> None:
    asked = ask(open_model(shelf["clip"]), Given("a red ball", PHOTO))
    assert asked.captions == () and asked.text == "a red ball" and asked.origin is None


def test_too_many_captions_are_refused(shelf: foreign.Shelf) -> None:
    with pytest.raises(BadInput, match="65 captions are too many to choose from"):
        ask(open_model(shelf["clip"]), Given("ball\n" * 65, PHOTO))


def test_captions_are_judged_one_by_one_where_a_model_was_trained_so() -> None:
    """SigLIP: texts are filled up, and a chance is a caption's own."""
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
    subject = Subject("siglip", model, tokenizer=reader, image_processor=pixels)
    both = ask(subject, Given("a red ball\nthe small dog", PHOTO))
    [alone] = ask(subject, Given("the small dog", PHOTO)).captions
    with torch.no_grad():
        score = model(**ask(subject, Given("the small dog", PHOTO)).inputs).logits_per_image
    assert alone == ("the small dog", pytest.approx(float(score.sigmoid()), abs=1e-6))
    assert both.captions[1] == ("the small dog", pytest.approx(alone[1], abs=1e-6))
