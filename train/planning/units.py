"""The units of a model, run one at a time on tensors without values: a block, a group of blocks
that are recomputed together, or the last norm with the loss.

Blocks compute a part of a sequence whose attention only allocates. In a step in chunks this part is
one chunk, and the memories of layers keep its keys and values, as in training.

Letters: N tokens of a rank, E hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bmt_burst.loss import tile_tokens
from bmt_burst.offload import LEAST_BYTES, Offload, Parked
from bmt_burst.planning import CHUNKS, META, Ledger, PlannedPart, Work
from models.blocks import Saving
from models.config import CPMConfig
from models.cpm import CPM

# Memory and work are linear in the number of tokens from here on, so more are not run.
_ENOUGH_TOKENS, _ENOUGH_TOKENS_OF_LOSS = 1 << 14, 1 << 16
_ENOUGH_TILES = 64


@dataclass(frozen=True)
class Unit:
    """Bytes and work of a unit, without its weights.

    saved              bytes on the GPU from its forward to its backward, including its input, but
                       without what chunks keep
    parked             bytes of each tensor that waits on the host instead
    forward, backward  the most bytes in its forward and backward. Both include its input or what
                       it saved, and its result or its gradient
    forward_attention, backward_attention
                       bytes when its attention runs, without the attention's working memory
    forward_work, backward_work
                       work, without that of attention
    runs               how often its attentions run "forward", "again" in its backward, to
                       recompute it, and "backward"
    kept_of_token      bytes that chunks keep of each token
    """

    saved: float
    parked: tuple[float, ...]
    forward: float
    backward: float
    forward_attention: float
    backward_attention: float
    forward_work: Work
    backward_work: Work
    runs: Mapping[str, int]
    kept_of_token: int = 0


@dataclass(frozen=True)
class Shape:
    """A unit of a model: so many `layers`, or 0 for the last norm with the loss.

    saving   what blocks save, without an Offload; `offload` tells whether that is offloaded
    batch    rows of tokens
    mixers   those of the layers
    chosen   dtype in which the choices of sparse attention are kept
    is_alone whether its rank has whole sequences, and takes no states of others
    chunked  whether its tokens are those of the last of several chunks
    """

    model: CPMConfig
    dtype: torch.dtype
    batch: int = 1
    layers: int = 1
    saving: Saving = field(default_factory=Saving)
    offload: bool = False
    mixers: tuple[str, ...] | None = None
    chosen: torch.dtype = torch.int16
    is_alone: bool = True
    chunked: bool = False


@functools.lru_cache(maxsize=1024)
def find_unit(shape: Shape, tokens: int) -> Unit:
    """Return a unit for this many tokens of each row of a rank."""
    enough = _ENOUGH_TOKENS if shape.layers else _ENOUGH_TOKENS_OF_LOSS
    base = enough // 2 // shape.batch
    if tile := shape.saving.tile:  # each tile is run, so there should be some, but not many
        base = max(min(base, _ENOUGH_TILES * tile // shape.batch), 2 * tile)
    base = max(base, 2)
    if tokens <= 2 * base:
        return _run(shape, tokens)
    return _extrapolate(find_unit(shape, base), find_unit(shape, 2 * base), tokens / base)


def _extrapolate(one: Unit, two: Unit, times: float) -> Unit:
    """Return the unit for `times` the tokens of `one`. `two` has twice the tokens."""

    def line(a: Any, b: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(map(line, a, b))
        if isinstance(a, Work):
            return a * (2 - times) + b * (times - 1)
        return a * (2 - times) + b * (times - 1) if isinstance(a, float) else a

    return Unit(*(line(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True)))


def _run(shape: Shape, tokens: int) -> Unit:
    """Run a unit forward and backward in a ledger."""
    ledger, offload = Ledger(), PlannedOffload()
    model = _build(shape, offload)
    of_ranks = shape.chosen, shape.is_alone, shape.chunked
    part = PlannedPart(ledger, shape.model.infllm, *of_ranks)
    with META:
        start = torch.empty(1, requires_grad=True)
        tables = tuple(torch.empty(tokens, shape.model.head_dim // 2) for _ in ("cos", "sin"))
    ledger.ignore(start, *tables, *model.parameters())
    ledger.ignore(*(p.grad for p in model.parameters() if p.grad is not None))
    with ledger:
        rows = shape.batch, tokens, shape.model.hidden_size
        x = _Begin.apply(start, rows, shape.dtype)
        if shape.layers:
            out = model.saving.run_all(model.layers, x, *tables, part, keep=tables)
        else:
            out = _compute_loss(model, x, ledger)
        end = _End.apply(out)
        del out
        forward, forward_work = ledger.most, ledger.work
        del x
        saved = ledger.now - end.nbytes
        ledger.start()
        part.in_backward = True
        end.backward()
    levels = part.levels
    return Unit(
        saved=float(saved),
        parked=tuple(map(float, offload.parked)),
        forward=float(forward),
        backward=float(ledger.most),
        forward_attention=float(levels["forward"]),
        backward_attention=float(max(levels["again"], levels["backward"])),
        forward_work=forward_work,
        backward_work=ledger.work,
        runs=part.runs,
        kept_of_token=sum(x.nbytes for x in part.kept) // (CHUNKS * shape.batch * tokens),
    )


def _build(shape: Shape, offload: PlannedOffload) -> CPM:
    """Build a model of the unit's blocks. Its weights and their gradients are not counted."""
    saving = dataclasses.replace(shape.saving, offload=offload if shape.offload else None)
    layers = max(shape.layers, 1)
    with META:
        model = CPM(
            dataclasses.replace(
                shape.model,
                num_layers=layers,
                mixers=shape.mixers,
                window=None,
                window_pattern="w",
                rotary_pattern="r",
            ),
            saving=saving,
        ).to(shape.dtype)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    return model


