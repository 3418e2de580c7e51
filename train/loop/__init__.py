"""The training loop of a rank: steps, and the evaluations, saves and records between them."""
