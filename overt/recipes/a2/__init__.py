"""The attention-aligned captioner: recipes, their numbers, how they are built and judged."""
