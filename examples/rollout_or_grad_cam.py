"""Compare rollout with Grad-CAM: which is on the object, which explains the model; intervals."""

import torch
from torch import nn

from overt import AttentionMap, PixelGeometry, grid, metrics, watch, words
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
model, images = SmallViT().eval(), torch.rand(16, 3, 32, 32)
boxes = torch.tensor([8.0, 0, 24, 20]).repeat(16, 1, 1)  # left, top, right, bottom in pixels
geometry = PixelGeometry.identity(16, (32, 32))
cells = grid(4, 4, geometry=geometry)
truth = AttentionMap.from_coverage(geometry.cover_boxes(boxes, (4, 4))[:, 0], cells)

layout = words(1, "class") + cells
with watch(model, layout=layout) as trace:
    classes = model(images).argmax(dim=-1)
flow = rollout(trace, rows="class").between("class", "image").detach()
cam = grad_cam(model, images, classes, model.blocks.layers[1], layout=layout)

inside = [metrics.mass_inside(attention, truth) for attention in (flow, cam)]
print("inside the box, rollout - Grad-CAM:", metrics.paired_difference(*inside))
decide = metrics.pixel_removal(model, images, (4, 4), fill=metrics.blur_fill)
areas = [
    metrics.deletion_area(decide, attention, torch.Generator().manual_seed(0))
    for attention in (flow, cam)
]
print("deletion area, rollout - Grad-CAM:", metrics.paired_difference(*areas))
