"""Decoding with a cache."""
