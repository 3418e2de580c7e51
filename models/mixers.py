"""The mixers of a CPM's layers: how tokens of a sequence see each other."""

from __future__ import annotations

from typing import Any

from bmt_burst import SequenceParallel
from bmt_burst.lightning import kernels
from bmt_burst.nn import BurstAttention, LightningAttention, SelfAttention

from .config import LIGHTNING, CPMConfig
from .linears import is_original


def make_mixer(
    config: CPMConfig, sp: SequenceParallel, layer: int, **attention: Any
) -> SelfAttention:
    """Return the mixer of a layer. `attention` are options of BurstAttention."""
    sizes = config.hidden_size, config.num_heads
    if config.mixer_of_layers[layer] == LIGHTNING:
        return LightningAttention(
            *sizes,
            config.head_dim,
            sp=sp,
            flash=find_lightning_flash(attention.get("flash", "auto")),
            layer=layer,
            qk_norm_eps=config.rms_norm_eps,
            output_norm_eps=config.rms_norm_eps,
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
        rotary=config.rotary_layers[layer],
        softmax_scale=config.softmax_scale,
        output_gate=config.attention_gate,
        **attention,
    )


def find_lightning_flash(flash: str) -> str:
    """Return the `flash` of lightning layers where that of BurstAttention is `flash`: the same, or
    "auto" if no kernel of lightning attention has this name.
    """
    return flash if flash in kernels.names() else "auto"


def is_mixer(module: SelfAttention) -> bool:
    """Whether a module is an original mixer: no subclass, without hooks or another forward."""
    return is_original(module, BurstAttention) or is_original(module, LightningAttention)
