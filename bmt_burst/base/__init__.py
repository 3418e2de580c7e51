"""Checks of plain arguments, and when torch compiles: what every other folder may import."""
