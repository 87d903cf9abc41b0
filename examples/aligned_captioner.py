"""Align the attention of a Hugging Face captioner by mask perturbation (A2)."""

import torch
from transformers import (
    GPT2Config,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from overt import losses, nn

torch.manual_seed(0)
vit = ViTConfig(
    image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
)
gpt = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, gpt)
model = VisionEncoderDecoderModel(config)  # or .from_pretrained(...)
photos, tokens = torch.rand(8, 3, 32, 32), torch.randint(2, 50, (8, 6))
there = torch.ones(8, 5, dtype=torch.bool)  # words that are not padding


def logits():
    """Predict every next word of the captions."""
    return model(pixel_values=photos, decoder_input_ids=tokens[:, :-1]).logits


def task():
    """Compute the loss of the captioner."""
    return losses.next_token_cross_entropy(logits(), tokens[:, 1:], there)


places = nn.mask_perturbation.find_cross_attention(model, logits)
aligner = nn.Aligner(model, places, fuse=nn.mask_perturbation.gate)
captioner = torch.optim.AdamW(aligner.captioner_parameters(), lr=1e-3)
masks = torch.optim.Adam(aligner.mask_parameters(), lr=1e-3)
for _ in range(3):
    result = nn.mask_perturbation.align(aligner, task, strength=0.035, rows=there)
    captioner.zero_grad(), masks.zero_grad()
    sum(loss.mean() for group in result.losses.values() for loss in group.values()).backward()
    captioner.step(), masks.step()
    print({name: round(loss.item(), 3) for name, loss in result.losses["captioner"].items()})

with aligner.eval().aligned():  # captions are generated inside this block
    print(model.generate(photos, max_new_tokens=5, pad_token_id=1).shape)
