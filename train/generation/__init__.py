"""Decoding with a key-value cache."""
