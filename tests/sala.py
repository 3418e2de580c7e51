"""MiniCPM-SALA in plain torch: an independent transcription of the released layers, for whole
prompts below 8,192 tokens, from their formulas (arXiv 2602.11761).

Letters: B batch, S tokens, H heads, G kv heads, D head size. Weights have the released names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# which of the release's 32 layers have lightning attention
RELEASED_MIXERS = [
    "minicpm4" if layer in (0, 9, 16, 17, 22, 29, 30, 31) else "lightning-attn"
    for layer in range(32)
]
SPARSE = {"kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64}
SPARSE |= {"window_size": 2048, "topk": 64, "use_nope": False, "dense_len": 8192}
RELEASED: dict[str, Any] = {
    "architectures": ["MiniCPMSALAForCausalLM"],
    "model_type": "minicpm_sala",
    "auto_map": {
        "AutoConfig": "configuration_minicpm_sala.MiniCPMSALAConfig",
        "AutoModelForCausalLM": "modeling_minicpm_sala.MiniCPMSALAForCausalLM",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_use_output_gate": True,
    "attn_use_rope": False,
    "bos_token_id": 1,
    "dim_model_base": 256,
    "eos_token_id": [2, 73440],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.1,
    "intermediate_size": 16384,
    "lightning_head_dim": 128,
    "lightning_nh": 32,
    "lightning_nkv": 32,
    "lightning_scale": "1/sqrt(d)",
    "lightning_use_rope": True,
    "max_position_embeddings": 524288,
    "mixer_types": RELEASED_MIXERS,
    "mup_denominator": 32,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 2,
    "pad_token_id": 2,
    "qk_norm": True,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "shift_labels": True,
    "sparse_config": SPARSE,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_output_gate": True,
    "use_output_norm": True,
    "vocab_size": 73448,
}
# the same model with small sizes
SMALL = RELEASED | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "dim_model_base": 16,
    "lightning_nh": 4,
    "lightning_nkv": 4,
    "lightning_head_dim": 8,
    "mup_denominator": 5,
    "mixer_types": ["minicpm4", "lightning-attn", "lightning-attn", "minicpm4", "lightning-attn"],
    "eos_token_id": [2, 319],
}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate x (B, S, H, D), halves rotated, by positions from 0."""
    tokens, size = x.shape[1], x.shape[3]
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    phases = torch.arange(tokens, dtype=torch.float64).outer(frequencies).repeat(1, 2)
    cos, sin = (table.to(x.dtype)[None, :, None] for table in (phases.cos(), phases.sin()))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def lightning(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the lightning attention of all tokens to all earlier ones (B, S, H, D)."""
    tokens, heads, size = q.shape[1:]
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    decay = torch.exp(-slopes[:, None, None] * distance.clamp_min(0)).tril().to(q.dtype)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * decay * size**-0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores, v)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of q (B, S, H, D) to k and v (B, S, G, D)."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def lightning_layer(w: Mapping[str, Tensor], hf: Mapping[str, Any], x: Tensor) -> Tensor:
    """Return a lightning layer's result on x (B, S, E). w has its weights, without a prefix."""
    q, k, v = (
        (x @ w[f"{name}_proj.weight"].T).unflatten(-1, (-1, hf["head_dim"])) for name in "qkv"
    )
    q, k = (
        rotate(norm(y, w[f"{name}_norm.weight"], hf["rms_norm_eps"]), hf["rope_theta"])
        for name, y in (("q", q), ("k", k))
    )
    mixed = norm(lightning(q, k, v).flatten(2), w["o_norm.weight"], hf["rms_norm_eps"])
    return mixed * torch.sigmoid(x @ w["z_proj.weight"].T) @ w["o_proj.weight"].T


def sparse_layer(w: Mapping[str, Tensor], hf: Mapping[str, Any], x: Tensor) -> Tensor:
    """Return the result of a layer with InfLLM-V2, which is dense for so few tokens."""
    q, k, v = (
        (x @ w[f"{name}_proj.weight"].T).unflatten(-1, (-1, hf["head_dim"])) for name in "qkv"
    )
    return (
        softmax(q, k, v).flatten(2) * torch.sigmoid(x @ w["o_gate.weight"].T) @ w["o_proj.weight"].T
    )


def logits(weights: Mapping[str, Tensor], hf: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Return the logits (B, S, V) of a folder's model for tokens (B, S)."""
    eps, scale = hf["rms_norm_eps"], hf["scale_depth"] / hf["mup_denominator"] ** 0.5
    x = weights["model.embed_tokens.weight"][tokens] * hf["scale_emb"]
    for layer, mixer in enumerate(hf["mixer_types"]):
        prefix = f"model.layers.{layer}."
        w = {n.removeprefix(prefix): y for n, y in weights.items() if n.startswith(prefix)}
        of_mixer = {n.removeprefix("self_attn."): y for n, y in w.items() if "self_attn." in n}
        mix = sparse_layer if mixer == "minicpm4" else lightning_layer
        x = x + scale * mix(of_mixer, hf, norm(x, w["input_layernorm.weight"], eps))
        normed = norm(x, w["post_attention_layernorm.weight"], eps)
        gated = F.silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
        x = x + scale * (gated @ w["mlp.down_proj.weight"].T)
    x = norm(x, weights["model.norm.weight"], eps) / (hf["hidden_size"] / hf["dim_model_base"])
    return x @ weights["lm_head.weight"].T
