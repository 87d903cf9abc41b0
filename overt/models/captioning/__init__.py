"""Captioners, and how a decoder writes: greedily, by chance, with beams."""
