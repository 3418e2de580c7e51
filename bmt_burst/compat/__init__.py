"""The functions of other packages for sequence parallelism, computed by this library.

A script for one of these packages changes its imports:

ring_flash_attn    ring-flash-attention 0.1.8
yunchang           yunchang 0.6.4, also known as USP

`burst_attn_func` computes the attention. These modules give it the tokens of each rank and the
visible pairs. docs/migrate.md lists what changes in a script.
"""
