"""Loading and viewing models with attached attention: one panel per level."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.errors import UserError
from overt.inspect.answers import Answer, answer_note, top_classes
from overt.inspect.inputs import ModelInput, model_errors
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.panels import ViewOptions, find_layer, map_panels

if TYPE_CHECKING:
    from overt.data.batch import Batch
    from overt.nn.backbone_attention.attached_model import AttachedAttention
    from overt.viz.panel import Choice, Panel


def load_attached(folder: Path, name: str) -> LoadedModel:
    """Load a model that `AttachedAttention.save_pretrained` wrote, in eval mode."""
    from overt.nn.backbone_attention.attached_model import AttachedAttention

    model = AttachedAttention.from_pretrained(folder)
    if model.processor is not None:
        return LoadedModel(name, model, image_processor=model.processor)
    return LoadedModel(name, model, transform=_transform(model))


def view_attached(
    loaded: LoadedModel, model_input: ModelInput, options: ViewOptions
) -> tuple[list["Panel"], list["Choice"], list[str], list[Answer]]:
    """Return a panel and choice per level, notes, and the top classes."""
    import torch

    model: AttachedAttention = loaded.model
    if model_input.photo is None or model_input.text is not None:
        raise UserError(f"{loaded.name} takes images, not text: give it an image.")
    if options.method != "attention":
        raise UserError(
            f"{loaded.name} has attached attention, which has no map '{options.method}'."
        )
    batch = _batch(loaded, model_input.photo)
    with torch.no_grad(), model_errors(loaded.name):
        output = model(batch)
    names = [level.name or type(model.backbone).__name__ for level in model.levels]
    chosen = find_layer(names, options.layer, loaded.name)
    levels = range(len(names)) if chosen is None else [chosen]
    maps = {f"{names[at]}: attached attention": output.attention[at] for at in levels}
    panels, choices = map_panels(maps, model_input, replace(options, layer=None))
    panels = [
        replace(one, about=f"Level {at} of {len(names)}, {one.about}")
        for at, one in zip(levels, panels, strict=True)
    ]
    labels = getattr(getattr(model.backbone, "config", None), "id2label", None) or {}
    named = labels if len(labels) == output.prediction.shape[1] else {}
    answers = top_classes(output.prediction[0], lambda at: named.get(at, f"class {at}"))
    return panels, choices, [answer_note(answers)], answers


def _batch(loaded: LoadedModel, photo: Any) -> "Batch":
    """Return the photo as a batch with its geometry."""
    from PIL import Image

    from overt.capture import image_geometry, transform_geometry
    from overt.data.batch import Batch
    from overt.data.images import check_aspect_ratio

    size = (int(photo.shape[0]), int(photo.shape[1]))
    check_aspect_ratio("the picture", size)
    picture = Image.fromarray(photo)
    if loaded.transform is not None:
        pixels = loaded.transform(picture)[None]
        geometry = transform_geometry(loaded.transform, [size])
    else:
        inputs = loaded.image_processor(images=picture, return_tensors="pt")
        pixels = inputs["pixel_values"]
        geometry = image_geometry(loaded.image_processor, [size])
    device = next(loaded.model.parameters()).device
    return Batch((loaded.name,), images=pixels.to(device), geometry=geometry)


def _transform(model: "AttachedAttention") -> Callable[[Any], Any]:
    """Return the image transform of a backbone without processor: timm's own, else a resize."""
    from overt.nn.backbone_attention.backbones import describe_model, input_size

    if describe_model(model.backbone)["library"] == "timm":
        import timm

        settings = timm.data.resolve_model_data_config(model.backbone)
        return timm.data.create_transform(**settings, is_training=False)
    numbers, (height, width) = model.numbers, input_size(model.backbone)
    if numbers is None:
        raise UserError(
            "The folder does not define the image preprocessing of the backbone: attach it with "
            "processor=... and save it again."
        )

    def stretch(picture: Any) -> Any:
        import numpy as np
        import torch

        from overt.nn.backbone_attention.backbones import normalize_images

        small = np.array(picture.convert("RGB").resize((width, height)))
        images = torch.from_numpy(small).permute(2, 0, 1)[None]
        return normalize_images(images, torch.float32, numbers)[0]

    return stretch
