"""The whole sequence as data: masks, layouts, and the tiles that follow. No tensors of tokens,
ranks or devices.
"""
