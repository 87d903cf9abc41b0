"""VL-BERT: one Transformer over words and image regions, with attention that can be supervised."""
