"""Compare rollout with Grad-CAM: which map is the model more faithful to, with an interval."""

import torch
from torch import nn

from overt import grid, metrics, watch, words
from overt.attribution import grad_cam, rollout


class SmallViT(nn.Module):
    """Your model."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.first, self.head = nn.Parameter(torch.randn(1, 1, 32)), nn.Linear(32, 3)

    def forward(self, images):
        cells = self.patch(images).flatten(2).mT
        tokens = torch.cat([self.first.expand(len(cells), -1, -1), cells], dim=1)
        return self.head(self.blocks(tokens)[:, 0])


torch.manual_seed(0)
model, images, layout = SmallViT().eval(), torch.rand(16, 3, 32, 32), words(1, "class") + grid(4, 4)
with watch(model, layout=layout) as trace:
    classes = model(images).argmax(dim=-1)
flow = rollout(trace, rows="class").between("class", "image").detach()
cam = grad_cam(model, images, classes, model.blocks.layers[1], layout=layout)

decide = metrics.pixel_removal(model, images, (4, 4), fill=metrics.blur_fill)
areas = [
    metrics.deletion_area(decide, attention, torch.Generator().manual_seed(0))
    for attention in (flow, cam)
]
print("rollout - Grad-CAM:", metrics.confidence_interval(areas[0] - areas[1]))  # paired by sample
