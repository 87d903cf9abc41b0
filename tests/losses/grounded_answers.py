"""Tiny vision-language models with random weights, and samples with a box for one answer word."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout
from overt.capture.layouts.hf_layouts import layouts_of
from overt.targets.answer_boxes import answer_box_target, answer_inputs
from tests.capture.layouts import vision_language as families

SIZE = (32, 32)  # of the photos
QUESTIONS = ((11, 12, 13), (14, 15, 16, 17, 18))
ANSWERS = (((0, 0, 16, 8),), ((16, 16, 32, 32), (0, 24, 8, 32)))  # boxes of the second answer word
Sample = dict[str, Any]


def llava() -> tuple[nn.Module, Any]:
    return families.llava(families.SIGLIP, vision_feature_select_strategy="full")


MODELS = {"LLaVA": llava, "Qwen2-VL": partial(families.qwen, "Qwen2VL")}


def build(name: str) -> nn.Module:
    """A model whose attention is not even."""
    model = MODELS[name]()[0].float()
    torch.manual_seed(3)
    with torch.no_grad():
        for place, weight in model.named_parameters():
            if "language" in place and ("q_proj.weight" in place or "k_proj.weight" in place):
                nn.init.normal_(weight, std=0.5)
    return model


@cache
def measured(name: str) -> tuple[tuple[Sample, Layout, Mapping[int, Any]], ...]:
    """Tokens, pixels and layout of each sample, and the boxes of its words."""
    model, processor = MODELS[name]()
    found = []
    for question, boxes in zip(QUESTIONS, ANSWERS, strict=True):
        photo = families.photo(SIZE, boxes[0])
        media = dict(processor(images=[photo], return_tensors="pt"))
        count = 4 if name == "Qwen2-VL" else 16
        images = [families.IMAGE] * count
        marked = [families.START, *images, families.END] if count == 4 else images
        ids = [1, *marked, *question, 20, 21, 2]
        inputs = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            **media,
        }
        inputs |= image_types(inputs)
        layout = layouts_of(model, inputs, processor=processor, images=[photo])["language"]
        words = {len(ids) - 2: boxes}
        labels = [-100] * (len(ids) - 3) + ids[-3:]
        sample = {"input_ids": ids, "labels": labels, **media}
        found.append((sample, layout, words))
    return tuple(found)


def targets(name: str, ids: Sequence[str]) -> AttentionMap:
    """A source of targets: the map of one sample, by its number."""
    _, layout, words = measured(name)[int(ids[0])]
    return answer_box_target(layout, words)


def samples(name: str, source: Any = None) -> list[Sample]:
    """Samples with the tensors of their targets."""
    source = partial(targets, name) if source is None else source
    return [
        {**sample, **answer_inputs(source([str(at)]), layout, words)}
        for at, (sample, layout, words) in enumerate(measured(name))
    ]


def pad(items: Sequence[Mapping[str, Any]], side: str = "right") -> dict[str, Tensor]:
    """Pad texts on one side, and join the media."""
    longest = max(len(item["input_ids"]) for item in items)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for item in items:
        own = {**item, "attention_mask": [1] * len(item["input_ids"])}
        for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
            more = [fill] * (longest - len(own["input_ids"]))
            rows[name].append(more + own[name] if side == "left" else own[name] + more)
    batch = {name: torch.tensor(value) for name, value in rows.items()} | join_media(items)
    return batch | image_types(batch)


def pack(items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Put the samples one after another in a single row; positions restart in each."""
    ids = [token for item in items for token in item["input_ids"]]
    labels = [token for item in items for token in (-100, *item["labels"][1:])]
    places = [at for item in items for at in range(len(item["input_ids"]))]
    rows = {"input_ids": ids, "labels": labels, "position_ids": places}
    return {**{name: torch.tensor([row]) for name, row in rows.items()}, **join_media(items)}


def join_media(items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Join pixels and sizes of images."""
    names = [name for name in items[0] if name in ("pixel_values", "image_grid_thw")]
    return {name: torch.cat([item[name] for item in items]) for name in names}


def image_types(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The types of tokens that Qwen2-VL needs for its positions."""
    if "image_grid_thw" not in inputs:
        return {}
    return {"mm_token_type_ids": (inputs["input_ids"] == families.IMAGE).long()}
