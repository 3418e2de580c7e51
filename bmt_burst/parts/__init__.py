"""Parts of a sequence that a model computes in turn.

chunks   chunks of a sequence that is trained on, and of a prompt
cache    the cache of generation: a prompt, and new tokens
decoder  new tokens by a CUDA graph
"""
