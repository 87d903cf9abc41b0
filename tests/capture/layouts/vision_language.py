"""Tiny vision-language models with random weights, the processors of their families, and inputs.

Image processors are those of transformers. Their tokenizers are replaced with rows of ids: words,
image tokens, and the marks that the family puts between them. The count of image tokens is that of
the features which the model computes. Videos are prepared here, because the video processors of
transformers need torchvision.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

IMAGE, START, END, BREAK, VIDEO = 90, 91, 92, 93, 94  # ids of image tokens and of marks
Inputs = dict[str, torch.Tensor]
Box = tuple[int, int, int, int]

TEXT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "pad_token_id": 0, "head_dim": 8,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {**TEXT, "model_type": "llama"}
PATCHES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
CLIP = {**PATCHES, "model_type": "clip_vision_model"}
SIGLIP = {**PATCHES, "model_type": "siglip_vision_model", "vision_use_head": False}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
SQUARE = {"height": 32, "width": 32}


def image_processor(folder: str, **settings: Any) -> Any:
    """The image processor of a family, on Pillow."""
    where = f"transformers.models.{folder}.image_processing_pil_{folder}"
    module = importlib.import_module(where)
    (name,) = {
        n for n, c in vars(module).items() if n.endswith("ProcessorPil") and c.__module__ == where
    }
    return getattr(module, name)(**settings)


def model_of(name: str, config: Any) -> Any:
    """A model with random weights, in evaluation mode."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    if getattr(config.vision_config, "model_type", "") == "siglip_vision_model":
        # The random attention of SigLIP mixes positions until none of them stands out.
        for place, parameter in model.named_parameters():
            if "vision" in place and "out_proj.weight" in place:
                parameter.data.mul_(0.1)
    return model


def photo(size: tuple[int, int], box: Box | None = None, level: int = 235) -> Image.Image:
    """A grey photo, with a bright box."""
    rows, columns = np.indices(size)
    pixels = (60 + 20 * np.sin(rows / 7) + 20 * np.cos(columns / 5)).astype(np.uint8)
    pixels = np.repeat(pixels[..., None], 3, axis=2)
    if box is not None:
        pixels[box[1] : box[3], box[0] : box[2]] = level
    return Image.fromarray(pixels)


@dataclass
class VisionLanguageFamily:
    """How to build a model and its image processor, and how its image tokens are written."""

    name: str
    build: Callable[[], tuple[Any, Any]]
    nested: bool = False  # the image processor takes a list of images per sample
    write: Callable[..., list[int]] = field(default=lambda count, **_: [IMAGE] * count)
    spans: tuple[str, ...] = ("image",)  # those with a place, for one image of each sample
    single: bool = False  # one image per sample

    def __repr__(self) -> str:
        return self.name


def config_of(name: str, **settings: Any) -> Any:
    """A configuration."""
    import transformers

    return getattr(transformers, name)(**settings)


# --- families


def llava(vision: dict[str, Any], folder: str = "llava", **settings: Any) -> tuple[Any, Any]:
    config = config_of(
        "LlavaConfig", vision_config=vision, text_config=LLAMA, image_token_index=IMAGE, **settings
    )
    images = image_processor("llava", size={"shortest_edge": 32}, crop_size=SQUARE)
    if vision["model_type"] == "siglip_vision_model":
        images = image_processor("siglip", size=SQUARE)
    return model_of("LlavaForConditionalGeneration", config), images


def vip_llava() -> tuple[Any, Any]:
    config = config_of(
        "VipLlavaConfig", vision_config=CLIP, text_config=LLAMA, image_token_index=IMAGE,
        vision_feature_layers=[-1, -2],
    )  # fmt: skip
    images = image_processor("llava", size={"shortest_edge": 32}, do_pad=True, crop_size=SQUARE)
    return model_of("VipLlavaForConditionalGeneration", config), images


POINTS = [[32, 64], [64, 32], [64, 64], [96, 32]]


