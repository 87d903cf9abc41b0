"""VL-BERT: one Transformer over words and image regions, whose attention can be supervised."""
