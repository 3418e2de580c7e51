"""Sparse attention: each query attends to some blocks of keys, chosen by the data.

A mask says which pairs are visible. A choice narrows that to some blocks of each document.

config   `InfLLMV2`, the constants of the choice
choice   compressed keys, scores of blocks, and the chosen blocks
far      attention to the chosen blocks beyond the window
cache    attention of new tokens to a cache of keys and values
memory   choices that outlive activation checkpointing

`choose` returns the choice of whole sequences on one process, for inspection. `burst_attn_func` and
`nn.BurstAttention` take `sparse=InfLLMV2()`. `keep_choices` is for activation checkpointing.

This folder knows no ranks. `strategies/selected.py` brings the keys and values to the queries.
"""

from .choice import choose
from .config import InfLLMV2
from .memory import keep_choices

__all__ = ["InfLLMV2", "choose", "keep_choices"]
