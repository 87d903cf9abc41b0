"""Align the attention of a Hugging Face captioner by mask perturbation (A2), save and load it."""

import torch
from transformers import (
    GPT2Config,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from overt.nn import Aligner, mask_perturbation

torch.manual_seed(0)
vit = ViTConfig(
    image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
)
gpt = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
    vit, gpt, decoder_start_token_id=0, pad_token_id=0
)
model = VisionEncoderDecoderModel(config)  # or .from_pretrained(...)
photos, labels = torch.rand(8, 3, 32, 32), torch.randint(2, 50, (8, 6))  # -100 is padding


def task():
    """Compute the loss of the captioner."""
    return model(pixel_values=photos, labels=labels).loss


aligner = Aligner(model, mask_perturbation.find_cross_attention(model, task))
captioner = torch.optim.AdamW(aligner.captioner_parameters(), lr=1e-3)
masks = torch.optim.Adam(aligner.mask_parameters(), lr=1e-3)
for _ in range(3):
    result = mask_perturbation.align(aligner, task, strength=0.035, rows=labels != -100)
    captioner.zero_grad(), masks.zero_grad()
    sum(loss.mean() for group in result.losses.values() for loss in group.values()).backward()
    captioner.step(), masks.step()
    print({name: round(loss.item(), 3) for name, loss in result.losses["captioner"].items()})

aligner.save_pretrained("aligner")  # the captioner and its masks
again = Aligner.from_pretrained("aligner")
print(again.generate(photos, max_new_tokens=5).shape)  # captions with aligned attention
