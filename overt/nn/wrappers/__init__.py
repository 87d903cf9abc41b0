"""Wrap any PyTorch model as an `AttentionModel`: inputs, masks, and attention maps."""
