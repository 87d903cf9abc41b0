"""Self-supervision for attention: recipes, their numbers, how they are built and judged."""
