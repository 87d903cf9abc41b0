"""Frozen networks for photos, whose cells are computed once."""
