"""A procedural world of things and questions whose deciding evidence is known by intervention."""
