"""Every position of a model's sequence is named, and models that are not known are refused."""

import importlib
import inspect

import numpy as np
import pytest
import torch
from PIL import Image

from overt.attention import AttentionMap
from overt.capture.layouts.hf_layouts import layout_of, layouts_of
from overt.capture.layouts.image_tokens import batch_images

transformers = pytest.importorskip("transformers", reason="models come from transformers")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers are built with tokenizers")

TEXTS = ["the red ring", "a dog turns round the ring"]
WORDS = "[PAD] [UNK] [CLS] [SEP] the red ring a dog turns round".split()
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 20,
}
PHOTO = {"image_size": 32, "patch_size": 8}
SIZES = [(60, 100), (90, 50)]
BOXES = [(24, 12, 54, 40), (10, 50, 30, 78)]


def tokenizer(side="right"):
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", padding_side=side, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def processor(folder, **changes):
    where = f"transformers.models.{folder}.image_processing_pil_{folder}"
    module = importlib.import_module(where)
    (name,) = {
        n for n, c in vars(module).items() if n.endswith("ProcessorPil") and c.__module__ == where
    }
    return getattr(module, name)(**changes)


def photo(size, box=None):
    pixels = np.full((*size, 3), 40, np.uint8)
    if box is not None:
        pixels[box[1] : box[3], box[0] : box[2]] = 230
    return Image.fromarray(pixels)


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL)).eval()


def test_bert_with_padding():
    words = tokenizer()
    inputs = words(TEXTS, padding=True, return_tensors="pt")
    layout = layout_of(bert(), inputs, tokenizer=words, texts=TEXTS)
    assert len(layout) == inputs["input_ids"].shape[1]
    assert layout.find("text").index.tolist() == [[1, 2, 3, -1, -1, -1], [1, 2, 3, 4, 5, 6]]
    assert layout.find("special").index.tolist() == [[4], [7]]
    assert layout.find("class").index == slice(0, 1)
    assert layout.find("text").geometry.tokens(0) == ["the", "red", "ring", "", "", ""]


def test_the_spans_choose_blocks_of_a_real_map():
    words = tokenizer("left")
    inputs = words(TEXTS, padding=True, return_tensors="pt")
    layout = layout_of(bert(), inputs, tokenizer=words, texts=TEXTS)
    n = len(layout)
    values = torch.rand(2, 1, 1, n, n)
    block = AttentionMap(values, layout, layout).block("class", "text")
    assert block.values[0, 0, 0, 0, :3].tolist() == values[0, 0, 0, 3, 4:7].tolist()
    assert block.keys.find("text").geometry.tokens(0)[:3] == ["the", "red", "ring"]


def test_pairs_of_texts():
    words = tokenizer()
    pairs = [("the ring", "a dog"), ("red", "turns round")]
    inputs = words(["the ring", "red"], ["a dog", "turns round"], padding=True, return_tensors="pt")
    layout = layout_of(bert(), inputs, tokenizer=words, texts=pairs)
    assert [span.name for span in layout.spans] == ["text", "text 2", "special", "class"]
    assert layout.find("text 2").geometry.tokens(1) == ["turns", "round"]
    assert layout.find("text 2").index.tolist() == [[4, 5], [3, 4]]


def test_without_texts_special_tokens_are_known_by_the_tokenizer():
    words = tokenizer()
    inputs = words(TEXTS, padding=True, return_tensors="pt")
    layout = layout_of(bert(), inputs, tokenizer=words)
    assert layout.find("special").index.tolist() == [[4], [7]]
    assert layout.find("text").geometry is None
    bare = layout_of(bert(), inputs)
    assert [span.name for span in bare.spans] == ["text"]
    assert bare.find("text").index[0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_the_class_token_of_a_text_has_a_span_and_is_in_no_other():
    words = tokenizer("left")
    inputs = words(TEXTS, padding=True, return_tensors="pt")
    for texts in (None, TEXTS):
        layout = layout_of(bert(), inputs, tokenizer=words, texts=texts)
        assert layout.find("class").index.tolist() == [[3], [0]]
        assert layout.find("special").index == slice(7, 8)
    assert not any(span.name == "class" for span in layout_of(bert(), inputs).spans)


def test_a_causal_model_padded_on_the_left():
    words = tokenizer("left")
    inputs = words(TEXTS, padding=True, add_special_tokens=False, return_tensors="pt")
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1)
    layout = layout_of(transformers.LlamaModel(config), inputs, tokenizer=words, texts=TEXTS)
    assert layout.find("text").index[0, :3].tolist() == [3, 4, 5]
    assert layout.find("text").geometry.tokens(0)[:3] == ["the", "red", "ring"]


