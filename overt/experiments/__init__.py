"""Run experiments: recipes, run folders, resuming, tables and evaluation, shared by all papers."""
