"""The options of layers and of functions beside tensors, in yunchang's order: softcap comes after
window_size.
"""

OF_LAYERS = (
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
)
OF_FUNCTIONS = (*OF_LAYERS, "group")