def test_an_encoder_and_a_decoder_have_a_layout_each():
    words = tokenizer()
    inputs = dict(words(TEXTS, padding=True, return_tensors="pt"))
    inputs["decoder_input_ids"] = torch.tensor([[2, 4, 5], [2, 7, 8]])
    config = transformers.T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20
    )
    model = transformers.T5Model(config)
    found = layouts_of(model, inputs, tokenizer=words, texts=TEXTS)
    assert {name: len(layout) for name, layout in found.items()} == {"encoder": 8, "decoder": 3}
    assert found["decoder"].find("text").index == slice(1, 3)
    with pytest.raises(ValueError, match=r"decoder.*encoder"):
        layout_of(model, inputs)
    assert len(layout_of(model, inputs, part="decoder")) == 3


def test_an_image_encoder_with_its_photos():
    images = processor("vit", size={"height": 32, "width": 32})
    given = images([photo(size) for size in SIZES], return_tensors="pt")
    model = transformers.ViTModel(transformers.ViTConfig(**{**SMALL, **PHOTO}))
    layout = layout_of(model, given, processor=images, images=[photo(size) for size in SIZES])
    assert [span.name for span in layout.spans] == ["class", "image"]
    geometry = layout.find("image").geometry
    assert geometry.size.tolist() == [[60, 100], [90, 50]]
    assert geometry.cells((4, 4))[0, 5].tolist() == pytest.approx([25, 15, 50, 30])
    assert len(layout) == 17
    assert layout_of(model, given).find("image").geometry is None


def two_towers(name):
    words = {**SMALL, "max_position_embeddings": 16}
    kind = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}Model")(
        kind(text_config=words, vision_config={**SMALL, **PHOTO})
    )
    return model.eval()


