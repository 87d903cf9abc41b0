"""What the positions of a model's input are: layouts and geometry, measured and read."""
