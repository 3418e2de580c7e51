"""The whole sequence as data: masks, layouts, and the tiles that follow. This folder knows no
tensors of tokens, no ranks and no devices.
"""