@pytest.mark.parametrize(("name", "extra"), [("CLIP", 1), ("Siglip", 0), ("Blip", 1)])
def test_two_encoders_side_by_side(name, extra):
    images = processor("clip", size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    words = tokenizer()
    inputs = dict(words(TEXTS, padding=True, return_tensors="pt"))
    inputs.update(images([photo(size) for size in SIZES], return_tensors="pt"))
    found = layouts_of(
        two_towers(name), inputs, processor=images, tokenizer=words, images=SIZES, texts=TEXTS
    )
    assert sorted(found) == ["text", "vision"]
    assert found["vision"].find("image").index == slice(extra, extra + 16)
    assert found["vision"].find("image").geometry.kept[0].tolist()[1::2] == [0, 60]
    assert len(found["text"]) == 8


def test_a_processor_brings_its_tokenizer():
    class Both:
        image_processor = processor("vit", size={"height": 32, "width": 32})

    Both.tokenizer = tokenizer()
    inputs = dict(Both.tokenizer(TEXTS, padding=True, return_tensors="pt"))
    inputs.update(Both.image_processor([photo(size) for size in SIZES], return_tensors="pt"))
    found = layouts_of(two_towers("CLIP"), inputs, processor=Both(), images=SIZES, texts=TEXTS)
    assert found["text"].find("text").geometry.texts == tuple(TEXTS)


def vilt():
    config = transformers.ViltConfig(**SMALL, **PHOTO, max_image_length=-1)
    return transformers.ViltModel(config).eval()


def entering(model, inputs):
    kept = []
    hook = model.encoder.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return kept[0]


def test_vilt_draws_its_patches_in_the_order_that_the_layout_names():
    torch.manual_seed(3)
    model, words = vilt(), tokenizer()
    images = processor("vilt", size={"shortest_edge": 32}, size_divisor=8)

    def given(boxes):
        photos = [photo(size, box) for size, box in zip(SIZES, boxes, strict=True)]
        made = {**words(TEXTS, padding=True, return_tensors="pt")}
        return {**made, **images(photos, return_tensors="pt")}

    inputs = given([None, None])
    state = torch.get_rng_state()
    layout = layout_of(model, inputs, images, words, SIZES, TEXTS)
    assert torch.equal(state, torch.get_rng_state())
    before = entering(model, inputs)
    torch.set_rng_state(state)
    after = entering(model, given(BOXES))
    assert before.shape[1] == len(layout)
    assert [span.name for span in layout.spans] == ["text", "special", "class", "image"]
    change = (before - after).abs().amax(dim=-1)
    moved = change > 0.02 * change.max()
    image = layout.find("image")
    boxes = torch.tensor(BOXES, dtype=torch.float32)[:, None]
    cover = image.geometry.cover_boxes(boxes, image.shape)[:, 0]
    reach = image.geometry.cover_boxes(boxes + torch.tensor([-6.0, -6.0, 6.0, 6.0]), image.shape)[
        :, 0
    ]
    for sample in range(2):
        changed = moved[sample, image.index[sample].clamp_min(0)]
        there = image.index[sample] >= 0
        assert changed[there & (cover[sample] > 0.1)].all()
        assert not changed[there & (reach[sample] == 0)].any()
        assert changed[there].any()
        assert (cover[sample][~there] == 0).all()
    assert len(set(image.index[0][image.index[0] >= 0].tolist())) == (image.index[0] >= 0).sum()


def test_vilt_in_training_is_refused():
    model, words = vilt().train(), tokenizer()
    inputs = {**words(["a"], return_tensors="pt"), "pixel_values": torch.zeros(1, 3, 32, 32)}
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        layout_of(model, inputs)


@pytest.mark.newer("transformers>=5")
def test_detr_reads_a_feature_map_and_asks_queries():
    config = transformers.DetrConfig(
        backbone_config=transformers.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 4, 4, 4], depths=[1, 1, 1, 1],
            out_features=["stage4"],
        ),
        d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_queries=7,
    )  # fmt: skip
    model = transformers.DetrModel(config).eval()
    images = processor("detr", size={"shortest_edge": 70, "longest_edge": 120})
    inputs = images([photo(size) for size in SIZES], return_tensors="pt")
    found = layouts_of(model, dict(inputs), processor=images, images=SIZES)
    with torch.no_grad():
        given = model(**inputs)
    assert given.encoder_last_hidden_state.shape[1] == len(found["encoder"])
    assert given.last_hidden_state.shape[1] == len(found["decoder"])
    assert found["decoder"].find("queries").shape == (7,)
    image = found["encoder"].find("image")
    cover = image.geometry.cover_boxes(
        torch.tensor([[[0.0, 0, 100, 60]], [[0, 0, 50, 90]]]), image.shape
    )
    assert image.shape == tuple(-(-n // 32) for n in inputs["pixel_values"].shape[-2:])
    assert cover[0, 0].reshape(image.shape)[0, 0] == 1


@pytest.mark.parametrize("name", ["Swin", "Swinv2"])
def test_windows_are_refused_with_the_grids_there_are(name):
    config = getattr(transformers, f"{name}Config")(
        image_size=32, patch_size=4, embed_dim=4, depths=[1], num_heads=[1], window_size=4
    )
    model = getattr(transformers, f"{name}Model")(config)
    with pytest.raises(ValueError, match="stage_grids"):
        layout_of(model, {"pixel_values": torch.zeros(1, 3, 32, 32)})


def test_what_is_missing_or_unknown_is_said():
    with pytest.raises(ValueError, match=r"vilt.*'input_ids'"):
        layout_of(vilt(), {"input_ids": torch.ones(1, 2).long()})
    with pytest.raises(ValueError, match="tokenizer="):
        layout_of(bert(), {"input_ids": torch.ones(1, 2).long()}, texts=["a"])
    with pytest.raises(ValueError, match="processor="):
        layout_of(bert(), {"pixel_values": torch.ones(1, 3, 8, 8)}, images=[(8, 8)])
    with pytest.raises(ValueError, match=r"bert.*'input_values'.*by hand"):
        layout_of(bert(), {"input_values": torch.ones(1, 9)})


_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
_PYRAMID = {
    "image_size": 32,
    "hidden_sizes": [8, 8, 16, 16],
    "num_attention_heads": [1, 1, 2, 2],
    "depths": [1] * 4,
}


def test_patches_in_another_order_or_of_several_sizes_are_refused():
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32)}
    config = transformers.ViTMAEConfig(**_SMALL, image_size=32, patch_size=8, mask_ratio=0.0)
    shuffled = transformers.ViTMAEModel(config).eval()
    with pytest.raises(ValueError, match=r"ViTMAEModel.*random"):
        layouts_of(shuffled, pixels)
    with pytest.raises(ValueError, match="PvtModel merges patches"):
        layouts_of(transformers.PvtModel(transformers.PvtConfig(**_PYRAMID)).eval(), pixels)


