"""MiniCPM for transformers 5: a Llama with MiniCPM's scalings, dense or sparse (InfLLM-V2).

bmt_burst's export.py writes this file next to the weights of a MiniCPM. It needs torch and
transformers only:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

The sparse attention is exact and plain. It computes all scores of a few queries at a time, on one
process. bmt_burst/sparse/choice.py has the same choice of blocks, and kernels for long sequences.

Letters: B batch, S new tokens, T tokens so far, H query heads, G kv heads, D head size.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

_QUERIES = 128  # that attend to chosen blocks at a time


class MiniCPMConfig(LlamaConfig):
    """A Llama's configuration with MiniCPM's scalings.

    scale_emb       factor of the embeddings
    scale_depth     every residual branch is scaled by scale_depth / sqrt(num_hidden_layers)
    dim_model_base  logits are divided by hidden_size / dim_model_base
    sparse_config   the constants of InfLLM-V2, or None for dense attention
    """

    model_type = "minicpm"
    scale_emb: float | int = 1.0
    scale_depth: float | int = 1.0
    dim_model_base: float | int = 1
    sparse_config: dict | None = None

    def validate_architecture(self) -> None:
        """Accept heads that do not divide the hidden size, which Llamas refuse."""


class ScaledEmbedding(nn.Embedding):
    """Embeddings times `scale`."""

    scale = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


class ScaledNorm(LlamaRMSNorm):
    """An RMSNorm times `scale`."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class MiniCPMLayer(LlamaDecoderLayer):
    """x + scale * attention(norm(x)), then x + scale * feed_forward(norm(x))."""

    def __init__(self, config: MiniCPMConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scale = config.scale_depth / math.sqrt(config.num_hidden_layers)
        if config.sparse_config:
            self.self_attn = SparseAttention(config, layer_idx)

    def forward(self, hidden_states: Tensor, **seen: Any) -> Tensor:
        x = hidden_states
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(x), **seen)
        x = torch.add(x, attended, alpha=self.scale)
        return torch.add(x, self.mlp(self.post_attention_layernorm(x)), alpha=self.scale)


class SparseAttention(LlamaAttention):
    """InfLLM-V2: a token attends to some blocks of its sequence (arXiv 2509.24663).

    With use_nope the cache also holds the keys before they are rotated, next to the rotated ones.
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        spans: list[tuple[int, int]] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of new tokens (B, S, E) to all tokens so far.

        cache  also called past_key_values, its earlier name
        spans  where the sequence of each row begins and ends, if the call is sparse
        """
        by_q, by_k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(by_q, by_k, *position_embeddings)
        use_nope = self.config.sparse_config["use_nope"]
        by_q, kept = (by_q, torch.cat((k, by_k), -1)) if use_nope else (q, k)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            kept, v = cache.update(kept, v, self.layer_idx)
        k, by_k = kept.chunk(2, -1) if use_nope else (kept, kept)
        if spans is None:
            name = self.config._attn_implementation
            attend = eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
            out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
            return self.o_proj(out.flatten(2)), weights
        total = q.shape[2] if cache is None else int(cache.get_seq_length(self.layer_idx))
        before, out = total - q.shape[2], torch.zeros_like(q)
        for row, (start, stop) in enumerate(spans):
            new = row, slice(None), slice(max(start - before, 0), stop - before)
            so_far = row, slice(None), slice(start, stop)
            if start < stop:
                out[new] = attend_to_blocks(
                    q[new], k[so_far], v[so_far], by_q[new], by_k[so_far], self.config.sparse_config
                )
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def attend_to_blocks(
    q: Tensor, k: Tensor, v: Tensor, by_q: Tensor, by_k: Tensor, sparse: dict[str, Any]
) -> Tensor:
    """Return the sparse attention of the last tokens q (H, S, D) of a sequence: (H, S, D).

    k, v  (G, T, D)
    by_q  (H, S, D), to choose by, with by_k (G, T, D)
    """
    groups, total, size = k.shape
    q, by_q = (x.unflatten(0, (groups, -1)) for x in (q, by_q))
    keys = by_k.detach().to(torch.promote_types(by_k.dtype, torch.float32))
    numbers = torch.arange(total, device=q.device)
    of_block = numbers // sparse["block_size"]
    outputs = []
    for start in range(0, q.shape[2], _QUERIES):
        part = slice(start, start + _QUERIES)
        places = numbers[total - q.shape[2] :][part]
        chosen = choose_blocks(by_q[:, :, part].detach(), keys, places, sparse)
        visible = chosen[..., of_block] & (numbers <= places.unsqueeze(1))
        shape = groups, q.shape[1], total, size
        wide_k, wide_v = (x.unsqueeze(1).expand(shape) for x in (k, v))
        attend = functional.scaled_dot_product_attention
        outputs.append(attend(q[:, :, part], wide_k, wide_v, attn_mask=visible.unsqueeze(1)))
    return torch.cat(outputs, 2).flatten(0, 1)


