"""Checkpoints: writing, reading, resuming, and weights to start from."""
