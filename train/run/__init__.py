"""A training run: its configuration, its ranks, its log, and its end."""
