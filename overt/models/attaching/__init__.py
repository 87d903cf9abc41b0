"""Learned attention on a pretrained backbone: its levels, and how it is fed and built again."""
