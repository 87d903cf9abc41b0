"""Learning Visual Question Answering by Bootstrapping Hard Attention (Malinowski et al., 2018)."""
