"""Pairs of ids, cached on disk, as batches of few shapes. NumPy arrays."""
