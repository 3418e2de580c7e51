"""A training run: its configuration, its ranks, what it logs, and how it ends."""
