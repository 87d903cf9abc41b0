"""Any model as one of ours: fed with our batches, asked with parts hidden, its attention read."""
