"""Pretrain the image encoder of the vision-language model: what does each image token show?"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from overt import losses
from overt.data.scenes.cell_attributes import CellAttributes, attribute_classes
from overt.data.scenes.dataset import Scenes
from overt.experiments.builders import adamw, fit_stage
from overt.experiments.recipe import RunContext
from overt.experiments.vision_language_recipes import VisionLanguageRecipe
from overt.nn.vqa.vision_language import VisionLanguageVQA
from overt.train import FitResult, Losses, Progress, Reporter

STAGE = "encoder"


class AttributeClassifier(nn.Module):
    """The image encoder and the projector of a model, and a linear classifier of each image token.

    Args:
        model: The model; its encoder and projector are trained in place.
    """

    def __init__(self, model: VisionLanguageVQA) -> None:
        super().__init__()
        self.encoder = model.vlm.model.vision_tower
        self.projector = model.vlm.model.multi_modal_projector
        self.sizes = attribute_classes()
        width = model.sizes.width
        # normalized, as the first layer of the decoder normalizes what it reads
        self.classify = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sum(self.sizes)))
        self.model = (model,)  # in a tuple: the decoder is not trained here

    def forward(self, images: Shaped[Tensor, "i 3 y x"]) -> tuple[Float[Tensor, "i k _"], ...]:
        """Return the scores of the labels of each attribute."""
        (model,) = self.model
        cells = model.image_features(model.normalize_pixels(images))
        return self.classify(cells).split(self.sizes, dim=-1)


def attribute_losses(
    scores: tuple[Float[Tensor, "i k _"], ...], labels: Int[Tensor, "i k a"]
) -> losses.Loss:
    """Compute the cross-entropy of all cells, summed over the attributes."""
    found = [
        nn.functional.cross_entropy(one.flatten(0, 1), labels[..., at].flatten(), reduction="sum")
        for at, one in enumerate(scores)
    ]
    count = torch.tensor(float(labels[..., 0].numel()), device=labels.device)
    return losses.Loss(torch.stack(found).sum(), count)


def pretrain_encoder(
    model: VisionLanguageVQA,
    scenes: Scenes,
    recipe: VisionLanguageRecipe,
    context: RunContext,
    resume: bool,
    reporter: Reporter,
) -> FitResult:
    """Train the image encoder and the projector of a model on the attributes of cells."""
    net = AttributeClassifier(model)
    plan = recipe.pretrain
    limit = recipe.train.steps
    settings = replace(
        recipe.train, epochs=plan.epochs, batch=plan.batch, rate=plan.rate, watch=0, steps=limit
    )

    def step(net: nn.Module, batch: Mapping[str, Tensor], progress: Progress) -> Losses:
        return {
            "model": {"attributes": attribute_losses(net(batch["images"]), batch["attributes"])}
        }

    sets = {"model": adamw(net, settings)}
    data = CellAttributes(scenes)
    return fit_stage(net, data, step, sets, settings, context, resume, reporter, stage=STAGE)