def llava_next() -> tuple[Any, Any]:
    config = config_of(
        "LlavaNextConfig", vision_config=CLIP, text_config=LLAMA, image_token_index=IMAGE,
        image_grid_pinpoints=POINTS,
    )  # fmt: skip
    images = image_processor(
        "llava_next", size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=POINTS
    )
    return model_of("LlavaNextForConditionalGeneration", config), images


def llava_onevision(side: int = 32) -> tuple[Any, Any]:
    config = config_of(
        "LlavaOnevisionConfig", vision_config={**SIGLIP, "image_size": side},
        text_config={**TEXT, "model_type": "qwen2"}, image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[a * side // 32, b * side // 32] for a, b in POINTS],
    )  # fmt: skip
    images = image_processor(
        "llava_onevision", size={"height": side, "width": side},
        image_grid_pinpoints=config.image_grid_pinpoints,
    )  # fmt: skip
    return model_of("LlavaOnevisionForConditionalGeneration", config), images


def qwen(kind: str) -> tuple[Any, Any]:
    vision = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2}
    if kind == "Qwen2VL":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
    if kind == "Qwen2_5_VL":
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    if kind == "Qwen3VL":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = {**TEXT, "rope_parameters": ROPE}
    config = config_of(
        f"{kind}Config", vision_config=vision, text_config=text, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    images = image_processor(
        "qwen2_vl", patch_size=8, size={"shortest_edge": 256, "longest_edge": 6400}
    )
    return model_of(f"{kind}ForConditionalGeneration", config), images


def glm4v() -> tuple[Any, Any]:
    vision = {
        "depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "hidden_size": 32,
        "intermediate_size": 32, "out_hidden_size": 32, "image_size": 32,
    }  # fmt: skip
    config = config_of(
        "Glm4vConfig", vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE},
        image_token_id=IMAGE, video_token_id=VIDEO, image_start_token_id=START,
        image_end_token_id=END, video_start_token_id=95, video_end_token_id=96,
    )  # fmt: skip
    images = image_processor(
        "glm4v", patch_size=8, size={"shortest_edge": 512, "longest_edge": 12800}
    )
    return model_of("Glm4vForConditionalGeneration", config), images


def tiles(low: int = 1, high: int = 4) -> Any:
    """Tiles of one size and a thumbnail, as InternVL, Aya Vision and GOT-OCR2 make them."""
    return image_processor(
        "got_ocr2", size=SQUARE, crop_to_patches=True, min_patches=low, max_patches=high
    )


def internvl() -> tuple[Any, Any]:
    vision = {**PATCHES, "image_size": [32, 32], "patch_size": [8, 8]}
    config = config_of(
        "InternVLConfig", vision_config=vision, text_config={**TEXT, "model_type": "qwen2"},
        image_token_id=IMAGE, downsample_ratio=0.5,
    )  # fmt: skip
    return model_of("InternVLForConditionalGeneration", config), tiles()


def aya_vision() -> tuple[Any, Any]:
    config = config_of(
        "AyaVisionConfig", vision_config=SIGLIP, text_config={**TEXT, "model_type": "cohere2"},
        image_token_index=IMAGE, downsample_factor=2, adapter_layer_norm_eps=1e-6,
    )  # fmt: skip
    return model_of("AyaVisionForConditionalGeneration", config), tiles()


def cohere2_vision() -> tuple[Any, Any]:
    config = config_of(
        "Cohere2VisionConfig", vision_config=SIGLIP, text_config={**TEXT, "model_type": "cohere2"},
        image_token_id=IMAGE, downsample_factor=2, alignment_intermediate_size=32,
    )  # fmt: skip
    return model_of("Cohere2VisionForConditionalGeneration", config), tiles()


def got_ocr2() -> tuple[Any, Any]:
    vision = {
        "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 128, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1],
        "mlp_dim": 32, "initializer_range": 0.02,
    }  # fmt: skip
    config = config_of(
        "GotOcr2Config", vision_config=vision, text_config={**TEXT, "model_type": "qwen2"},
        image_token_index=IMAGE,
    )  # fmt: skip
    images = image_processor("got_ocr2", size={"height": 128, "width": 128})
    return model_of("GotOcr2ForConditionalGeneration", config), images


