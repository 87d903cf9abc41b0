"""Train a ViT so that its class token attends to a bounding box."""

import torch
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

import overt
from overt import AttentionMap, PixelGeometry, grid, losses

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=2, **sizes))
photos, classes = torch.rand(16, 3, 32, 32), torch.randint(2, (16,))
boxes = torch.tensor([8.0, 4, 24, 20]).repeat(16, 1, 1)  # left, top, right, bottom in pixels

geometry = PixelGeometry.identity(16, (32, 32))
cells = geometry.cover_boxes(boxes, (8, 8))[:, 0]
target = AttentionMap.from_cells(cells, grid(8, 8, geometry=geometry)).normalize()
layout = overt.layout_of(model, {"pixel_values": photos})
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(10):
    with overt.watch(model, layout=layout) as trace:
        logits = model(pixel_values=photos).logits
    attention = losses.cross_entropy(trace.log_block("cls", "image"), target)
    loss = cross_entropy(logits, classes) + 0.5 * attention.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: attention loss {attention.item():.3f}")
