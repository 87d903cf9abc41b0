"""Which positions depend on which pixels is measured on the model, not inferred from its name."""

import pytest
import torch
from torch import nn

from overt.capture.layouts.hf_layouts import layouts_of
from overt.capture.layouts.influence import (
    cells_agree,
    language_model_inputs,
    media_positions,
    raise_inside_watch,
)
from overt.capture.session import watch

transformers = pytest.importorskip("transformers", reason="models come from transformers")

TOKEN = 90
TEXT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 100, "pad_token_id": 0, "head_dim": 8,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
FLAT = {"depth": 2, "num_heads": 2, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN = {
    "Qwen2VL": {"depth": 2, "num_heads": 2, "patch_size": 8, "embed_dim": 16, "hidden_size": 16},
    "Qwen2_5_VL": {
        **FLAT, "out_hidden_size": 16, "window_size": 32, "fullatt_block_indexes": [1],
    },
    "Qwen3VL": {
        **FLAT, "out_hidden_size": 16, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "Qwen3_5": {**FLAT, "out_hidden_size": 16, "num_position_embeddings": 16},
}  # fmt: skip


def qwen(name, token=TOKEN):
    text = {**TEXT, "rope_parameters": ROPE}
    if name == "Qwen3_5":
        text |= {"layer_types": ["full_attention"], "linear_num_key_heads": 2}
        text["rope_parameters"] = {**ROPE, "partial_rotary_factor": 1.0}
    config = getattr(transformers, f"{name}Config")(
        vision_config=QWEN[name], text_config=text, image_token_id=token,
        vision_start_token_id=91, vision_end_token_id=92, video_token_id=93,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    grids = torch.tensor([[1, 4, 6], [1, 4, 4]])
    ids = torch.tensor([[5, 91, *[TOKEN] * 6, 92, 7, 8], [0, 0, 91, *[TOKEN] * 4, 92, 6, 7, 8]])
    return model, {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "mm_token_type_ids": (ids == TOKEN).long(),
        "pixel_values": torch.randn(40, 3 * 2 * 8 * 8),
        "image_grid_thw": grids,
    }


def paligemma():
    config = transformers.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **VISION, "projection_dim": 16},
        text_config={"model_type": "gemma", **TEXT}, image_token_index=TOKEN, projection_dim=16,
    )  # fmt: skip
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    ids = torch.tensor([[*[TOKEN] * 16, 2, 5, 6]])
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }


def aria(queries):
    """A model that resamples the patches of an image with learned queries."""
    config = transformers.AriaConfig(
        vision_config={"model_type": "idefics3_vision", **VISION},
        text_config={**TEXT, "moe_num_experts": 2, "moe_topk": 1},
        image_token_index=TOKEN,
        projector_patch_to_query_dict={16: queries},
    )
    model = transformers.AriaForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, *[TOKEN] * queries, 6]])
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.newer("transformers>=5"))
        if name.startswith("Qwen3")
        else name
        for name in sorted(QWEN)
    ],
)
def test_the_images_of_qwen_are_placed(name):
    torch.manual_seed(0)
    model, inputs = qwen(name)
    layout = layouts_of(model, inputs)["language"]
    assert layout.find("image").shape == (2, 3)
    assert layout.find("image").index.tolist() == [[2, 3, 4, 5, 6, 7], [3, 4, -1, 5, 6, -1]]
    assert layout.find("special").index.tolist() == [[1, 8], [2, 7]]
    assert layout.find("text").index.tolist() == [[0, 9, 10], [8, 9, 10]]


def test_the_image_of_paligemma_is_placed():
    torch.manual_seed(0)
    model, inputs = paligemma()
    layout = layouts_of(model, inputs)["language"]
    assert (layout.find("image").shape, layout.find("image").index) == ((4, 4), slice(0, 16))
    assert layout.find("text").index == slice(16, 19)


@pytest.mark.newer("transformers>=5")
def test_resampled_images_are_refused_also_where_counts_agree():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="aria resamples"):
        layouts_of(*aria(16))
    with pytest.raises(ValueError, match=r"4 cells .*by hand"):
        layouts_of(*aria(4))


class Tower(nn.Module):
    """Two patches of a picture, each embedded by itself, in some order."""

    def __init__(self, order):
        super().__init__()
        self.patch, self.order = nn.Conv2d(3, 4, 4, 4), order

    def forward(self, pixels):
        return self.patch(pixels).flatten(2).transpose(1, 2)[:, self.order]


class Reader(nn.Module):
    """Puts the patches at the second and third position, whatever the ids there are."""

    def __init__(self, order=(0, 1)):
        super().__init__()
        self.words, self.vision_tower = nn.Embedding(20, 4), Tower(list(order))
        self.layers = nn.ModuleList([nn.Identity()])
        self.config = transformers.BertConfig(vocab_size=20)

    def forward(self, input_ids, pixel_values):
        states = self.words(input_ids).clone()
        states[:, 1:3] = self.vision_tower(pixel_values)
        return self.layers[0](states)


def read():
    return {"input_ids": torch.tensor([[3, 9, 9, 4]]), "pixel_values": torch.randn(1, 3, 4, 8)}


def test_positions_that_change_with_the_pixels_hold_the_image():
    model, inputs = Reader().train(), read()
    assert language_model_inputs(model, inputs).shape == (1, 4, 4)
    found = media_positions(model, inputs, ["pixel_values"])
    assert found.tolist() == [[False, True, True, False]]
    blank = {**inputs, "pixel_values": torch.zeros(1, 3, 4, 8)}
    assert media_positions(model, blank, ["pixel_values"]).tolist() == found.tolist()
    assert model.training
    assert not model.layers[0]._forward_pre_hooks
    with pytest.raises(ValueError, match="2 positions of bert"):
        layouts_of(model, inputs)  # no configuration names these tokens


def test_cells_in_another_order_are_found_out():
    inputs = read()
    taken = torch.tensor([[False, True, True, False]])
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]).expand(1, 1, 4, 8)
    for order, right in (((0, 1), True), ((1, 0), False), ((0, 0), False)):
        model = Reader(order)
        assert cells_agree(model, inputs, model.vision_tower, taken, owner) is right


def test_a_model_without_one_vector_per_id_cannot_be_measured():
    model, inputs = Reader(), read()
    model.layers = nn.ModuleList()
    model.forward = lambda input_ids, pixel_values: None
    assert media_positions(model, inputs, ["pixel_values"]) is None
    with pytest.raises(ValueError, match=r"bert.*measured"):
        layouts_of(model, inputs)


def test_inputs_that_the_model_refuses_are_said():
    model, inputs = Reader(), read()
    with pytest.raises(ValueError, match=r"bert.*not run"):
        layouts_of(model, {**inputs, "pixel_values": torch.randn(1, 1, 4, 8)})


def test_a_watcher_does_not_record_the_runs_that_measure():
    model, inputs = paligemma()
    with pytest.raises(ValueError, match="before watch"), watch(model):
        layouts_of(model, inputs)
    layouts_of(model, inputs)
    with torch.no_grad(), watch(model) as trace:
        layouts_of(model, inputs)  # measured before: nothing runs
        model(**inputs)
    assert {call.step for call in trace.calls} == {0}
    raise_inside_watch()
