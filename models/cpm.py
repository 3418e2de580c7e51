"""The CPM: pre-norm RMSNorm, rotary positions, GQA, SwiGLU, MiniCPM's scalings, Qwen's biases and
norms, MiniCPM-SALA's lightning attention and gates.

The modules are plain torch. Engines shard the parameters and the blocks in `layers`. Therefore
blocks take only positional arguments. Parameters have the names of Hugging Face's Llama, Qwen and
MiniCPM, without the leading "model.".

Letters: B batch, S tokens of this rank, E hidden size, F intermediate size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmt_burst import SequenceParallel
from bmt_burst.loss import (
    linear_cross_entropy_by_row,
    linear_cross_entropy_sum,
    score_tokens,
    token_logprobs,
)
from bmt_burst.nn import (
    Layouts,
    Masks,
    Part,
    RMSNorm,
    SequenceParallelModule,
    find_part,
    rope_frequencies,
    rotations,
    swiglu,
)

from .blocks import Layers, Runner, Saving
from .config import CPMConfig
from .linears import (
    add_gated_linear,
    add_linear,
    add_swiglu_linear,
    are_plain,
    is_original,
    norm_linears,
)
from .mixers import is_mixer, make_mixer

# a block's input, q, k and v, and what else its attention takes
Begun = tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]


class SwiGLU(nn.Module):
    """The feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class CPMBlock(nn.Module):
    """x + scale * mixer(norm(x)), then x + scale * feed_forward(norm(x))."""

    def __init__(
        self, config: CPMConfig, sp: SequenceParallel, layer: int, saving: Saving, **attention: Any
    ):
        super().__init__()
        self.saving = saving
        self.scale = config.residual_scale
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = make_mixer(config, sp, layer, **attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def compile_parts(self, **options: Any) -> None:
        """Compile the parts before and after the attention, with options of torch.compile. All
        blocks share what is compiled.
        """
        for part in ("_before", "_after"):
            setattr(self, part, torch.compile(getattr(self, part), **options))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, part: Part) -> Tensor:
        saving = self.saving if part.saves_graph else Saving()
        return saving.run(self._whole, x, cos, sin, part, keep=(cos, sin))

    def _whole(self, runner: Runner, x: Tensor, cos: Tensor, sin: Tensor, part: Part) -> Tensor:
        """Compute the block. `runner` calls all but the attention."""
        attention = self.self_attn
        fuses = self._fuses(x)
        # then the part before the attention saves only its input, unless heads have norms
        begin = runner.begin if fuses and attention.q_norm is None else runner.run
        before = self._before_fused if fuses else self._before
        x, q, k, v, tensors = begin(before, x, cos, sin)
        attended = attention.attend(q, k, v, part, tensors)
        modules = [attention.o_proj, self.post_attention_layernorm, self.mlp]
        if attention.gate is not None:
            gating = self.input_layernorm, attention.gate, attention.o_norm
            modules += [module for module in gating if module is not None]
        after = self._after_fused if fuses else self._after
        return runner.finish(after, modules, x, attended)

    def _fuses(self, x: Tensor) -> bool:
        """Whether the functions of linears.py compute this block."""
        mlp, attention = self.mlp, self.self_attn
        norms = [self.input_layernorm, self.post_attention_layernorm]
        if attention.o_norm is not None:
            norms.append(attention.o_norm)
        parts = (mlp, SwiGLU), *((norm, RMSNorm) for norm in norms)
        are_original = is_mixer(attention) and all(is_original(*part) for part in parts)
        if _is_cast(x) or not are_original:
            return False
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if attention.gate is not None:
            linears.append(attention.gate)
        return all(n.weight is not None and n.weight.dtype == x.dtype for n in norms) and are_plain(
            linears
        )

    def _before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Begun:
        return x, *self.self_attn.project_all(self.input_layernorm(x), cos, sin)

    def _before_fused(self, x: Tensor, cos: Tensor, sin: Tensor) -> Begun:
        """Compute `_before` with less memory, in fewer passes."""
        attention = self.self_attn
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        x, q, k, v = norm_linears(x, self.input_layernorm, projections)
        return x, *attention.rotate_heads(q, k, v, cos, sin)

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        attention = self.self_attn
        if attention.gate is not None:
            # normalized again, which costs less memory than to save it
            attended = attention.gate_heads(attended, self.input_layernorm(x))
        x = torch.add(x, attention.o_proj(attended), alpha=self.scale)
        return torch.add(x, self.mlp(self.post_attention_layernorm(x)), alpha=self.scale)

    def _after_fused(self, x: Tensor, attended: Tensor) -> Tensor:
        """Compute `_after` with less memory, in fewer passes."""
        mlp, norm = self.mlp, self.post_attention_layernorm
        attention = self.self_attn
        if attention.gate is None:
            x = add_linear(x, attended, attention.o_proj, self.scale)
        else:
            x, gate = norm_linears(x, self.input_layernorm, (attention.gate,))
            norm_of_heads = attention.o_norm
            x = add_gated_linear(x, attended, norm_of_heads, gate, attention.o_proj, self.scale)
        x, gate, up = norm_linears(x, norm, (mlp.gate_proj, mlp.up_proj))
        return add_swiglu_linear(x, gate, up, mlp.down_proj, self.scale)