def gemma3(pan_and_scan: bool = False) -> tuple[Any, Any]:
    config = config_of(
        "Gemma3Config", vision_config=SIGLIP, text_config={**TEXT, "model_type": "gemma3_text"},
        image_token_index=IMAGE, mm_tokens_per_image=4, boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    images = image_processor(
        "gemma3", size=SQUARE, do_pan_and_scan=pan_and_scan, pan_and_scan_min_crop_size=16,
        pan_and_scan_max_num_crops=4, pan_and_scan_min_ratio_to_activate=1.2,
    )  # fmt: skip
    model = model_of("Gemma3ForConditionalGeneration", config)
    # Zero before training, so that no image would reach the language model.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model, images


def paligemma() -> tuple[Any, Any]:
    config = config_of(
        "PaliGemmaConfig", vision_config=SIGLIP, text_config={**TEXT, "model_type": "gemma"},
        image_token_index=IMAGE, projection_dim=32,
    )  # fmt: skip
    images = image_processor("siglip", size=SQUARE)
    return model_of("PaliGemmaForConditionalGeneration", config), images


def idefics3(name: str = "Idefics3") -> tuple[Any, Any]:
    vision = {
        **PATCHES,
        "model_type": "idefics3_vision" if name == "Idefics3" else "smolvlm_vision",
    }
    config = config_of(
        f"{name}Config", vision_config=vision, text_config=LLAMA, image_token_id=IMAGE,
        scale_factor=2,
    )  # fmt: skip
    images = image_processor(
        name.lower(), size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    return model_of(f"{name}ForConditionalGeneration", config), images


def idefics2() -> tuple[Any, Any]:
    config = config_of(
        "Idefics2Config", vision_config=PATCHES, text_config={**TEXT, "model_type": "mistral"},
        perceiver_config={
            "hidden_size": 32, "resampler_n_latents": 6, "resampler_depth": 1,
            "resampler_n_heads": 2, "num_key_value_heads": 1, "resampler_head_dim": 8,
        },
        image_token_id=IMAGE,
    )  # fmt: skip
    images = image_processor("idefics2", size={"shortest_edge": 24, "longest_edge": 32})
    return model_of("Idefics2ForConditionalGeneration", config), images


def mllama() -> tuple[Any, Any]:
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "image_size": 32, "patch_size": 8, "max_num_tiles": 4,
        "intermediate_layers_indices": [0], "vision_output_dim": 64,
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    }  # fmt: skip
    text = {**TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [1]}
    config = config_of(
        "MllamaConfig", vision_config=vision, text_config=text, image_token_index=IMAGE
    )
    images = image_processor("mllama", size=SQUARE, max_image_tiles=4)
    return model_of("MllamaForConditionalGeneration", config), images


def pixtral(kind: str = "Llava") -> tuple[Any, Any]:
    vision = {**PATCHES, "model_type": "pixtral", "image_size": 64, "head_dim": 16}
    settings = (
        {"spatial_merge_size": 2}
        if kind == "Mistral3"
        else {"vision_feature_select_strategy": "full"}
    )
    config = config_of(
        f"{kind}Config", vision_config=vision, text_config={**TEXT, "model_type": "mistral"},
        image_token_index=IMAGE, vision_feature_layer=-1, **settings,
    )  # fmt: skip
    side = 16 if kind == "Mistral3" else 8
    images = image_processor(
        "pixtral", size={"longest_edge": 64}, patch_size={"height": side, "width": side}
    )
    return model_of(f"{kind}ForConditionalGeneration", config), images


def blip_2(name: str = "Blip2") -> tuple[Any, Any]:
    queries = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100,
        "intermediate_size": 32, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
    }  # fmt: skip
    text = {
        "model_type": "opt", "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": 100, "word_embed_proj_dim": 32,
    }  # fmt: skip
    config = config_of(
        f"{name}Config", vision_config=PATCHES, qformer_config=queries, text_config=text,
        num_query_tokens=6, image_token_index=IMAGE,
    )  # fmt: skip
    return model_of(f"{name}ForConditionalGeneration", config), image_processor("blip", size=SQUARE)


