"""Attention-Aligned Transformer: build plain or aligned captioners from a config, and load them."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Union

import torch
from jaxtyping import Float
from torch import Tensor

from overt.experiments.recipe import scale_width
from overt.nn import mask_perturbation
from overt.nn.captioning.captioner import Captioner, CaptionerSizes
from overt.nn.mask_perturbation import Aligner, AttentionShape
from overt.nn.network import SavableModule
from overt.nn.vqa.image_encoders import ImageEncoder
from overt.papers.a2.config import A2Align, A2Fusion, A2MaskSource, A2Model, A2Preset

WIDTH, INNER = 512, 2048  # of the paper's Transformer
REGIONS = 100  # maximum for linear masks: the most regions a detector returns

CaptionerNet = Union[Captioner, "AlignedCaptioner"]
FUSIONS = {
    A2Fusion.MAX: mask_perturbation.max_pooling,
    A2Fusion.MOVING_AVERAGE: mask_perturbation.moving_average,
    A2Fusion.DECAY: mask_perturbation.decay,
    A2Fusion.GATE: mask_perturbation.gate,
}


def build_captioner(
    model: A2Model, align: A2Align, vocabulary: int, eye: ImageEncoder
) -> CaptionerNet:
    """Build the captioner of a recipe, aligned unless `align.fuse` is none."""
    heads = model.heads
    # Rounded per head, so that the heads divide the width.
    per_head = max(1, round(WIDTH * model.width / heads))
    sizes = CaptionerSizes(
        vocabulary=vocabulary,
        width=heads * per_head,
        layers=model.layers,
        heads=heads,
        inner=scale_width(INNER, model.width),
        dropout=model.dropout,
        encoder=model.encoder,
    )
    plain = Captioner(sizes, eye)
    return plain if align.fuse is A2Fusion.NONE else AlignedCaptioner(plain, align)


def inner_captioner(model: CaptionerNet) -> Captioner:
    """Return the plain captioner inside."""
    return model.captioner if isinstance(model, AlignedCaptioner) else model


def cross_attention_places(sizes: CaptionerSizes) -> dict[str, AttentionShape]:
    """The cross-attentions of our captioner: what `perturb.crossings` finds by running it."""
    one = AttentionShape(sizes.heads, sizes.heads, sizes.width // sizes.heads)
    return {f"decoder.{layer}.cross": one for layer in range(sizes.layers)}


class AlignedCaptioner(SavableModule, Aligner):  # type: ignore[misc]
    """A captioner wrapped in an `Aligner`, configured by plain values so that it can be saved.

    Masks that do not learn by perturbation, `constant` and `free`, belong to the captioner's
    parameters.
    """

    def __init__(self, captioner: Captioner, align: A2Align) -> None:
        super().__init__(
            captioner, cross_attention_places(captioner.sizes), **aligner_options(align)
        )
        self.align = align

    @property
    def captioner(self) -> Captioner:
        """Return the plain captioner inside."""
        assert isinstance(self.model, Captioner)
        return self.model

    def parameter_sets(self) -> dict[str, list[torch.nn.Parameter]]:
        """Return the parameters of each optimizer by set name; empty sets are left out."""
        ours, masks = self.captioner_parameters(), self.mask_parameters()
        if not self.align.perturbs:
            return {mask_perturbation.CAPTIONER: [*ours, *masks]}
        return {mask_perturbation.CAPTIONER: ours, mask_perturbation.MASKS: masks}

    def config(self) -> dict[str, Any]:
        """Return the values that `from_config` takes."""
        chosen = asdict(self.align)
        return {
            "captioner": self.captioner.config(),
            "align": {name: getattr(one, "value", one) for name, one in chosen.items()},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "AlignedCaptioner":
        """Build the captioner of a config, with fresh weights, masks and fusions."""
        saved = config["align"]
        chosen = A2Align(
            A2Fusion(saved["fuse"]),
            A2Preset(saved["preset"]),
            A2MaskSource(saved["masks"]),
            float(saved["penalty"]),
            float(saved["rate"]),
        )
        return cls(Captioner.from_config(config["captioner"]), chosen)


def load_captioner(folder: Path) -> CaptionerNet:
    """Load the captioner from the `model/` folder of a run, plain or aligned."""
    from overt import io

    kept = io.read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return (AlignedCaptioner if "align" in kept else Captioner).from_pretrained(folder)


def aligner_options(align: A2Align) -> dict[str, Any]:
    """Return the `Aligner` arguments for these settings."""
    match align.preset:
        case A2Preset.OURS:
            found: dict[str, Any] = {"fuse": FUSIONS[align.fuse]}
        case A2Preset.ENHANCED_FIRST:
            insert = mask_perturbation.fuse_enhanced_normalized
            found = {"fuse": FUSIONS[align.fuse], "finish": insert}
        case A2Preset.PAPER:
            found = {"fuse": FUSIONS[align.fuse], **mask_perturbation.published_choices(REGIONS)}
        case A2Preset.LU2021:
            # This preset has its own fusion, so `align.fuse` does not apply.
            found = mask_perturbation.lu2021_choices()
    match align.masks:
        case A2MaskSource.LEARNED:
            return found
        case A2MaskSource.RANDOM:
            return {**found, "mask": mask_perturbation.RandomMask}
        case A2MaskSource.SHUFFLED:
            return {**found, "through": shuffle_regions}
        # Masks that are trained with the captioner must keep their gradient, which is detached by
        # default.
        case A2MaskSource.CONSTANT:
            return {
                **found,
                "mask": mask_perturbation.ConstantMask,
                "through": mask_perturbation.keep_mask_gradient,
            }
        case A2MaskSource.FREE:
            return {**found, "through": mask_perturbation.keep_mask_gradient}


def shuffle_regions(mask: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """Permute the regions of the mask of every head and word at random: a placebo."""
    # In float32: half precision has so few values that ties would keep regions in their order.
    order = torch.rand_like(mask, dtype=torch.float32).argsort(dim=-1)
    return mask.detach().gather(-1, order)
