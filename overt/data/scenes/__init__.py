"""A procedural world of things, questions and words, whose deciding evidence is known by intervention."""
