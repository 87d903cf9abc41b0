"""Attach learned attention to a pretrained backbone."""