def kosmos2() -> tuple[Any, Any]:
    text = {
        "vocab_size": 100, "embed_dim": 32, "layers": 2, "ffn_dim": 32, "attention_heads": 2,
        "max_position_embeddings": 128,
    }  # fmt: skip
    config = config_of("Kosmos2Config", text_config=text, vision_config=PATCHES, latent_query_num=6)
    images = image_processor("clip", size={"shortest_edge": 32}, crop_size=SQUARE)
    return model_of("Kosmos2ForConditionalGeneration", config), images


def ovis2() -> tuple[Any, Any]:
    vision = {**PATCHES, "vocab_size": 60, "hidden_stride": 2, "num_visual_indicator_tokens": 5}
    config = config_of(
        "Ovis2Config", vision_config=vision, text_config={**TEXT, "model_type": "qwen2"},
        hidden_size=32, image_token_id=IMAGE, visual_indicator_token_ids=[91, 92, 93, 95, 96],
    )  # fmt: skip
    images = image_processor(
        "ovis2", size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4
    )
    return model_of("Ovis2ForConditionalGeneration", config), images


def janus() -> tuple[Any, Any]:
    vision = {**PATCHES, "projection_dim": 32, "mlp_ratio": 1.0, "depth": 2, "num_image_tokens": 16}
    codes = {
        "embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1],
        "projection_dim": 8, "image_token_embed_dim": 32, "num_res_blocks": 1, "latent_channels": 8,
    }  # fmt: skip
    config = config_of(
        "JanusConfig",
        vision_config=vision,
        vq_config=codes,
        text_config=LLAMA,
        image_token_id=IMAGE,
    )
    images = image_processor("janus", size=SQUARE, min_size=4)
    return model_of("JanusForConditionalGeneration", config), images


def deepseek_vl() -> tuple[Any, Any]:
    config = config_of(
        "DeepseekVLConfig", vision_config=SIGLIP, text_config=LLAMA, image_token_id=IMAGE
    )
    images = image_processor("deepseek_vl", size=SQUARE, min_size=4)
    return model_of("DeepseekVLForConditionalGeneration", config), images


def florence2() -> tuple[Any, Any]:
    vision = {
        "embed_dim": [8, 16, 24, 32], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2],
        "depths": [1, 1, 1, 1], "window_size": 4, "projection_dim": 32,
        "max_position_embeddings": 10, "max_temporal_embeddings": 4,
    }  # fmt: skip
    text = {
        "model_type": "bart", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "vocab_size": 100, "max_position_embeddings": 128,
    }  # fmt: skip
    config = config_of(
        "Florence2Config", vision_config=vision, text_config=text, image_token_id=IMAGE
    )
    square = {"height": 128, "width": 128}
    images = image_processor("clip", size=square, do_center_crop=False)
    return model_of("Florence2ForConditionalGeneration", config), images


def wrapped(count: int, **_: Any) -> list[int]:
    """Image tokens between a start and an end."""
    return [START, *[IMAGE] * count, END]


