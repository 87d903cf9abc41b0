"""Answering questions about images: eyes, readers, and ways to look."""
