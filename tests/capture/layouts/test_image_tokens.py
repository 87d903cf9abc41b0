"""A square is drawn on a photo, and the image tokens that change are the cells that it covers.

The image encoders are tiny and random, with attention switched off, so that what is drawn on a
cell stays with the cell until it reaches the language model.
"""

import importlib

import numpy as np
import pytest
import torch
from PIL import Image

from overt.capture.layouts.hf_layouts import layouts_of
from overt.capture.layouts.image_tokens import batch_images

transformers = pytest.importorskip("transformers", reason="models come from transformers")

TOKEN = 90
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
SIZES = [(60, 100), (90, 50)]
BOXES = [(24, 12, 54, 40), (10, 50, 30, 78)]


def processor(folder, **changes):
    where = f"transformers.models.{folder}.image_processing_pil_{folder}"
    module = importlib.import_module(where)
    (name,) = {
        n for n, c in vars(module).items() if n.endswith("ProcessorPil") and c.__module__ == where
    }
    return getattr(module, name)(**changes)


def llava(**vision):
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **VISION, **vision},
        text_config={"model_type": "llama", **TEXT},
        image_token_index=TOKEN,
    )
    squares = {"height": 32, "width": 32}
    return transformers.LlavaForConditionalGeneration(config), processor(
        "llava", size={"shortest_edge": 32}, crop_size=squares
    )


def llava_next():
    points = [[32, 64], [64, 32], [64, 64], [96, 32]]
    config = transformers.LlavaNextConfig(
        vision_config={"model_type": "clip_vision_model", **VISION},
        text_config={"model_type": "llama", **TEXT},
        image_token_index=TOKEN,
        image_grid_pinpoints=points,
    )
    squares = {"height": 32, "width": 32}
    made = processor(
        "llava_next", size={"shortest_edge": 32}, crop_size=squares, image_grid_pinpoints=points
    )
    return transformers.LlavaNextForConditionalGeneration(config), made


def qwen():
    config = transformers.Qwen2VLConfig(
        vision_config={
            "depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 8,
            "spatial_merge_size": 2,
        },
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2],
                                                 "rope_theta": 10000.0}},
        image_token_id=TOKEN, vision_start_token_id=91, vision_end_token_id=92,
        video_token_id=93,
    )  # fmt: skip
    made = processor("qwen2_vl", patch_size=8, size={"shortest_edge": 256, "longest_edge": 6400})
    return transformers.Qwen2VLForConditionalGeneration(config), made


