"""Attention-Aligned Transformer for Image Captioning (Fei, AAAI 2022)."""
