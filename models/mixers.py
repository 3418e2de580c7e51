"""The mixers of a CPM's layers: how tokens of a sequence see each other."""

from __future__ import annotations

from typing import Any

from bmt_burst.nn import BurstAttention, LightningAttention, SelfAttention
from bmt_burst.ranks.sequence_parallel import SequenceParallel

from .config import LIGHTNING, CPMConfig
from .linears import is_original


def make_mixer(
    config: CPMConfig, sp: SequenceParallel, layer: int, **attention: Any
) -> SelfAttention:
    """Return the mixer of a layer. `attention` are options of BurstAttention."""
    sizes = config.hidden_size, config.num_heads
    if config.mixer_of_layers[layer] == LIGHTNING:
        eps = config.rms_norm_eps
        return LightningAttention(
            *sizes, config.head_dim, sp=sp, layer=layer, qk_norm_eps=eps, output_norm_eps=eps
        )
    return BurstAttention(
        *sizes,
        config.num_kv_heads,
        config.head_dim,
        sp=sp,
        layer=layer,
        window=config.windows[layer],
        sparse=config.sparse,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        rotary=config.attention_rotary,
        output_gate=config.attention_gate,
        **attention,
    )


def is_mixer(module: SelfAttention) -> bool:
    """Whether a module is an original mixer: no subclass, without hooks or another forward."""
    return is_original(module, BurstAttention) or is_original(module, LightningAttention)
