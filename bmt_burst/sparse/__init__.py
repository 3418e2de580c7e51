"""Sparse attention: each query attends to some blocks of keys, chosen by the data.

A mask says which pairs are visible. A choice narrows that to some blocks of each document.

config      the constants of the choice
compressed  means of neighbouring keys, and the sums by which new tokens choose
queries     the queries that choose. Earlier ones see no more blocks than they may choose
choice      the definition of the choice, by `torch_choice`, or on GPUs `triton_choice`
memory      what a layer keeps of earlier tokens
triton_decoding  these sums and the attention of new tokens on GPUs, also in CUDA graphs
plan        the part of a rank in a call
extension   `InfLLMV2`, the seam to calls, layers and models

`choose` returns the choice of whole sequences on one process, for inspection. `keep_choices` and
`Choices` are for activation checkpointing, also of lightning attention (`base/kept.py`).
"""

from ..base.kept import Results as Choices
from ..base.kept import keep_results as keep_choices
from .choice import choose
from .extension import InfLLMV2

__all__ = ["Choices", "InfLLMV2", "choose", "keep_choices"]
