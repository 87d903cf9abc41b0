"""Image captioning: a Transformer captioner and decoding strategies."""
