"""Attending Self-Attention: visually grounded supervision (Samaran et al., 2021)."""
