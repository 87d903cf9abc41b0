"""Scorecards: metrics of a model's maps and of control maps, with confidence intervals."""
