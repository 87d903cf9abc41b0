"""Learn to Pay Attention: recipes, their numbers, how they are built and judged."""
