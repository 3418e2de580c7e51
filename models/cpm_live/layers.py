"""The blocks of CPM-Bee and CPM-Ant: pre-norm, gated GELU, and a bias only on the scores.

A linear layer has weights of size 1, and divides its result by sqrt(entries of its input). Modules
have the names of CPM-Live's checkpoints. Engines shard the blocks, which take only positional
arguments.

Letters: B batch, S tokens of this rank, T tokens so far, H heads, D head size, E dim_model, F
dim_ff, R rows of the bias table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmt_burst import Cache, Scores, SequenceParallel, burst_attn_func
from bmt_burst.base.compiled import fused_on_gpus
from bmt_burst.loss import linear_cross_entropy_by_row, linear_cross_entropy_sum
from bmt_burst.nn import Layouts, SequenceParallelModule
from models.blocks import Layers, Runner, Saving

from .config import LiveConfig

RowScores = Scores | Sequence[Scores]  # for all rows of a batch, or one for each


@fused_on_gpus
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@fused_on_gpus
def _gated_gelu(gate: Tensor, up: Tensor, divisor: float) -> Tensor:
    return F.gelu(gate / divisor) * (up / divisor)


@fused_on_gpus
def _residual(x: Tensor, added: Tensor, its_divisor: float, divisor: float) -> Tensor:
    return (x + added / its_divisor) / divisor


def _divisor(x: Tensor) -> float:
    """Return the divisor of a linear layer's result, for an input x (..., any)."""
    return math.sqrt(x.shape[-1])


def _linear(size: int, to: int) -> nn.Linear:
    return nn.Linear(size, to, bias=False)


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in fp32, rounded to x's dtype, then multiplied by the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight, self.eps)


class SelfAttention(SequenceParallelModule):
    """The first part of a block: x to (x + attention(norm(x))) / residual_divisor.

    The attention is over the ranks of `sp`, or to a Cache. `options` are passed to
    burst_attn_func. Modules without a forward give weights the names of checkpoints.
    """

    def __init__(
        self, config: LiveConfig, layer: int, sp: SequenceParallel, options: dict[str, Any]
    ):
        super().__init__()
        self.sp, self.layer, self.options, self.head_size = sp, layer, options, config.dim_head
        self.divisor = config.residual_divisor
        self.layernorm_before_attention = Norm(config.dim_model, config.eps)
        width = config.num_heads * config.dim_head
        linear = {f"project_{name}": _linear(config.dim_model, width) for name in "qkv"}
        linear["attention_out"] = _linear(width, config.dim_model)
        self.self_attention = nn.ModuleDict(linear)

    @property
    def out(self) -> nn.Module:
        """The projection after the attention."""
        return self.self_attention["attention_out"]

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute q, k, v (B, S, H, D) of x (B, S, E)."""
        normed = self.layernorm_before_attention(x)
        projected = (self.self_attention[f"project_{name}"](normed) for name in "qkv")
        return tuple((y / _divisor(x)).unflatten(-1, (-1, self.head_size)) for y in projected)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor,
        scores: RowScores | None,
        layout: Layouts | None,
        cache: Cache | None,
    ) -> Tensor:
        """Compute the attention: (B, S, H * D).

        added   the table (R, H) of `scores`; without scores the bias of each pair, (H, S, T)
        scores  of the whole sequences
        layout  how they lie on the ranks; by default sp's
        cache   k and v of the tokens so far

        Raises ValueError for a cache if `sp` has more than one rank.
        """
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        if scores is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=added.to(q.dtype))
            return out.transpose(1, 2).flatten(2)
        groups = self.sp.groups if layout is None else self.sp.groups | {"layout": layout}
        options = self.options | groups
        return burst_attn_func(q, k, v, scores=scores, bias=added, **options).flatten(2)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's result, (B, S, H * D), to x."""
        return _residual(x, self.out(attended), _divisor(attended), self.divisor)


class FeedForward(nn.Module):
    """The second part of a block: x to (x + feed_forward(norm(x))) / residual_divisor.

    feed_forward(x) is w_out(gelu(w_0 x) * w_1 x).
    """

    def __init__(self, config: LiveConfig):
        super().__init__()
        self.divisor = config.residual_divisor
        self.layernorm_before_ffn = Norm(config.dim_model, config.eps)
        w_in = {name: _linear(config.dim_model, config.dim_ff) for name in ("w_0", "w_1")}
        w_out = _linear(config.dim_ff, config.dim_model)
        self.ffn = nn.ModuleDict({"w_in": nn.ModuleDict(w_in), "w_out": w_out})

    def forward(self, x: Tensor) -> Tensor:
        normed = self.layernorm_before_ffn(x)
        w_in: Any = self.ffn["w_in"]
        gated = _gated_gelu(w_in.w_0(normed), w_in.w_1(normed), _divisor(x))
        return _residual(x, self.ffn["w_out"](gated), _divisor(gated), self.divisor)


