"""Conversion from the formats of other frameworks."""
