"""Generation over ranks: a cache of earlier tokens, and the computation of new ones."""