class CPM(SequenceParallelModule):
    """A decoder-only language model over this rank's part of a sequence, with a Saving of blocks.
    `attention` are options of BurstAttention: flash, deterministic, strategy.
    """

    layers_at = "layers"

    def __init__(
        self,
        config: CPMConfig,
        sp: SequenceParallel | None = None,
        saving: Saving | None = None,
        **attention: Any,
    ):
        super().__init__()
        self.config, self.sp = config, sp or SequenceParallel()
        self.saving = replace(saving or Saving(), keep_results=config.keeps_results)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = Layers(
            CPMBlock(config, self.sp, layer, self.saving.for_block(layer), **attention)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        cache: Part | None = None,
        mask: Masks | None = None,
        layout: Layouts | None = None,
        by_token: bool = False,
        by_row: bool = False,
        last: int | None = None,
        logprobs: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute logits (B, S, V), or the loss if there are labels.

        tokens     (B, S) int64
        positions  (S,) or (B, S) int64
        labels     (B, S), already shifted, IGNORE_INDEX where there is no target: return the sum of
                   token losses (fp32) and the number of targets instead of logits
        cache      a chunk of Chunks or of a prompt, or a Cache, whose tokens these ones continue
        mask       the mask of the whole sequence, or one for each row; by default causal. Layers
                   with a window see its part in the window
        layout     how the sequence lies on the ranks, or one for each row; by default sp's
        by_token   with labels: return each token's loss and the most likely token in its place,
                   both (B, S), without a backward (bmt_burst.loss.score_tokens)
        by_row     with labels: also return the sum of each row, (B,) without a gradient
        logprobs   with labels: return the log-probability of each label, and the entropy of its
                   distribution, both (B, S), with a backward (bmt_burst.loss.token_logprobs)
        last       without labels: how many of the last tokens have logits, 0 to S; by default all

        The ranks exchange the length that some rotary scalings depend on (models/rope.py). With a
        cache it is the number of tokens so far. As in transformers, cached keys stay rotated as
        they were. With a Chunk it is that of the whole sequence. Where only its keys and values
        are kept (Chunks.forward), logits are (B, 0, V). In Cache.prefill, the last chunk has those
        of the last token, (B, 1, V), on all ranks.

        Raises ValueError on all ranks for two of by_token, by_row and logprobs, for one of them
        without labels, and for last with labels.
        """
        part = find_part(self.sp, cache, mask, layout)
        wanted = {"by_token": by_token, "by_row": by_row, "logprobs": logprobs}
        try:
            _check_wanted([name for name, is_wanted in wanted.items() if is_wanted], labels)
            _check_last(last, tokens.shape[1], labels)
        except (TypeError, ValueError) as error:
            part.refuse(error, f"a call of {type(self).__name__}")
        x = self.embed_tokens(tokens) * self.config.scale_emb
        cos, sin = self._rope_tables(positions, part)
        x = self.saving.run_all(self.layers, x, cos, sin, part, keep=(cos, sin))
        count = x.shape[1]
        x = part.select(x)
        if last is not None:
            x = x[:, max(x.shape[1] - last, 0) :]
        if x.shape[1] == 0 < count:
            return x.new_empty(len(x), 0, self.config.vocab_size)
        x = self.norm(x) / self.config.width_scale
        head = self.embed_tokens if self.config.tie_embeddings else self.lm_head
        if labels is None:
            return F.linear(x, head.weight)
        if by_token:
            return score_tokens(x, head.weight, labels)
        if logprobs:
            return token_logprobs(x, head.weight, labels, entropies=True)
        loss = linear_cross_entropy_by_row if by_row else linear_cross_entropy_sum
        return loss(x, head.weight, labels)

    def _rope_tables(self, positions: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Compute cos and sin of the rotation at `positions`."""
        part.check_positions(positions)
        scaling, theta = self.config.rope_scaling, self.config.rope_theta
        frequencies = rope_frequencies(self.config.head_dim, theta, positions.device)
        if scaling is None:
            return rotations(positions, frequencies)
        length = part.longest(positions) if scaling.by_length else None
        frequencies = scaling.frequencies(frequencies, theta, length)
        return rotations(positions, frequencies, scaling.attention_scale)

    def init_parameter(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill the whole parameter called `name`, in place, with its initial values."""
        if weight.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        std = self.config.init_std
        if not name.startswith("embed_tokens"):
            std /= self.config.width_scale**0.5
        weight.normal_(0.0, std, generator=generator)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast is on for x's device."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _check_wanted(wanted: list[str], labels: Tensor | None) -> None:
    """Raise ValueError for results of a forward that exclude each other or need labels."""
    if len(wanted) > 1:
        raise ValueError(f"expected one of {' and '.join(wanted)}, got {len(wanted)} of them")
    if wanted and labels is None:
        raise ValueError(f"expected labels with {wanted[0]}=True, got none")


def _check_last(last: int | None, tokens: int, labels: Tensor | None) -> None:
    """Raise ValueError or TypeError unless the last tokens can have logits."""
    if last is None:
        return
    if labels is not None:
        raise ValueError(f"expected last={last!r} or labels, got both: leave out last")
    if isinstance(last, bool) or not isinstance(last, Integral):
        raise TypeError(f"last must be a whole number, got {last!r}")
    if not 0 <= last <= tokens:
        raise ValueError(f"last must be 0 to {tokens}, this rank's tokens, got {last}")
