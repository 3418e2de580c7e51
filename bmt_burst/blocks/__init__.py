"""Attention to blocks of keys that data chooses: what any such choice needs.

extension  a choice of blocks as a call sees it
memory     what a layer keeps of earlier tokens
plan       the part of a rank in a call: near by a mask, far by a choice
documents  the documents of a mask
far        the chosen blocks beyond what is near, and attention to them, or on GPUs `triton_far`
tiles      the blocks of neighbouring queries, and the queries of each block, for GPUs
spans      gathers tokens of the sequence from all ranks, and returns gradients to their owners
"""
