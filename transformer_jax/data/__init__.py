"""Batches of few shapes, as NumPy arrays, from pairs of ids that are cached on disk."""
