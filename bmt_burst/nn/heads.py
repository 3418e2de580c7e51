"""The bases of layers: modules over ranks, and self-attention with projections and a gate. And the
part of a sequence that a layer or model computes.

Letters: B batch, S tokens of this rank, H query heads, G kv heads, D head size, E model width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn

from ..base.arguments import as_bool, as_int, as_positive
from ..base.compiled import not_compiled
from ..calls.refusal import refuse_wrong_arguments
from ..fused.functions import RMSNorm, apply_gate, apply_rope
from ..memories.protocol import Kind, Part
from ..ranks.agreement import refuse
from ..ranks.sequence_parallel import OF_LAYER, SequenceParallel, WholeSequence, check_sp
from ..sequence.rows import Layouts, Masks

# Errors of wrong inputs. Not Exception: checkpointing stops a recomputation with one.
_WRONG_INPUTS = (TypeError, ValueError, AttributeError, IndexError, RuntimeError)

# q, k, v, and what an extension takes of the layer, such as queries and keys to choose by
Heads = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]


class SequenceParallelModule(nn.Module):
    """A module over the ranks of `sp`."""

    sp: SequenceParallel

    def attach(self, sp: SequenceParallel) -> None:
        """Run this module, and all such modules inside it, over the ranks of `sp`.

        Call it before the first use of a module that was read from a pickle: a pickle has no
        groups. Raises TypeError if sp is not a SequenceParallel.
        """
        check_sp(sp)
        for part in self.modules():
            if isinstance(part, SequenceParallelModule):
                part.sp = sp


class SelfAttention(SequenceParallelModule):
    """The base of layers of self-attention. A subclass sets `kind`, and documents the arguments.

    output_norm_eps  if given, the attention of all heads is normalized by `o_norm`, before the gate
    """

    gate_name: ClassVar[str] = "o_gate"
    kind: Kind

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        *,
        sp: SequenceParallel | None,
        layer: int,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        output_norm_eps: float | None = None,
        output_gate: bool = False,
        rotary: bool = True,
    ):
        super().__init__()
        hidden_size, num_heads = as_int("hidden_size", hidden_size), as_int("num_heads", num_heads)
        if num_heads < 1 or (head_dim is None and hidden_size % num_heads):
            raise ValueError(
                f"num_heads={num_heads} does not divide hidden_size={hidden_size}: pass head_dim"
            )
        num_kv_heads = num_heads if num_kv_heads is None else as_int("num_kv_heads", num_kv_heads)
        head_dim = hidden_size // num_heads if head_dim is None else as_int("head_dim", head_dim)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}")
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim above 0, got {head_dim}")
        self.hidden_size, self.head_dim = hidden_size, head_dim
        self.rotary, self.layer = as_bool("rotary", rotary), as_int("layer", layer)
        self.attach(SequenceParallel() if sp is None else sp)
        width = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(width, hidden_size, bias=o_bias)
        self.q_norm = _make_norm("qk_norm_eps", head_dim, qk_norm_eps)
        self.k_norm = _make_norm("qk_norm_eps", head_dim, qk_norm_eps)
        self.o_norm = _make_norm("output_norm_eps", width, output_norm_eps)
        is_gated = as_bool("output_gate", output_gate)
        gate = nn.Linear(hidden_size, width, bias=False) if is_gated else None
        self.register_module(self.gate_name, gate)

    @property
    def gate(self) -> nn.Linear | None:
        """The projection whose sigmoid multiplies the attention."""
        found: nn.Linear | None = getattr(self, self.gate_name)
        return found

    @functools.partial(
        refuse_wrong_arguments,
        refuse=lambda error, _, args, named: args[0]._refuse(
            error, named.get("cache"), named.get("mask")
        ),
    )
    def forward(
        self,
        x: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        cache: Part | None = None,
        mask: Masks | None = None,
        layout: Layouts | None = None,
    ) -> Tensor:
        """Map x (B, S, E) of this rank's tokens to (B, S, E). `cos` and `sin` are `rope_tables` of
        their positions, which a layer without rotary positions does not need.

        cache, mask, layout  as find_part's. With a Cache, x is the same on all ranks. "balanced" is
                             Layout.balanced of the mask, without this layer's window.

        Raises on all ranks if inputs are wrong on any rank.
        """
        try:
            self._check_inputs(x, cos, sin)
            q, k, v, choose_by = self.project_all(x, cos, sin)
        except _WRONG_INPUTS as error:
            self._refuse(error, cache, mask)
        attended = self.attend(q, k, v, find_part(self.sp, cache, mask, layout), choose_by)
        return self.o_proj(self.gate_heads(attended, x))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: Part,
        choose_by: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return the attention with heads side by side: (B, S, H * D).

        part       the part of a sequence that q, k and v are of
        choose_by  the tensors of the extension, as burst_attn_func's

        Raises on all ranks as `part.mix` does.
        """
        tensors = self._find_tensors(choose_by)
        return part.mix(self.layer, self.kind, q, k, v, *tensors).flatten(2)

    def _find_tensors(self, choose_by: Sequence[Tensor] | None) -> tuple[Tensor | None, ...]:
        """Return the tensors that the kind takes besides q, k and v."""
        return ()

    def _refuse(self, error: Exception, *parts: Any) -> NoReturn:
        _refuse_call(error, self.sp, parts, f"a call of {type(self).__name__}")

    def _check_inputs(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
        tables = (("cos", cos), ("sin", sin)) if self.rotary else ()
        for name, given in (("x", x), *tables):
            if not isinstance(given, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
        if x.dim() != 3 or x.shape[2] != self.hidden_size:
            raise ValueError(
                f"x must be (batch, tokens, {self.hidden_size}), got shape {tuple(x.shape)}"
            )
        for name, given in tables:
            assert given is not None
            if given.dim() < 2 or given.shape[-2:] != (x.shape[1], self.head_dim // 2):
                raise ValueError(
                    f"{name} must be (..., {x.shape[1]}, {self.head_dim // 2}), rope_tables of the "
                    f"positions of x, got shape {tuple(given.shape)}"
                )

    def project_all(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Heads:
        """Return q (B, S, H, D) and k (B, S, G, D), as the layer attends with them, v, and the
        `choose_by` of `attend`.
        """
        return self.rotate_heads(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)

    def rotate_heads(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> Heads:
        """Return what `project_all` does, from the projections q (B, S, H * D), k and v."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        choose_by = self._find_choose_by(q, k)
        if not self.rotary:
            return q, k, v, choose_by
        assert cos is not None and sin is not None
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, choose_by

    def _find_choose_by(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Return the `choose_by` of `attend`, from q and k before they are rotated."""
        return ()

    def gate_heads(self, attended: Tensor, x: Tensor) -> Tensor:
        """Return the input of `o_proj`: the attention (B, S, H * D), normalized and gated if the
        layer does so. x (B, S, E) is the layer's input.
        """
        if self.o_norm is not None:
            attended = self.o_norm(attended)
        return attended if self.gate is None else apply_gate(self.gate(x), attended, silu=False)


def _make_norm(name: str, width: int, eps: float | None) -> RMSNorm | None:
    return None if eps is None else RMSNorm(width, as_positive(name, eps))


@not_compiled
def find_part(
    sp: SequenceParallel,
    cache: Part | None = None,
    mask: Masks | WholeSequence | None = None,
    layout: Layouts | None = None,
) -> Part:
    """Return the part of a sequence that a model over the ranks of `sp` computes.

    cache   a chunk of Chunks or of a Cache's prompt, or a Cache, whose tokens new ones continue.
            None: a whole sequence
    mask    the mask of the whole sequence, or one for each row. None: causal. Or the result of
            `sp.sequence`, which has a layout
    layout  how it lies on the ranks, or one for each row. None: sp's

    Raises ValueError on all ranks for a cache with a mask or a layout, or of other ranks than the
    model's, TypeError for another object.
    """
    try:
        if cache is None and not isinstance(mask, WholeSequence):
            layout = sp.layout if layout is None else layout
            return WholeSequence.local(mask, layout, causal=mask is None).on(sp)
        part = _check_part(sp, mask if cache is None else cache)
        if layout is not None or (mask is not None and mask is not part):
            raise ValueError(
                f"expected a {type(part).__name__} or a mask and layout, got both: it has its own"
            )
        return part
    except (TypeError, ValueError) as error:
        _refuse_call(error, sp, (cache, mask), OF_LAYER)


def _refuse_call(
    error: Exception, sp: SequenceParallel, parts: Sequence[Any], doing: str
) -> NoReturn:
    """Raise `error` instead of a call over the ranks of the first of `parts` that `sp` fits, or of
    `sp`. The others raise RanksDisagree, or in the middle of new tokens RankFailed.
    """
    for part in parts:
        if hasattr(part, "refuse") and sp.size in (1, part.sp.size):
            part.refuse(error, doing)
    refuse(sp.rings, doing, error)


def _check_part(sp: SequenceParallel, cache: Any) -> Part:
    """Return the part. Raises TypeError for another object, ValueError for one of other ranks."""
    if not all(hasattr(cache, name) for name in ("mix", "select", "longest", "saves_graph")):
        raise TypeError(
            "cache must be a chunk of bmt_burst.Chunks or a bmt_burst.Cache, got "
            f"{type(cache).__name__}: bmt_burst.Cache(None, layers, limit) is one of this process "
            "alone"
        )
    if sp.size not in (1, cache.sp.size):
        raise ValueError(
            f"expected a {type(cache).__name__} of this model's {sp.size} ranks, got one of "
            f"{cache.sp.size}: make it with the sp of the model"
        )
    found: Part = cache
    return found
