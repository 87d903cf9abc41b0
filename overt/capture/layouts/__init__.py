"""Layouts and geometry of the positions in a model's input."""
