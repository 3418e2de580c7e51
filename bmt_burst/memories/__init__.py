"""Memories, which hold what layers keep of earlier tokens: the protocol, and softmax attention's.

protocol    parts of a sequence, kinds of layers, and memories
keys        softmax attention as a kind, and its keys and values
new_tokens  new tokens of a cache, which every rank computes
"""
