"""Checkpoints: written, read, chosen to resume from, and weights to start from."""
