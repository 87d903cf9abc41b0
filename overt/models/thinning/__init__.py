"""Hard attention in Transformers: tokens that go, or merge, between the layers of any encoder."""