def idefics():
    config = transformers.Idefics3Config(
        vision_config={**VISION, "model_type": "idefics3_vision"},
        text_config={"model_type": "llama", **TEXT},
        image_token_id=TOKEN,
        scale_factor=2,
    )
    made = processor("idefics3", size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return transformers.Idefics3ForConditionalGeneration(config), made


def photo(size, box=None):
    pixels = np.full((*size, 3), 40, np.uint8)
    if box is not None:
        pixels[box[1] : box[3], box[0] : box[2]] = 230
    return Image.fromarray(pixels)


def local(model):
    """Switch the attention of the image encoder off: nothing moves from cell to cell."""
    for name, parameter in model.named_parameters():
        within = "vision" in name or "visual" in name
        if within and ("out_proj" in name or "attn.proj" in name):
            parameter.data.zero_()
    return model.eval()


def rows(counts, before=(3, 1)):
    """Rows of ids with so many image tokens after some words, padded on the left."""
    ids = [[5] * words + [TOKEN] * n + [7, 8] for words, n in zip(before, counts, strict=True)]
    longest = max(map(len, ids))
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    return torch.tensor([[0] * (longest - len(row)) + row for row in ids]), mask


def embedded(model, inputs):
    """What enters the language model."""
    kept = []

    def keep(module, args, kwargs):
        kept.append(kwargs["inputs_embeds"])

    hook = model.model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return kept[0]


def features(model, given):
    """How many tokens the model makes of each photo."""
    if "image_grid_thw" in given:
        return (given["image_grid_thw"].prod(dim=1) // 4).tolist()
    if model.config.model_type == "llava":
        return [16] * len(given["pixel_values"])
    with torch.no_grad():
        made = model.model.get_image_features(
            given["pixel_values"],
            **({"image_sizes": given["image_sizes"]} if "image_sizes" in given else {}),
        ).pooler_output
    if model.config.model_type == "llava_next":
        return [len(one) for one in made]
    present = given["pixel_values"].flatten(2).abs().sum(dim=-1) > 0
    return [int(n) * 4 for n in present.sum(dim=1)]


@pytest.mark.parametrize("build", [llava, qwen, llava_next, idefics])
def test_the_square_changes_the_tokens_of_the_cells_that_it_covers(build):
    torch.manual_seed(0)
    model, images = build()
    local(model)
    nested = build is idefics

    def given(boxes):
        photos = [photo(size, box) for size, box in zip(SIZES, boxes, strict=True)]
        return dict(images([[p] for p in photos] if nested else photos, return_tensors="pt"))

    plain, drawn = given([None, None]), given(BOXES)
    ids, mask = rows(features(model, plain))
    extra = {"mm_token_type_ids": (ids == TOKEN).long()} if build is qwen else {}
    text = {"input_ids": ids, "attention_mask": mask, **extra}
    before, after = (embedded(model, {**text, **pixels}) for pixels in (plain, drawn))
    change = (before - after).abs().amax(dim=-1)
    moved = change > 0.02 * change.max()  # filters ring faintly far from an edge

    layout = layouts_of(model, {**text, **plain}, processor=images, images=SIZES)["language"]
    assert layout.length == ids.shape[1]
    seen = torch.zeros_like(moved)
    for span in layout.spans:
        if span.geometry is None:
            continue
        index = span.index
        if isinstance(index, slice):
            index = torch.arange(index.start, index.stop).expand(2, -1)
        boxes = torch.tensor(BOXES, dtype=torch.float32)[:, None]
        blurred = boxes + torch.tensor([-5.0, -5.0, 5.0, 5.0])
        cover = span.geometry.cover_boxes(boxes, span.shape)[:, 0]
        reach = span.geometry.cover_boxes(blurred, span.shape)[:, 0]
        for sample in range(2):
            there = index[sample] >= 0
            changed = moved[sample, index[sample].clamp_min(0)]
            assert changed[there & (cover[sample] > 0.1)].all(), span.name
            assert not changed[there & (reach[sample] == 0)].any(), span.name
            assert reach[sample][~there].sum() < 0.2, span.name
            seen[sample, index[sample][there]] = True
    assert seen[moved].all()
    assert moved.any(dim=1).all()
    text_span = layout.find("text")
    assert text_span.index.tolist() == [
        [n for n in range(ids.shape[1]) if mask[row, n] and ids[row, n] != TOKEN]
        + [-1] * (text_span.shape[0] - int((mask[row].bool() & (ids[row] != TOKEN)).sum()))
        for row in range(2)
    ]


def test_the_encoder_of_qwen_orders_patches_two_by_two():
    model, images = qwen()
    given = dict(images([photo(size) for size in SIZES], return_tensors="pt"))
    ids, mask = rows(features(model, given))
    kinds = (ids == TOKEN).long()
    text = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds}
    layout = layouts_of(model, {**given, **text}, processor=images, images=SIZES)["vision"]
    assert layout.length == len(given["pixel_values"])
    first = layout.find("image 1")
    assert first.shape == tuple(given["image_grid_thw"][0, 1:].tolist())
    assert first.index[0, :4].tolist() == [0, 1, 4, 5]

    drawn = images(photo(SIZES[1], BOXES[1]), return_tensors="pt")["pixel_values"]
    plain = images(photo(SIZES[1]), return_tensors="pt")["pixel_values"]
    second = layout.find("image 2")
    lit = (drawn - plain).mean(dim=1)
    cover = second.geometry.cover_boxes(torch.tensor([[BOXES[1]]]).float(), second.shape)[0, 0]
    at = second.index[0] - int(given["image_grid_thw"][0].prod())
    torch.testing.assert_close(lit[at] / lit.max(), cover, atol=0.15, rtol=0)


def test_several_photos_of_one_sample_have_a_span_each():
    model, images = llava()
    given = dict(images([photo(s) for s in (SIZES[0], SIZES[1], SIZES[0])], return_tensors="pt"))
    ids = torch.tensor([[1] + [TOKEN] * 16 + [2] + [TOKEN] * 16, [3] * 17 + [TOKEN] * 16 + [4]])
    inputs = {**given, "input_ids": ids}
    sizes = [[SIZES[0], SIZES[1]], [SIZES[0]]]
    layout = layouts_of(model, inputs, processor=images, images=sizes)
    layout = layout["language"]
    assert [s.name for s in layout.spans] == ["image 1", "image 2", "text"]
    assert layout.find("image 2").index[0].tolist() == list(range(18, 34))
    assert (layout.find("image 2").index[1] == -1).all()
    assert layout.find("image 1").geometry.size.tolist() == [[60, 100], [60, 100]]
    assert layout.find("image 2").geometry.cells((4, 4))[1].abs().sum() == 0


def test_tokens_and_photos_have_to_agree():
    model, images = llava()
    given = dict(images([photo(SIZES[0])], return_tensors="pt"))
    with pytest.raises(ValueError, match=r"3 image.* 16 cells"):
        layouts_of(model, {**given, "input_ids": torch.tensor([[1, TOKEN, TOKEN, TOKEN]])})
    ids = torch.tensor([[TOKEN] * 16])
    with pytest.raises(ValueError, match="images were given"):
        layouts_of(
            model, {**given, "input_ids": ids}, processor=images, images=[SIZES[0], SIZES[1]]
        )


def test_a_class_token_among_the_image_tokens_is_no_cell():
    model, images = llava()
    model.config.vision_feature_select_strategy = "full"
    given = dict(images([photo(SIZES[0])], return_tensors="pt"))
    ids = torch.tensor([[1] + [TOKEN] * 17])
    layout = layouts_of(model, {**given, "input_ids": ids})["language"]
    assert layout.find("image").index == slice(2, 18)


def test_a_rest_of_the_canvas_that_fills_no_patch_is_no_part_of_a_cell():
    model, images = llava(image_size=37)
    images.crop_size = {"height": 37, "width": 37}
    images.size = {"height": 37, "width": 37}
    given = dict(images([photo((37, 37))], return_tensors="pt"))
    inputs = {**given, "input_ids": torch.tensor([[TOKEN] * 16])}
    image = layouts_of(model, inputs, processor=images, images=[(37, 37)])["language"].find("image")
    assert image.geometry.cells((4, 4))[0, 5].tolist() == [8, 8, 16, 16]


def test_a_processor_with_other_settings_is_found_out():
    model, images = llava()
    given = dict(images([photo(SIZES[0])], return_tensors="pt"))
    images.crop_size = {"height": 64, "width": 64}
    inputs = {**given, "input_ids": torch.tensor([[TOKEN] * 16])}
    with pytest.raises(ValueError, match="processor settings"):
        layouts_of(model, inputs, processor=images, images=SIZES[:1])


def test_photos_are_pictures_arrays_or_sizes_alone_or_several():
    made = processor("vit", size={"height": 32, "width": 32})
    array, channels_first = np.zeros((60, 100, 3), np.uint8), torch.zeros(3, 90, 50)
    found = batch_images(made, [photo((60, 100)), [array, (90, 50)], channels_first])
    assert found.rows == ((0,), (1, 2), (3,))
    assert found.sizes == ((60, 100), (60, 100), (90, 50), (90, 50))
    with pytest.raises(ValueError, match="one image"):
        found.single_geometry()
