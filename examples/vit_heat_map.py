"""Draw where a Vision Transformer looks, on a photo that is not square."""

import numpy as np
import torch
from transformers import BitImageProcessor, ViTConfig, ViTModel

import overt

torch.manual_seed(0)
photo = np.random.default_rng(0).integers(0, 255, (300, 451, 3), dtype=np.uint8)  # yours
# ViTModel.from_pretrained(...) and AutoImageProcessor.from_pretrained(...) take their places
model = ViTModel(ViTConfig(image_size=64, patch_size=8, hidden_size=48, num_attention_heads=4))
processor = BitImageProcessor(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64})

inputs = processor(images=photo, return_tensors="pt")
layout = overt.layout_of(model, inputs, processor=processor, images=[photo])
with torch.no_grad(), overt.watch(model.eval(), layout=layout) as trace:
    model(**inputs)
trace.map(-1).save("heat.png", photo)  # the last layer, mean of heads, from the class token
