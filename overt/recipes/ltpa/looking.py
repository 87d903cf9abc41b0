"""`overt look` at a network of Learn to Pay Attention: a panel a level, and the last two joined."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import files
from overt.errors import BadInput
from overt.recipes.asking import Asked, Given, run
from overt.recipes.attached import chosen_levels, class_chances, told
from overt.recipes.opening import Subject
from overt.recipes.seeing import Wish

if TYPE_CHECKING:
    from overt.attention import AttentionMap
    from overt.data.batch import Batch
    from overt.models.output import Output
    from overt.show.panel import Choice, Panel

SIDE, BIRDS = 32, 80  # pixels that networks are trained on; those with a first pooling of 5 on more


def is_own(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is one that a VGG or a ResNet of ours has written."""
    made = config.get("sizes", config.get("depth"))
    return isinstance(made, dict) and "classes" in made


def own_kinds() -> tuple[type, ...]:
    """The networks that `view_own` shows."""
    from overt import models

    vggs = (models.VGG, models.VGGGap, models.VGGAttention, models.VGGProgressive)
    return (*vggs, models.ResNet, models.ResNetAttention)


def open_own(folder: Path, name: str, config: Mapping[str, Any]) -> Subject:
    """The network in the folder `model` of a run, or saved by `save_pretrained`, in eval mode.

    Networks without levels are told apart by what they have weights for.
    """
    from overt import models

    kind: Any = models.VGGAttention if "sizes" in config else models.ResNetAttention
    if "levels" not in config:
        parts = {key.split(".")[0] for key in files.read_tensors(folder / "model.safetensors")}
        plain = models.VGG if "hidden" in parts else models.VGGGap
        kind = models.VGGProgressive if "gate" in parts else plain
        kind = kind if "sizes" in config else models.ResNet
    return Subject(name, kind.from_pretrained(folder), notes=tuple(_about(folder)))


def _about(folder: Path) -> Iterator[str]:
    """What the run that a network comes from says of itself."""
    results = folder.parent / "results.json"
    if folder.name == "model" and results.is_file():
        said = files.read_json(results)
        yield f"From a run of {said.get('recipe')}: {said.get('about')}."


def view_own(
    subject: Subject, given: Given, wish: Wish
) -> tuple[list["Panel"], list["Choice"], list[str], list[tuple[str, float]]]:
    """A panel for each level, the lowest first, one of the last two joined, and the answer."""
    import torch

    from overt.show.panel import choose, panel

    if given.photo is None or given.text is not None:
        raise BadInput(f"{subject.name} looks at pictures and does not read; give it a picture.")
    if wish.way != "raw":
        raise BadInput(f"{subject.name} has learned attention, which has no map '{wish.way}'.")
    batch = batch_of(subject, given.photo)
    with torch.no_grad():
        call = Asked({"batch": batch}, lambda one: subject.model(one["batch"]), given)
        output = run(subject.name, call)
        found = maps_of(subject.model, batch, output)
    if not found:
        raise BadInput(
            f"{subject.name} attends to nothing; look at a network with attention, or at one of "
            "class activations."
        )
    names, panels, choices = list(found), [], []
    for at in chosen_levels(names, wish.layer, subject.name):
        attention = found[names[at]]
        rows, columns = attention.keys.find("image").shape
        photos = {"image": given.photo}
        about = f"{rows} x {columns} cells."
        shown = panel(attention, names[at], [names[at]], photos=photos, about=about)
        panels.append(shown)
        choices.append(choose(shown, None, wish.head, wish.query))
    chances = class_chances(output.prediction[0], {})
    return panels, choices, [*subject.notes, told(chances)], chances


def maps_of(model: Any, batch: "Batch", output: "Output") -> dict[str, "AttentionMap"]:
    """Every level by its grid, and the last two joined; or what speaks for the chosen class."""
    from overt import models
    from overt.attention import AttentionMap, grid
    from overt.recipes.ltpa.evaluation import speaking
    from overt.recipes.ltpa.maps import levels, name_of

    if isinstance(model, models.VGGGap):
        chosen = output.prediction.argmax(dim=-1)
        return {"class activations": speaking(model, model.encode(batch), chosen)}
    found = {f"level {name_of(one)}": one for one in output.attention}
    if len(found) > 1:
        assert batch.images is not None
        height, width = batch.images.shape[-2:]
        joined = levels(output.attention, (height, width))["joined"].float()
        layout = grid(height, width, geometry=batch.geometry)
        cells = joined.flatten(1).to(output.prediction.device)
        found["the last two joined"] = AttentionMap.from_cells(cells, layout).normalize()
    return found


def batch_of(subject: Subject, photo: Any) -> "Batch":
    """The middle of a photo at the size that the network was trained on, and the way back."""
    from overt.data.batch import Batch
    from overt.data.images import prepare

    sizes = getattr(subject.model, "sizes", None)
    side = BIRDS if sizes is not None and sizes.first_pool > 2 else SIDE
    pixels, geometry = prepare(photo, (side, side))
    device = next(subject.model.parameters()).device
    return Batch((subject.name,), images=pixels[None].to(device), geometry=geometry.to(device))
