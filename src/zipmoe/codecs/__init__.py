"""Codecs: registry, and pure NumPy references of every bit layout (docs/format.md)."""
