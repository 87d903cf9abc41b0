"""Captioners as recipes say: plain, or with their attention aligned, and how they are kept."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Union

import torch
from jaxtyping import Float
from torch import Tensor

from overt.models.answering.eyes import Eye
from overt.models.captioning.captioner import Captioner, CaptionSizes
from overt.models.network import Kept
from overt.recipes.a2.recipe import Align, Fuse, Masks, Model, Preset
from overt.supervise import perturb
from overt.supervise.perturb import Aligner, Place

WIDTH, INNER = 512, 2048  # of the paper's Transformer
REGIONS = 100  # the most that linear masks are made for: what a detector gives at most

Net = Union[Captioner, "AlignedCaptioner"]
FUSES = {
    Fuse.MAX: perturb.max_pooling,
    Fuse.MOVING_AVERAGE: perturb.moving_average,
    Fuse.DECAY: perturb.decay,
    Fuse.GATE: perturb.gate,
}


def network(model: Model, align: Align, vocabulary: int, eye: Eye) -> Net:
    """The captioner of a recipe, aligned unless it says `none`."""
    heads = model.heads
    per_head = max(1, round(WIDTH * model.width / heads))
    sizes = CaptionSizes(
        vocabulary=vocabulary,
        width=heads * per_head,
        layers=model.layers,
        heads=heads,
        inner=max(4, round(INNER * model.width)),
        dropout=model.dropout,
        encoder=model.encoder,
    )
    plain = Captioner(sizes, eye)
    return plain if align.fuse is Fuse.NONE else AlignedCaptioner(plain, align)


def plain_of(model: Net) -> Captioner:
    """The captioner itself."""
    return model.captioner if isinstance(model, AlignedCaptioner) else model


def places(sizes: CaptionSizes) -> dict[str, Place]:
    """The cross-attentions of our captioner: what `perturb.crossings` finds by running it."""
    one = Place(sizes.heads, sizes.heads, sizes.width // sizes.heads)
    return {f"decoder.{layer}.cross": one for layer in range(sizes.layers)}


class AlignedCaptioner(Kept, Aligner):
    """A captioner of ours under an `Aligner`, made from plain values, so that it can be kept.

    Masks that do not learn by disturbance, `constant` and `free`, belong to the captioner.
    """

    def __init__(self, captioner: Captioner, align: Align) -> None:
        super().__init__(captioner, places(captioner.sizes), **choices(align))
        self.align = align

    @property
    def captioner(self) -> Captioner:
        """The captioner inside."""
        assert isinstance(self.model, Captioner)
        return self.model

    def parameter_sets(self) -> dict[str, list[torch.nn.Parameter]]:
        """What each optimizer moves, by the name of its set; a set without parameters is none."""
        ours, masks = self.captioner_parameters(), self.mask_parameters()
        if not self.align.disturbs:
            return {perturb.CAPTIONER: [*ours, *masks]}
        return {perturb.CAPTIONER: ours, perturb.MASKS: masks}

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        chosen = asdict(self.align)
        return {
            "captioner": self.captioner.config(),
            "align": {name: getattr(one, "value", one) for name, one in chosen.items()},
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "AlignedCaptioner":
        """The captioner that `config` describes, with fresh weights, masks and fusions."""
        said = config["align"]
        chosen = Align(
            Fuse(said["fuse"]),
            Preset(said["preset"]),
            Masks(said["masks"]),
            float(said["penalty"]),
            float(said["rate"]),
        )
        return cls(Captioner.from_config(config["captioner"]), chosen)


def load(folder: Path) -> Net:
    """The captioner of a run's `model/`, plain or aligned."""
    from overt import files

    kept = files.read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return (AlignedCaptioner if "align" in kept else Captioner).from_pretrained(folder)


def choices(align: Align) -> dict[str, Any]:
    """What an `Aligner` is made with."""
    match align.preset:
        case Preset.OURS:
            found: dict[str, Any] = {"fuse": FUSES[align.fuse]}
        case Preset.PAPER:
            found = {"fuse": FUSES[align.fuse], **perturb.paper(REGIONS)}
        case Preset.LU2021:
            found = perturb.lu2021()
    match align.masks:
        case Masks.LEARNED:
            return found
        case Masks.RANDOM:
            return {**found, "mask": perturb.RandomMask}
        case Masks.SHUFFLED:
            return {**found, "through": shuffled}
        case Masks.CONSTANT:
            return {**found, "mask": perturb.ConstantMask, "through": perturb.attached}
        case Masks.FREE:
            return {**found, "through": perturb.attached}


def shuffled(mask: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """The mask of every head and word, its regions in an order by chance: a placebo."""
    order = torch.rand_like(mask, dtype=torch.float32).argsort(dim=-1)
    return mask.detach().gather(-1, order)