class Block(nn.Module):
    """Attention, then feed-forward; either may be left out."""

    def __init__(self, config: LiveConfig, layer: int, saving: Saving, *attention: Any):
        super().__init__()
        self.saving = saving
        attends, feeds = config.parts[layer]
        self.self_att = SelfAttention(config, layer, *attention) if attends else None
        self.ffn = FeedForward(config) if feeds else None

    def forward(
        self,
        x: Tensor,
        added: Tensor,
        scores: RowScores | None = None,
        layout: Layouts | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Apply the block to x (B, S, E). SelfAttention.attend explains the other arguments."""
        saving = self.saving if cache is None else Saving()
        return saving.run(self._whole, x, added, scores, layout, cache, keep=(added,))

    def _whole(self, runner: Runner, x: Tensor, *seen) -> Tensor:
        """Compute the block. `runner` calls all but the attention, which `seen` are for."""
        feeds = [] if self.ffn is None else [self.ffn]
        if self.self_att is None:
            return runner.finish(self._feed_forward, feeds, x)
        attended = self.self_att.attend(*runner.run(self.self_att.before, x), *seen)
        return runner.finish(self._after, [self.self_att.out, *feeds], x, attended)

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        assert self.self_att is not None, "a block without attention has no result of one"
        return self._feed_forward(self.self_att.after(x, attended))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return x if self.ffn is None else self.ffn(x)


class Encoder(nn.Module):
    """The blocks and the norm after them."""

    def __init__(self, config: LiveConfig, saving: Saving, *attention: Any):
        super().__init__()
        self.layers = Layers(
            Block(config, i, saving.for_block(i), *attention) for i in range(config.num_layers)
        )
        self.output_layernorm = Norm(config.dim_model, config.eps)
        self.saving = saving

    def forward(self, x: Tensor, added: Tensor, *seen) -> Tensor:
        x = self.saving.run_all(self.layers, x, added, *seen, keep=(added,))
        return self.output_layernorm(x)


class PositionBias(nn.Module):
    """The table of the bias (R, H), which all layers share."""

    def __init__(self, config: LiveConfig):
        super().__init__()
        table = torch.empty(config.num_bias_rows, config.num_heads)
        self.relative_attention_bias = nn.Parameter(table)

    def table(self) -> Tensor:
        """Return the table in fp32, or fp64 if it is fp64, in which gradients are summed."""
        table = self.relative_attention_bias
        return table.to(torch.promote_types(table.dtype, torch.float32))


class LiveModel(SequenceParallelModule):
    """The common parts of both models: words, a bias table, an encoder, and words as the head.

    `saving` says what blocks save for the backward. `attention` are options of burst_attn_func:
    flash, deterministic, strategy.

    A forward takes the tokens of a rank and these arguments:

    scores       the scores of each whole row
    labels       (B, S), already shifted, IGNORE_INDEX where there is no target: return the sum of
                 token losses (fp32) and the number of targets instead of logits
    layout       how the rows lie on the ranks, or one for each row; by default sp's
    cache, rows  for generation, see encode
    by_row       with labels: also return the sum of each row, (B,) without a gradient
    """

    layers_at = "encoder.layers"

    def __init__(
        self,
        config: LiveConfig,
        sp: SequenceParallel | None = None,
        saving: Saving | None = None,
        **attention,
    ):
        super().__init__()
        self.config = config
        self.sp = sp or SequenceParallel()
        self.encoder = Encoder(config, saving or Saving(), self.sp, attention)
        self.input_embedding = nn.Embedding(config.vocab_size, config.dim_model)
        self.position_bias = PositionBias(config)

    def look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        """Look up rows of a table (any, E) of size sqrt(E): (..., E) of size 1, for ids (...)."""
        return F.embedding(ids, table) / math.sqrt(self.config.dim_model)

    def encode(
        self,
        x: Tensor,
        scores: RowScores | None,
        layout: Layouts | None,
        cache: Cache | None,
        rows: Tensor | None,
    ) -> Tensor:
        """Compute the encoder's hidden states of x (B, S, E), after its norm.

        scores  of the whole rows
        rows    (S, T) int64, with a cache, instead of scores: a row of the table for each of these
                tokens and each token in the extended cache. All these pairs are visible

        Raises ValueError for both or neither.
        """
        if (scores is None) == (rows is None) or (rows is not None and cache is None):
            raise ValueError(
                "expected either scores, or rows of the bias table together with a cache"
            )
        table = self.position_bias.table()
        added = table if rows is None else table[rows].permute(2, 0, 1)
        return self.encoder(x, added, scores, layout, cache)

    def predict(
        self, hidden: Tensor, words: list[Tensor], labels: Tensor | None, by_row: bool
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute the logits of several parts of words, each (any, E), or the loss.

        Each word's logit is hidden . word / sqrt(E). With `labels` (B, S), which number the words
        of all parts in order, return the sum of token losses (fp32) and the number of targets. If
        `by_row`, also return the sum of each row, without a gradient. Then whole logits are never
        in memory, and the parts are not copied.
        """
        hidden = hidden / math.sqrt(self.config.dim_model)
        if labels is None:
            return torch.cat([F.linear(hidden, part) for part in words], -1)
        loss = linear_cross_entropy_by_row if by_row else linear_cross_entropy_sum
        return loss(hidden, words, labels.long())

    def init_parameter(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill the whole parameter called `name`, in place, with its initial values."""
        if weight.dim() == 1:
            weight.fill_(1.0)
            return
        std = 0.02 if name.endswith("embedding.weight") else 1.0
        weight.normal_(0.0, std, generator=generator)
