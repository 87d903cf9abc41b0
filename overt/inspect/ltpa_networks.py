"""Networks of Learn to Pay Attention in `overt look`: loading, and one map per level."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import io
from overt.inspect.loaded_model import LoadedModel, run_notes

if TYPE_CHECKING:
    from overt.attention import AttentionMap
    from overt.data.batch import Batch
    from overt.nn.output import Output

IMAGE_SIDE, BIRD_IMAGE_SIDE = 32, 80  # training sizes; the larger with a first pooling above 2


def is_ltpa_config(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a VGG or ResNet of overt."""
    made = config.get("sizes", config.get("depth"))
    return isinstance(made, dict) and "classes" in made


def ltpa_classes() -> tuple[type, ...]:
    """Return the network classes of the paper."""
    from overt.papers.ltpa.resnet import ResNet, ResNetAttention
    from overt.papers.ltpa.vgg import VGG, VGGAttention, VGGGap, VGGProgressive

    return VGG, VGGGap, VGGAttention, VGGProgressive, ResNet, ResNetAttention


def load_ltpa(folder: Path, name: str, config: Mapping[str, Any]) -> LoadedModel:
    """Load a network that `save_pretrained` wrote without an inference specification.

    Networks without levels are identified by their weights. Classes have no names, and images get
    the training size of the paper.
    """
    from overt.experiments.inference_spec import InferenceSpec
    from overt.papers.ltpa.resnet import ResNet, ResNetAttention
    from overt.papers.ltpa.vgg import VGG, VGGAttention, VGGGap, VGGProgressive

    kind: Any = VGGAttention if "sizes" in config else ResNetAttention
    if "levels" not in config:
        parts = {key.split(".")[0] for key in io.read_tensors(folder / "model.safetensors")}
        plain = VGG if "hidden" in parts else VGGGap
        kind = VGGProgressive if "gate" in parts else plain
        kind = kind if "sizes" in config else ResNet
    model = kind.from_pretrained(folder)
    sizes = getattr(model, "sizes", None)
    side = BIRD_IMAGE_SIDE if sizes is not None and sizes.first_pool > 2 else IMAGE_SIDE
    known = InferenceSpec(kind.__name__, answers=(), pixels=(side, side))
    return LoadedModel(name, model, spec=known, notes=run_notes(folder))


def level_maps(model: Any, batch: "Batch", output: "Output") -> dict[str, "AttentionMap"]:
    """Return the map of every level and the last two joined, or the class activation map."""
    from overt.attention import AttentionMap, grid
    from overt.papers.ltpa.evaluate import positive_class_activation
    from overt.papers.ltpa.maps import level_maps, level_name
    from overt.papers.ltpa.vgg import VGGGap

    if isinstance(model, VGGGap):
        chosen = output.prediction.argmax(dim=-1)
        return {"class activations": positive_class_activation(model, model.encode(batch), chosen)}
    found = {f"level {level_name(one)}": one for one in output.attention}
    if len(found) > 1:
        assert batch.images is not None
        height, width = batch.images.shape[-2:]
        joined = level_maps(output.attention, (height, width))["joined"].float()
        layout = grid(height, width, geometry=batch.geometry)
        cells = joined.flatten(1).to(output.prediction.device)
        found["the last two joined"] = AttentionMap.from_cells(cells, layout).normalize()
    return found