def test_audio_codes_are_not_called_text():
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "ffn_dim": 16}
    config = transformers.MusicgenDecoderConfig(**sizes, num_attention_heads=2)
    model = transformers.MusicgenForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"input_ids.*musicgen_decoder"):
        layouts_of(model, {"input_ids": torch.randint(0, 19, (8, 6))})


def test_the_text_that_a_decoder_writes_about_an_image_has_its_own_layout():
    encoder = transformers.ViTConfig(**_SMALL, image_size=32, patch_size=8)
    decoder = transformers.BertConfig(**_SMALL, vocab_size=99)
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.VisionEncoderDecoderModel(both).eval()
    given = {
        "pixel_values": torch.randn(2, 3, 32, 32),
        "decoder_input_ids": torch.ones(2, 5).long(),
    }
    found = layouts_of(model, given)
    assert {name: len(one) for name, one in found.items()} == {"encoder": 17, "decoder": 5}
    windows = transformers.DonutSwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1])
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(windows, decoder)
    with pytest.raises(ValueError, match=r"donut-swin.*windows"):
        layouts_of(_Configured(both), given)


def test_a_name_in_place_of_a_model_is_refused():
    with pytest.raises(TypeError, match=r"Module.*str"):
        layouts_of("bert-base-uncased", {"input_ids": torch.zeros(1, 4, dtype=torch.long)})


def test_a_tensor_in_place_of_the_inputs_is_refused():
    with pytest.raises(TypeError, match="(?i)mapping"):
        layouts_of(torch.nn.Linear(1, 1), torch.zeros(1, 3, 32, 32))


class _Configured(torch.nn.Module):
    """A model by its config alone."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config


def test_photos_and_pixels_of_another_kind_are_refused_with_a_remedy():
    images = processor("vit", size={"height": 32, "width": 32})
    model = transformers.ViTModel(transformers.ViTConfig(**{**SMALL, **PHOTO}))
    unchecked = inspect.unwrap(batch_images)  # without the type checks of the test suite
    with pytest.raises(TypeError, match=r"images=\[photo\]"):
        unchecked(images, np.zeros((60, 100, 3), np.uint8))
    given = {"pixel_values": torch.rand(1, 3, 32, 32)}
    with pytest.raises(TypeError, match=r"str.*Image\.open"):
        layout_of(model, given, processor=images, images=["cat.png"])
    with pytest.raises(ValueError, match=r"32\).*\[None\]"):
        layout_of(model, {"pixel_values": torch.rand(3, 32, 32)})
