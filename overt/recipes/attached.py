"""`overt look` at a model with attached attention: opened from its folder, one panel a level."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.errors import BadInput
from overt.recipes.asking import Asked, Given, run
from overt.recipes.opening import Subject
from overt.recipes.seeing import Wish

if TYPE_CHECKING:
    from torch import Tensor

    from overt.data.batch import Batch
    from overt.models.attaching.attached import Attached
    from overt.show.panel import Choice, Panel


def open_attached(folder: Path, name: str) -> Subject:
    """The model in a folder that `Attached.save_pretrained` has written, in eval mode."""
    from overt.models.attaching.attached import Attached

    model = Attached.from_pretrained(folder)
    if model.processor is not None:
        return Subject(name, model, image_processor=model.processor)
    return Subject(name, model, transform=_transform(model))


def view_attached(
    subject: Subject, given: Given, wish: Wish
) -> tuple[list["Panel"], list["Choice"], list[str], list[tuple[str, float]]]:
    """A panel for each level, what is drawn large of it, and what the model answers."""
    import torch

    from overt.show.panel import choose, panel

    model: Attached = subject.model
    if given.photo is None or given.text is not None:
        raise BadInput(f"{subject.name} looks at pictures and does not read; give it a picture.")
    if wish.way != "raw":
        raise BadInput(f"{subject.name} has attached attention, which has no map '{wish.way}'.")
    batch = _batch(subject, given.photo)
    with torch.no_grad():
        output = run(subject.name, Asked({"batch": batch}, lambda one: model(one["batch"]), given))
    names = [level.name or type(model.backbone).__name__ for level in model.levels]
    panels, choices = [], []
    for at in chosen_levels(names, wish.layer, subject.name):
        rows, columns = output.attention[at].keys.find("image").shape
        shown = panel(
            output.attention[at],
            f"{names[at]}: attached attention",
            [names[at]],
            photos={"image": given.photo},
            about=f"Level {at} of {len(names)}, {rows} x {columns} cells.",
        )
        panels.append(shown)
        choices.append(choose(shown, None, wish.head, wish.query))
    chances = class_chances(output.prediction[0], names_in(model.backbone))
    return panels, choices, [told(chances)], chances


def names_in(backbone: Any) -> dict[int, str]:
    """What a backbone of Hugging Face calls its classes; nothing where it does not say."""
    named = getattr(getattr(backbone, "config", None), "id2label", None)
    return dict(named) if isinstance(named, dict) else {}


def class_chances(
    logits: "Tensor", names: Mapping[int, str], most: int = 5
) -> list[tuple[str, float]]:
    """The likeliest classes by name or number, with their probabilities."""
    chances = logits.detach().float().softmax(dim=-1)
    best = chances.topk(min(most, len(chances)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    named = names if len(names) == len(chances) else {}
    return [(named.get(at, f"class {at}"), chance) for at, chance in pairs]


def told(chances: Sequence[tuple[str, float]]) -> str:
    """The likeliest class in a sentence."""
    name, chance = chances[0]
    return f"It answers {name} ({chance:.0%})."


def chosen_levels(names: list[str], layer: str | None, model: str) -> list[int]:
    """The levels to be shown: all, or the one of a name or number."""
    if layer is None:
        return list(range(len(names)))
    if layer in names:
        return [names.index(layer)]
    if layer.lstrip("-").isdigit() and -len(names) <= int(layer) < len(names):
        return [int(layer) % len(names)]
    raise BadInput(
        f"{model} has no layer '{layer}'; its levels are 0 to {len(names) - 1}, or by name "
        f"{', '.join(names)}."
    )


def _batch(subject: Subject, photo: Any) -> "Batch":
    """The photo as the model takes it, with the way back to its pixels."""
    from PIL import Image

    from overt.capture import image_geometry, transform_geometry
    from overt.data.batch import Batch

    size = (int(photo.shape[0]), int(photo.shape[1]))
    picture = Image.fromarray(photo)
    if subject.transform is not None:
        pixels = subject.transform(picture)[None]
        geometry = transform_geometry(subject.transform, [size])
    else:
        given = subject.image_processor(images=picture, return_tensors="pt")
        pixels = given["pixel_values"]
        geometry = image_geometry(subject.image_processor, [size])
    device = next(subject.model.parameters()).device
    return Batch((subject.name,), images=pixels.to(device), geometry=geometry)


def _transform(model: "Attached") -> Callable[[Any], Any]:
    """What a photo goes through without a processor: timm's own way, else a plain resize."""
    from overt.models.attaching.backbones import describe, usual_size

    if describe(model.backbone)["library"] == "timm":
        import timm

        settings = timm.data.resolve_model_data_config(model.backbone)
        return timm.data.create_transform(**settings, is_training=False)
    numbers, (height, width) = model.numbers, usual_size(model.backbone)
    if numbers is None:
        raise BadInput(
            "nothing in the folder says how the backbone wants its pictures; attach it with "
            "processor=... and save it again."
        )

    def stretch(picture: Any) -> Any:
        import numpy as np
        import torch

        from overt.models.attaching.backbones import normalised

        small = np.array(picture.convert("RGB").resize((width, height)))
        images = torch.from_numpy(small).permute(2, 0, 1)[None]
        return normalised(images, torch.float32, numbers)[0]

    return stretch
