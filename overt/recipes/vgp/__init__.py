"""Grounded supervision of vision-and-language Transformers: recipes, tables and what they build."""
