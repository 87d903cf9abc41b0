"""Token pruning and token merging in Transformer encoders."""
