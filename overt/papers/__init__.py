"""Implementations of five papers: recipes, networks, training, evaluation and tables."""
