"""Frozen image backbones, whose features are computed once."""
