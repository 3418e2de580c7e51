"""Sequence parallel self-attention as a layer.

Letters: B batch, S tokens of this rank, H query heads, G kv heads, D head size, E model width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import burst_attn_func
from ..base.arguments import as_bool, as_int, as_positive
from ..base.compiled import not_compiled
from ..base.dtypes import accumulator_dtype
from ..calls.masking import layouts_of_rows, masks_of_layouts, masks_of_rows, resolve_layout
from ..calls.options import Layouts, Masks
from ..calls.refusal import refuse_call
from ..parts.chunks import Chunk
from ..parts.cache import Cache
from ..kernels import load
from ..kernels.reference import visible
from ..merging.sinks import decoded_with_sinks
from ..ranks.sequence_parallel import SequenceParallel
from ..sequence.layout import Layout
from ..sequence.mask import Mask
from ..sequence.tile import KernelCall
from ..sparse.cache import attend_to_cache, check_cache, sum_keys
from ..sparse.config import InfLLMV2, check_layer
from ..spec import Spec
from .heads import SelfAttention
from .modules import WRONG_INPUTS, KVCache

_MOST_BATCHES = 32  # their masks within a window are kept in a cache


class BurstAttention(SelfAttention):
    """Self-attention with rotary positions over the ranks of `sp`. It is causal unless a mask is
    given, and GQA where num_kv_heads < num_heads.

    hidden_size    E, the width of inputs and outputs
    num_heads      H
    num_kv_heads   G, by default H
    head_dim       D, by default hidden_size / num_heads
    sp             the ranks that share the sequence, from init_sequence_parallel. By default this
                   rank is alone.
    flash, deterministic, strategy, softcap
                   as burst_attn_func's
    window         a token attends only to itself and the window - 1 tokens before it, if the mask
                   allows. Mistral and MiniCPM count in the same way.
    layer          this layer's index in a KVCache
    qkv_bias       whether q_proj, k_proj and v_proj have a bias, as Qwen2's
    o_bias         whether o_proj has one
    qk_norm_eps    if given, q and k are RMS-normalized in each head before they are rotated, as in
                   Qwen3. It is added to the mean square. `q_norm` and `k_norm` have weights (D,).
    sinks          whether the layer has a parameter `sinks` (H,), as in GptOss: burst_attn_func's.
                   It starts as 0. In bf16 and fp16 it is widened to fp32 when it is used.
    sparse         as burst_attn_func's. It excludes window and softcap. With a cache it counts all
                   tokens of the cache as one document, and has no gradient. A SparseKVCache makes
                   it faster, and use_nope needs one.
    rotary         False: q and k are not rotated, and the layer needs no rope_tables. MiniCPM-SALA
                   has such layers. use_nope then changes nothing.
    output_gate    whether the attention is multiplied by sigmoid(o_gate(x)) before o_proj, x being
                   the layer's input

    Projections are `q_proj`, `k_proj`, `v_proj`, `o_proj`. Under autocast attention computes in its
    dtype, whatever the dtype of q and k after norms and rotary tables.

    Raises ValueError if num_kv_heads does not divide num_heads, head_dim is odd or below 2, window
    is below 1, qk_norm_eps or softcap is not positive and finite, or sparse excludes another
    argument. Raises TypeError for arguments of a wrong type.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        sp: SequenceParallel | None = None,
        flash: str = "auto",
        deterministic: bool = False,
        strategy: str = "auto",
        window: int | None = None,
        layer: int = 0,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        sparse: InfLLMV2 | None = None,
        rotary: bool = True,
        output_gate: bool = False,
    ):
        super().__init__(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            sp=sp,
            layer=layer,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm_eps=qk_norm_eps,
            output_gate=output_gate,
            rotary=rotary,
        )
        if window is not None and as_int("window", window) < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        softcap = None if softcap is None else as_positive("softcap", softcap)
        check_layer(sparse, window=window, softcap=softcap)
        if sparse is not None and not rotary:  # the choice is the same, by the same q and k
            sparse = dataclasses.replace(sparse, use_nope=False)
        self.options: dict[str, Any] = {
            "flash": flash,
            "deterministic": deterministic,
            "strategy": strategy,
            "softcap": softcap,
            "sparse": sparse,
        }
        self.window = None if window is None else int(window)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if as_bool("sinks", sinks) else None

    def _refuse(self, error: Exception) -> NoReturn:
        refuse_call(error, self.sp.process_group, self.sp.double_group)

    def _find_choose_by(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        sparse: InfLLMV2 | None = self.options["sparse"]
        return (q.detach(), k.detach()) if sparse is not None and sparse.use_nope else None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache | Chunk | Cache | None = None,
        mask: Masks | None = None,
        layout: Layouts | None = None,
        choose_by: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the attention with heads side by side: (B, S, H * D).

        mask       which pairs of the whole sequence are visible, or one for each row. By default a
                   token attends to all earlier ones.
        layout     which rank owns which positions, or one for each row; by default sp's. "balanced"
                   is Layout.balanced of the mask, without this layer's window.
        choose_by  as burst_attn_func's

        Raises on all ranks ValueError for a cache with a mask or with a layout, for a KVCache with
        an `sp` of more than one rank, and for use_nope without choose_by or with a cache that is no
        SparseKVCache. Raises ValueError if a layer with a window cannot make its mask, since
        one rank does not know the sequence's length: pass a mask or a Layout then.
        """
        try:
            self._check_cache(cache, mask, layout, choose_by)
            sinks = None if self.sinks is None else self.sinks.to(accumulator_dtype(q.dtype))
            batch, tokens = q.shape[:2]
        except WRONG_INPUTS as error:
            self._refuse(error)
        if isinstance(cache, Chunk | Cache):
            return cache.attend(
                self.layer, q, k, v, window=self.window, sinks=sinks, **self.options
            ).flatten(2)
        if cache is not None:
            return self._attend_to_cache(q, k, v, cache, sinks, choose_by).flatten(2)
        groups = self.sp.groups if layout is None else self.sp.groups | {"layout": layout}
        if self.window is not None:
            mask, groups["layout"] = _find_rows(
                self.window, mask, groups, batch, tokens, self.sp.size
            )
        groups |= {"mask": mask, "causal": mask is None}
        return burst_attn_func(
            q, k, v, sinks=sinks, choose_by=choose_by, **self.options, **groups
        ).flatten(2)

    def _attend_to_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        sinks: Tensor | None,
        choose_by: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Extend the cache by k and v, and return the attention of q to all of it: (B, S, H, D)."""
        keys, values = cache.extend(self.layer, k, v)
        sparse: InfLLMV2 | None = self.options["sparse"]
        if sparse is not None:
            by_q, by_k = (q, k) if choose_by is None else choose_by
            sums = sum_keys(cache, self.layer, by_k, keys, sparse)
            if not sparse.is_dense(keys.shape[1]):
                return attend_to_cache(q, keys, values, by_q, sums, sparse, sinks)
        return _attend_to_past(q, keys, values, self.window, self.options["softcap"], sinks)

    def _check_cache(
        self,
        cache: KVCache | Chunk | Cache | None,
        mask: Masks | None,
        layout: Layouts | None,
        choose_by: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Raise ValueError for a cache that does not fit the other arguments."""
        if cache is None:
            return
        if isinstance(cache, Chunk | Cache):
            if mask is not None or layout is not None:
                kind = "chunk" if isinstance(cache, Chunk) else "Cache"
                raise ValueError(
                    f"expected a {kind} or a mask and layout, got both: it has its own"
                )
            sp = cache.chunks.sp if isinstance(cache, Chunk) else cache.sp
            if self.sp.size not in (1, sp.size):
                kind = "Chunks" if isinstance(cache, Chunk) else "Cache"
                raise ValueError(
                    f"expected {kind} of this model's {self.sp.size} ranks, got {kind} of "
                    f"{sp.size}: pass sp to {kind}"
                )
            return
        if self.sp.size > 1:
            raise ValueError(
                f"a KVCache holds one rank's tokens, sp has {self.sp.size} ranks: generate with "
                "sp=None, or with a bmt_burst.Cache"
            )
        if mask is not None or layout is not None:
            raise ValueError(
                "expected a cache or a mask and layout, got both: new tokens attend to all of a "
                "KVCache"
            )
        check_cache(cache, self.options["sparse"], choose_by)


@not_compiled
def _find_rows(
    window: int, mask: Masks | None, groups: dict[str, Any], batch: int, tokens: int, size: int
) -> tuple[tuple[Mask, ...], list[Layout]]:
    """Return the rows' masks within a window, by default causal ones, and the rows' layouts. An
    error is raised on all ranks.

    tokens  this rank's tokens, which are the whole sequence if `size` is 1
    """
    try:
        masks, layouts = masks_of_rows(mask, batch), layouts_of_rows(groups["layout"], batch)
        if not masks:
            masks = masks_of_layouts(layouts, seq_len=tokens if size == 1 else None)
        # tokens lie in one layout in all layers, whatever their windows
        pairs = zip(layouts, masks, strict=True)
        return limit_masks(masks, window), [resolve_layout(*pair, size) for pair in pairs]
    except (TypeError, ValueError, AttributeError) as error:
        refuse_call(error, groups["process_group"], groups["double_group"])


@functools.lru_cache(maxsize=_MOST_BATCHES)
def limit_masks(masks: tuple[Mask, ...], window: int) -> tuple[Mask, ...]:
    """Return the mask of each row within a window. They are kept as plain_mask's are."""
    limited = {mask: mask.windowed(window) for mask in masks}  # equal rows share an object
    return tuple(limited[mask] for mask in masks)


def _attend_to_past(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute the attention of the last tokens q (B, S, H, D) to all tokens so far, k and v (B, T,
    G, D), or to those in the window.
    """
    new, total = q.shape[1], k.shape[1]
    if window is not None:
        # earlier keys are visible to no query
        total = min(total, new + window - 1)
        k, v = k[:, -total:], v[:, -total:]
    left = None if window is None else window - 1
    # bands count from the last query and the last key, as new tokens are the last of all
    call = KernelCall(new, total, (((0, new), (0, total)),), left, right=0)
    if softcap is None and sinks is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # a mask of a long prompt would not fit into memory
        seen: dict[str, Any] = {"is_causal": True}
        if not call.is_causal or new < total:
            seen = {"attn_mask": visible(call, q.device)}
        out = F.scaled_dot_product_attention(q, k, v, **seen, enable_gqa=True)
        return out.transpose(1, 2)
    spec = Spec(q.shape[-1] ** -0.5, softcap=softcap)
    out, lse = load("reference").forward(q, k, v, call, spec)
    if sinks is not None:
        out = decoded_with_sinks(out, lse, sinks)
    return out.to(q.dtype)