def tiled(count: int, per: int = 4, **_: Any) -> list[int]:
    """A start and an end around the image tokens of each tile."""
    return [n for _ in range(count // per) for n in wrapped(per)]


def broken(count: int, rows: int, **_: Any) -> list[int]:
    """Rows of image tokens that end in a break, the last one in an end."""
    row = [IMAGE] * (count // rows)
    return [*(n for _ in range(rows - 1) for n in (*row, BREAK)), *row, END]


FAMILIES = (
    VisionLanguageFamily("LLaVA", partial(llava, CLIP)),
    VisionLanguageFamily(
        "LLaVA on SigLIP", partial(llava, SIGLIP, vision_feature_select_strategy="full")
    ),
    VisionLanguageFamily("VipLLaVA", vip_llava),
    VisionLanguageFamily("LLaVA-NeXT", llava_next, spans=("image", "detail"), single=True),
    VisionLanguageFamily(
        "LLaVA-OneVision", llava_onevision, spans=("image", "detail"), single=True
    ),
    VisionLanguageFamily("Qwen2-VL", partial(qwen, "Qwen2VL"), write=wrapped),
    VisionLanguageFamily("Qwen2.5-VL", partial(qwen, "Qwen2_5_VL"), write=wrapped),
    VisionLanguageFamily("Qwen3-VL", partial(qwen, "Qwen3VL"), write=wrapped),
    VisionLanguageFamily("GLM-4V", glm4v, write=wrapped),
    VisionLanguageFamily("InternVL", internvl, write=wrapped, spans=("image", "detail")),
    VisionLanguageFamily("Aya Vision", aya_vision, write=tiled, spans=("image", "detail")),
    VisionLanguageFamily("Cohere2 Vision", cohere2_vision, write=tiled, spans=("image", "detail")),
    VisionLanguageFamily("Gemma 3", gemma3, write=wrapped),
    VisionLanguageFamily(
        "Gemma 3, pan and scan",
        partial(gemma3, True),
        nested=True,
        write=tiled,
        spans=("image", "detail"),
    ),
    VisionLanguageFamily("PaliGemma", paligemma),
    VisionLanguageFamily(
        "Idefics 3", idefics3, nested=True, write=tiled, spans=("image", "detail")
    ),
    VisionLanguageFamily(
        "SmolVLM", partial(idefics3, "SmolVLM"), nested=True, write=tiled, spans=("image", "detail")
    ),
    VisionLanguageFamily("Pixtral", pixtral, write=broken),
    VisionLanguageFamily("Mistral 3", partial(pixtral, "Mistral3"), write=broken),
    VisionLanguageFamily("Ovis 2", ovis2, write=wrapped, spans=("image", "detail")),
    VisionLanguageFamily("Janus", janus, write=wrapped),
    VisionLanguageFamily("DeepSeek-VL", deepseek_vl),
    VisionLanguageFamily("Idefics 2", idefics2, nested=True, write=wrapped, spans=()),
    VisionLanguageFamily("BLIP-2", blip_2, spans=()),
    VisionLanguageFamily("InstructBLIP", partial(blip_2, "InstructBlip"), spans=()),
    VisionLanguageFamily("Kosmos-2", kosmos2, spans=()),
    VisionLanguageFamily("Mllama", mllama, nested=True),
)

# Convolutions after or between the layers: a token depends on several cells.
REFUSED = (
    VisionLanguageFamily("GOT-OCR2", got_ocr2, write=wrapped),
    VisionLanguageFamily("Florence-2", florence2),
)


def family(name: str) -> VisionLanguageFamily:
    """The family of this name."""
    return next(one for one in FAMILIES if one.name == name)


# --- inputs


def process(one: VisionLanguageFamily, images: Any, photos: Sequence[Sequence[Any]]) -> Inputs:
    """What the image processor makes of the photos of each sample."""
    given = [list(row) for row in photos] if one.nested else [p for row in photos for p in row]
    return dict(images(images=given, return_tensors="pt"))


def token_counts(model: Any, given: Inputs, photos: int) -> list[int]:
    """How many tokens the model makes of each image."""
    kind = model.config.model_type
    if kind in ("blip-2", "instructblip", "kosmos-2"):
        return [6] * photos
    if kind == "mllama":
        return [1] * photos
    features = getattr(model, "get_image_features", None) or model.model.get_image_features
    with torch.no_grad():
        made = features(**accepted(model, given))
    made = getattr(made, "pooler_output", made)
    if isinstance(made, list | tuple):
        return [len(each) for each in made]
    tiles = [1] * photos
    if "num_patches" in given:
        tiles = given["num_patches"].tolist()
    elif "num_crops" in given:
        tiles = [int(crops) + 1 for crops in given["num_crops"]]
    elif "grids" in given:  # one tile, or the tiles and a thumbnail
        tiles = [int(a * b) + (a * b > 1) for a, b in given["grids"].tolist()]
    elif kind in ("idefics3", "smolvlm", "idefics2"):
        there = given["pixel_values"].flatten(2).ne(0).any(dim=2).sum(dim=1).tolist()
        return there if len(there) == photos else []
    per = made.shape[1] if made.ndim == 3 else len(made) // sum(tiles)
    return [per * count for count in tiles]


def accepted(model: Any, given: Inputs) -> Inputs:
    """The inputs that the model takes."""
    named = inspect.signature(model.forward).parameters
    return {name: value for name, value in given.items() if name in named}


def batch(
    one: VisionLanguageFamily,
    model: Any,
    images: Any,
    photos: Sequence[Sequence[Any]],
    side: str = "left",
) -> Inputs:
    """The inputs of a batch: some words, the images of each sample with words between, words."""
    given = process(one, images, photos)
    counts = iter(_image_counts(one, model, images, photos))
    rows = []
    for number, row in enumerate(photos):
        ids = [5] * (3 - number % 3)
        for photo_given in row:
            ids += [*_written(one, next(counts), photo_given, images), 7]
        rows.append([*ids, 8, 9])
    return {**accepted(model, given), **text_inputs(model, rows, side)}


def _image_counts(one: Any, model: Any, images: Any, photos: Sequence[Sequence[Any]]) -> list[int]:
    """How many tokens each image has, measured one image at a time."""
    flat = [p for row in photos for p in row]
    return [token_counts(model, process(one, images, [[p]]), 1)[0] for p in flat]


def _written(one: VisionLanguageFamily, count: int, given: Image.Image, images: Any) -> list[int]:
    if one.write is not broken:
        return one.write(count)
    side = images.patch_size["height"]
    size = images(images=[given], return_tensors="pt")["image_sizes"][0].tolist()
    return broken(count, rows=size[0] // side)


def text_inputs(model: Any, rows: Sequence[list[int]], side: str = "left") -> Inputs:
    """Rows of ids, padded on one side, with the arguments that the model needs for them."""
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    left = side == "left"
    ids = torch.tensor([p + r if left else r + p for p, r in zip(pads, rows, strict=True)])
    ones = [[1] * len(row) for row in rows]
    mask = torch.tensor([p + r if left else r + p for p, r in zip(pads, ones, strict=True)])
    given = {"input_ids": ids, "attention_mask": mask}
    named, kind = inspect.signature(model.forward).parameters, model.config.model_type
    if "mm_token_type_ids" in named:
        given["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    if kind in ("gemma3", "paligemma"):
        given["token_type_ids"] = (ids == IMAGE).long()
    if kind == "kosmos-2":
        given["image_embeds_position_mask"] = ids == IMAGE
    if kind == "instructblip":
        given["qformer_input_ids"] = torch.ones(len(ids), 3).long()
    if kind == "mllama":
        given["cross_attention_mask"] = torch.ones(*ids.shape, 1, 4).long()
    return given


# --- videos


@dataclass(frozen=True)
class QwenVideos:
    """Frames as flat patches of two frames, in the order of Qwen2-VL."""

    patch_size: int = 8
    merge_size: int = 2

    def __call__(self, videos: Sequence[Any]) -> dict[str, Any]:
        made = [self._patches(np.stack([np.asarray(f) for f in video])) for video in videos]
        return {
            "pixel_values_videos": np.concatenate([patches for patches, _ in made]),
            "video_grid_thw": np.array([grid for _, grid in made]),
        }

    def _patches(self, frames: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        side, merge = self.patch_size, self.merge_size
        rows, columns = (max(1, n // 24) * merge for n in frames.shape[1:3])
        small = [Image.fromarray(f).resize((columns * side, rows * side)) for f in frames]
        small = small + small[-1:] * (len(small) % 2)
        values = np.stack([np.asarray(f) for f in small]).astype(np.float32) / 127.5 - 1
        values = values.reshape(
            -1, 2, rows // merge, merge, side, columns // merge, merge, side, 3
        )  # t, frame, y, my, py, x, mx, px, c
        values = values.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return values.reshape(-1, 3 * 2 * side * side), (len(small) // 2, rows, columns)


@dataclass(frozen=True)
class SquareVideos:
    """Frames resized to squares, as in the LLaVA families."""

    side: int = 32
    name: str = "pixel_values_videos"

    def __call__(self, videos: Sequence[Any]) -> dict[str, Any]:
        square = (self.side, self.side)
        made = [[np.asarray(Image.fromarray(f).resize(square)) for f in v] for v in videos]
        return {self.name: np.array(made, dtype=np.float32).transpose(0, 1, 4, 2, 3) / 127.5 - 1}


def llava_next_video() -> tuple[Any, Any]:
    config = config_of(
        "LlavaNextVideoConfig", vision_config=CLIP, text_config=LLAMA, image_token_index=IMAGE,
        video_token_index=VIDEO, image_grid_pinpoints=POINTS,
    )  # fmt: skip
    return model_of("LlavaNextVideoForConditionalGeneration", config), SquareVideos()


def video_llava() -> tuple[Any, Any]:
    config = config_of(
        "VideoLlavaConfig", vision_config=CLIP, text_config=LLAMA, image_token_index=IMAGE,
        video_token_index=VIDEO,
    )  # fmt: skip
    return model_of("VideoLlavaForConditionalGeneration", config), SquareVideos()


VIDEO_FAMILIES = {
    "Qwen2-VL": lambda: (qwen("Qwen2VL")[0], QwenVideos()),
    "Qwen2.5-VL": lambda: (qwen("Qwen2_5_VL")[0], QwenVideos()),
    "Qwen3-VL": lambda: (qwen("Qwen3VL")[0], QwenVideos()),
    "LLaVA-NeXT-Video": llava_next_video,
    "Video-LLaVA": video_llava,
    "LLaVA-OneVision": lambda: (llava_onevision()[0], SquareVideos()),
    # 5 and 7 patches are pooled to 3 and 4 tokens, which are not equal cells.
    "LLaVA-OneVision, uneven": lambda: (llava_onevision(40)[0], SquareVideos(40)),
    "LLaVA-OneVision, overlapping": lambda: (llava_onevision(56)[0], SquareVideos(56)),
}


def clip(frames: int, size: tuple[int, int], frame: int = 0, box: Box | None = None) -> np.ndarray:
    """A video of grey frames, one of them with a bright box."""
    return np.stack([np.asarray(photo(size, box if at == frame else None)) for at in range(frames)])


def video_batch(model: Any, videos: Any, clips: Sequence[np.ndarray], side: str = "left") -> Inputs:
    """The inputs of a batch with one video per sample."""
    given = {name: torch.as_tensor(value) for name, value in videos(videos=clips).items()}
    rows = []
    for number, row in enumerate(clips):
        one = {name: torch.as_tensor(value) for name, value in videos(videos=[row]).items()}
        rows.append([5] * (2 + number) + _written_video(model, one) + [8, 9])
    return {**accepted(model, given), **text_inputs(model, rows, side)}


def _written_video(model: Any, given: Inputs) -> list[int]:
    """Video tokens, with the time before each frame in Qwen3-VL."""
    if "video_grid_thw" in given:
        steps, rows, columns = given["video_grid_thw"][0].tolist()
        cells = [VIDEO] * (rows * columns // 4)
        if model.config.model_type == "qwen3_vl":
            return [n for _ in range(steps) for n in (6, START, *cells, END)]
        return [START, *cells * steps, END]
    features = getattr(model, "get_video_features", None) or model.model.get_video_features
    with torch.no_grad():
        made = features(given["pixel_values_videos"])
    made = getattr(made, "pooler_output", made)
    count = sum(int(np.prod(each.shape[:-1])) for each in made)
    return [VIDEO] * count
