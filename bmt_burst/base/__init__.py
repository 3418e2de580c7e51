"""Checks of plain arguments, autocast, autograd's limits, and compilers."""
