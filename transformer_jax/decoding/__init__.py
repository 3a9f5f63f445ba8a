"""Decoding: search as pure functions, translation of text, and scores of translations."""
