"""A synthetic world of scenes and questions whose deciding evidence is known by intervention."""
