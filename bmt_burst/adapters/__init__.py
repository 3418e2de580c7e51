"""Sequence parallel attention in models of other packages. Each module needs its package."""