def _compute_loss(model: CPM, x: Tensor, ledger: Ledger) -> Tensor:
    """Return the loss, after the last norm."""
    head = model.embed_tokens if model.config.tie_embeddings else model.lm_head
    hidden = model.norm(x) / model.config.width_scale
    return _Loss.apply(hidden.flatten(0, -2), head.weight, ledger)


class _Begin(torch.autograd.Function):
    """Makes a unit's input, which nothing but the unit keeps."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].new_empty(1, dtype=torch.float32), None, None


class _End(torch.autograd.Function):
    """Takes a unit's result, and makes the gradient of it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = out.shape, out.dtype
        return out.new_empty(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype, device=META)


class _Loss(torch.autograd.Function):
    """The loss of hidden (N, E) and weight (V, E), which allocates and counts as on GPUs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ledger: Ledger) -> Tensor:
        tokens, entries = len(hidden), len(weight)
        tile = min(tile_tokens(tokens, entries, hidden.dtype), tokens)
        logits = hidden.new_empty(tile, entries)
        dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)
        ctx.save_for_backward(dhidden, dweight)
        ctx.ledger, ctx.dtype = ledger, weight.dtype
        # Logits and both gradients are products: one writes logits, two read what the softmax,
        # which reads and writes them, made of them.
        ledger.work += Work(
            products=3 * 2 * weight.numel() * tokens, traffic=5 * tokens * logits[0].nbytes
        )
        return hidden.new_empty(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        results = tuple(torch.empty_like(x, dtype=ctx.dtype) for x in saved)
        ctx.ledger.work += Work(traffic=sum(x.nbytes for x in (*saved, *results)))
        return *results, None


class PlannedOffload(Offload):
    """An Offload that moves no bytes. `parked` has those of each tensor that leaves the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.parked: list[int] = []

    def _leaves(self, x: Tensor) -> bool:
        return x.nbytes >= LEAST_BYTES

    def _move(self, x: Tensor) -> Parked:
        self.parked.append(x.nbytes)
        return _Planned(x)


class _Planned(Parked):
    """A tensor that was only counted."""

    def __init__(self, x: Tensor):
        self._shape, self._dtype = x.shape, x.dtype
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        if self._fetched is None:
            self._fetched = torch.empty(self._shape, dtype=self._dtype, device=META)

    def take(self) -> Tensor:
        assert self._fetched is not None, "fetch comes first"
        return self._fetched
