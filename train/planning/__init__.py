"""Plans of a run, made before it starts and without a GPU: memory, seconds, price."""