def choose_blocks(q: Tensor, keys: Tensor, places: Tensor, sparse: dict[str, Any]) -> Tensor:
    """Return which blocks of a sequence some queries attend to: (G, S, blocks) bool.

    q       (G, H / G, S, D)
    keys    (G, T, D), fp32 or fp64
    places  (S,) int64: the places of the queries in the sequence
    """
    stride, block = sparse["kernel_stride"], sparse["block_size"]
    places, q = places.unsqueeze(1), q.to(keys.dtype) * q.shape[-1] ** -0.5

    def score(size: int, step: int) -> Tensor:
        """Return the scores of means of `size` keys, -inf for those not visible."""
        count = max((keys.shape[1] - size) // step + 1, 0)
        means = keys.unfold(1, size, step).mean(-1) if count else keys[:, :0]
        ends = torch.arange(count, device=q.device) * step + size - 1
        return (q @ means.unsqueeze(1).mT).masked_fill(ends > places, -math.inf)

    normalizer = score(8 * stride, 4 * stride).logsumexp(-1, keepdim=True)
    normalizer = normalizer.masked_fill(normalizer == -math.inf, 0.0)
    scores = score(2 * stride, stride)
    sums = (scores - normalizer).exp().sum(1).nan_to_num()
    sums = sums.masked_fill(scores[:, 0] == -math.inf, -1.0)
    blocks, each = (keys.shape[1] - 1) // block + 1, block // stride
    sums = functional.pad(sums, (1, blocks * each - sums.shape[-1]), value=-1.0)
    largest = sums.unfold(-1, each + 1, each).amax(-1)
    numbers, own = torch.arange(blocks, device=q.device), places // block
    always = (numbers < sparse["init_blocks"]) | (numbers >= own - sparse["window_size"] // block)
    largest = largest.masked_fill(always, math.inf).masked_fill(numbers > own, -math.inf)
    most = sparse["topk"] + sparse["window_size"] // block
    values, order = largest.sort(dim=-1, descending=True, stable=True)  # the lower of equal blocks
    return torch.zeros_like(largest, dtype=torch.bool).scatter(
        -1, order[..., :most], values[..., :most] > -math.inf
    )


class MiniCPMModel(LlamaModel):
    """The model without a head. Its output is divided as the logits are."""

    config_class = MiniCPMConfig
    _no_split_modules = ("MiniCPMLayer",)
    _can_compile_fullgraph = False  # sparse calls read masks on the host

    def __init__(self, config: MiniCPMConfig):
        super().__init__(config)
        sizes = config.vocab_size, config.hidden_size
        self.embed_tokens = ScaledEmbedding(*sizes, config.pad_token_id)
        self.embed_tokens.scale = config.scale_emb
        self.layers = nn.ModuleList(
            MiniCPMLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = ScaledNorm(config.hidden_size, config.rms_norm_eps)
        self.norm.scale = config.dim_model_base / config.hidden_size
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute as LlamaModel does.

        Raises ValueError for a sparse call of packed sequences, or with a mask that has more than
        padding.
        """
        inputs: Any = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        before = 0 if cache is None else int(cache.get_seq_length())
        shape = inputs.shape[0], before + inputs.shape[1]
        sparse = self.config.sparse_config
        if sparse and shape[1] >= sparse["dense_len"]:
            spans = find_sequences(attention_mask, position_ids, *shape)
            if max(stop - start for start, stop in spans) >= sparse["dense_len"]:
                kwargs["spans"] = spans
        seen = {"attention_mask": attention_mask, "position_ids": position_ids}
        return super().forward(input_ids, **seen, **kwargs)


def find_sequences(
    attention_mask: Tensor | None, position_ids: Tensor | None, rows: int, total: int
) -> list[tuple[int, int]]:
    """Return where the sequence of each row begins and ends, without padding at its sides.

    attention_mask  (B, T), 0 for padding, or None
    position_ids    (B, S) or (1, S) of the last tokens, or None
    """
    if attention_mask is None:
        attention_mask = torch.ones(rows, total)
    if attention_mask.dim() != 2:
        raise ValueError(
            "sparse attention needs an attention_mask (batch, tokens), as with a dynamic cache, "
            f"got shape {tuple(attention_mask.shape)}"
        )
    real = attention_mask[:, :total].bool()
    counts, starts = real.sum(1).tolist(), real.int().argmax(1).tolist()
    spans = [(start, start + count) for start, count in zip(starts, counts, strict=True)]
    if any(not real[row, start:stop].all() for row, (start, stop) in enumerate(spans)):
        raise ValueError("sparse attention needs an attention_mask with padding only at sides")
    if position_ids is not None:
        for row, (start, stop) in enumerate(spans):
            mine = position_ids[row % len(position_ids)]
            first = max(start - (total - len(mine)), 0)
            if (mine[first : stop - (total - len(mine))].diff() != 1).any():
                raise ValueError("sparse attention needs one sequence a row, got packed ones")
    return spans


class MiniCPMForCausalLM(LlamaForCausalLM):
    """The model with its head."""

    config_class = MiniCPMConfig
    _no_split_modules = ("MiniCPMLayer",)
    _can_compile_fullgraph = False

    def __init__(self, config: MiniCPMConfig):
        super().__init__(config)
        self.model = MiniCPMModel(config)
        self.post_init()
