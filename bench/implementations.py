"""Implementations of attention over ranks: ours, and peers if they are installed.

An implementation is made once for each case, and then called with this rank's q, k, v. It has a
layout for its shards. A yardstick is one GPU that computes as many tokens alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench import flash_attn_interface, live_rows, masks
from bmt_burst import (
    Layout,
    Mask,
    Scores,
    SequenceParallel,
    Transport,
    burst_attn_func,
    init_sequence_parallel,
    kernels,
)
from bmt_burst.bias.kernels import pick as pick_biased
from bmt_burst.spec import Spec
from bmt_burst.transport.torch_dist import TorchTransport

_HAS_FA2 = kernels.installed("flash_attn_2_cuda")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(RuntimeError):
    """The reason why an implementation cannot run a case here."""


@dataclass(frozen=True)
class Case:
    """One measurement: global sequence length, sizes, names of the mask and the block kernel.

    share_of   number of ranks, if this is one rank's share of a longer sequence, for a yardstick
    value_dim  head size of v, if it is not that of q and k
    """

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    kernel: str
    share_of: int = 1
    value_dim: int | None = None

    @property
    def visible(self) -> Mask:
        """The mask itself, the same for all sequences of the batch."""
        return masks.share_of(self.mask, self.seq_len * self.share_of, self.share_of)

    @property
    def scores(self) -> Scores | None:
        """The scores of a mask with a bias, the same for all sequences of the batch, or None."""
        return masks.scores_of(self.mask, self.seq_len)

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward: 4 D for each visible pair and head.

        The backward has 2.5 times as many.
        """
        sizes = self.head_dim + (self.value_dim or self.head_dim)
        return 2.0 * self.batch * self.visible.area * self.heads * sizes


@dataclass(frozen=True)
class Implementation:
    """An implementation.

    layout       the layout of its shards; "balanced" has equal work under the case's mask, see
                 bench/masks.py
    most_tokens  the most tokens of a GPU that it is measured with, or None; variants need few
    kernel       its kernel, if it is not the case's
    kinds        the kinds of masks that it is measured with
    """

    layout: str
    make: Callable[[Case, SequenceParallel, Layout], Attention]
    most_tokens: int | None = None
    kernel: str | None = None
    kinds: Sequence[str] = masks.KINDS

    def layout_of(self, case: Case, size: int) -> Layout:
        """Return the layout of a case on `size` ranks."""
        if self.layout == "balanced":
            return masks.balanced(case.mask, case.seq_len, size)
        return Layout.named(self.layout, case.seq_len, size)

    def measures(self, case: Case, size: int) -> bool:
        """Return whether it is measured with a case on `size` ranks."""
        tokens = case.seq_len // size
        return tokens <= (self.most_tokens or tokens) and masks.kind(case.mask) in self.kinds

    def on(self, case: Case, sp: SequenceParallel) -> Attention:
        """Make it on this rank, for a case."""
        return self.make(case, sp, self.layout_of(case, sp.size))


class Burst:
    """Our attention, over its own transport, so that the memory held is this case's.

    biased      whether scores have the mask's bias, if it has one
    table       the table of that bias, with a gradient, or None
    transports  that of the ring, or those of a double ring: within hosts, between them
    """

    transports: tuple[Transport, ...]

    def __init__(
        self,
        case: Case,
        sp: SequenceParallel,
        layout: Layout,
        transport: Callable[[Any], Transport] = TorchTransport,
        biased: bool = True,
        **options,
    ):
        groups = dict(sp.groups)
        if sp.process_group is None:
            self.transports = tuple(map(transport, sp.double_group))
            groups["double_group"] = self.transports
        elif isinstance(sp.process_group, Transport):  # a rank alone, or imagined peers
            if transport is not TorchTransport:
                raise Unavailable("needs several ranks")
            self.transports = (sp.process_group,)
        else:
            self.transports = (transport(sp.process_group),)
            (groups["process_group"],) = self.transports
        scores = case.scores if biased else None
        self.table = None
        shown: dict[str, Any] = {"mask": case.visible}
        if scores is not None:
            self.table = random_table(live_rows.BEE.num_bias_rows, case.heads)
            shown = {"scores": scores, "bias": self.table}
        self.options = {**shown, "flash": case.kernel, **groups, "layout": layout, **options}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return burst_attn_func(q, k, v, **self.options)


def random_table(rows: int, heads: int) -> Tensor:
    """Make a table (rows, heads) fp32 with a gradient, as CPM-Live's models are initialized.

    It is on this process's device, and identical in all processes.
    """
    table = torch.randn(rows, heads, generator=torch.Generator().manual_seed(0))
    return table.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_()


def held_bytes(attention: Attention) -> int:
    """Return the memory of an implementation that torch's allocator does not count."""
    return sum(x.held_bytes for x in attention.transports) if isinstance(attention, Burst) else 0


def table_of(attention: Attention) -> Tensor | None:
    """Return the table of an implementation's bias, or None."""
    return attention.table if isinstance(attention, Burst) else None


def deliveries(attention: Attention) -> str | None:
    """Return how our blocks move on GPUs, or None for peers."""
    if not isinstance(attention, Burst) or not isinstance(attention.transports[0], TorchTransport):
        return None
    return "copy engines" if attention.transports[0].copy_engines else "exchanges"


def _single_ring(sp: SequenceParallel, case: Case, chunks: int = 1) -> dist.ProcessGroup:
    """Return the process group of a peer that cuts a rank's tokens into equal `chunks`."""
    if case.seq_len % (chunks * sp.size):
        raise Unavailable(
            f"{case.seq_len} tokens do not divide over {sp.size} ranks with {chunks} chunks each"
        )
    if not isinstance(sp.process_group, dist.ProcessGroup):
        raise Unavailable("is measured on a single ring of several ranks")
    return sp.process_group


def _ring_flash_attn(case: Case, sp: SequenceParallel, _layout: Layout) -> Attention:
    if case.mask not in ("causal", "full"):
        raise Unavailable("ring-flash-attn's zigzag ring is for causal and full masks")
    if not kernels.installed("ring_flash_attn"):
        raise Unavailable("needs the package ring-flash-attn")
    if not torch.cuda.is_available():
        raise Unavailable("ring-flash-attn's gradients are wrong in fp32, as without GPUs")
    return partial(
        _import_zigzag_ring().zigzag_ring_flash_attn_func,
        causal=case.mask == "causal",
        group=_single_ring(sp, case, chunks=2),
    )


@cache
def _import_zigzag_ring() -> ModuleType:
    """Import ring-flash-attn's zigzag ring, over torch's FlashAttention-2 without flash-attn 2.

    The rest of its package is not executed: it needs more of flash-attn 2, and some versions of
    transformers lack names that it imports.
    """
    if not _HAS_FA2:
        sys.modules["flash_attn.flash_attn_interface"] = flash_attn_interface
    spec = importlib.util.find_spec("ring_flash_attn")
    assert spec, "it is installed"
    sys.modules["ring_flash_attn"] = importlib.util.module_from_spec(spec)
    return importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn")


def _torch_context_parallel(case: Case, sp: SequenceParallel, _layout: Layout) -> Attention:
    """Make torch's attention over gathered keys and values by cuDNN, in its zigzag layout."""
    if not torch.cuda.is_available():
        raise Unavailable("torch's context parallel attention needs GPUs")
    if case.mask != "causal":
        raise Unavailable("torch's context parallel attention is balanced only for causal masks")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _replace_torch_attention(_single_ring(sp, case, chunks=2))
    grouped = case.heads != case.kv_heads

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=grouped
            ).transpose(1, 2)

    return attention


def _usp(case: Case, sp: SequenceParallel, layout: Layout) -> Attention:
    """Make USP (arXiv 2405.07719): pairs of consecutive ranks share heads, rings join the pairs."""
    group = _single_ring(sp, case)
    if sp.size < 4 or sp.size % 2:
        raise Unavailable(f"{sp.size} ranks do not form rings of pairs")
    return Burst(case, _in_pairs(group), layout, strategy="usp")


@cache
def _in_pairs(group: dist.ProcessGroup) -> SequenceParallel:
    """Return the ranks of a group of all ranks, for rings between pairs that share heads."""
    return init_sequence_parallel(dist.get_world_size(group), ulysses_size=2)


def _naive_ulysses(case: Case, sp: SequenceParallel, _layout: Layout) -> Attention:
    """Make a Ulysses without overlap: collectives send q, k and v, and return out of one kernel."""
    group, attention = _single_ring(sp, case), kernel_alone(case)
    if case.kv_heads % sp.size:
        raise Unavailable(f"{case.kv_heads} kv heads do not divide over {sp.size} ranks")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Swap.apply(
            attention(*(_Swap.apply(x, group, True) for x in (q, k, v))), group, False
        )

    return run


class _Swap(torch.autograd.Function):
    """An all-to-all from some tokens of all heads to all tokens of some heads, or back."""

    @staticmethod
    def forward(ctx, x, group, to_heads):
        ctx.group, ctx.to_heads = group, to_heads
        cut, joined = (2, 1) if to_heads else (1, 2)
        sent = torch.stack(x.chunk(group.size(), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx, grad):
        return _Swap.apply(grad, ctx.group, not ctx.to_heads), None, None


@cache
def _replace_torch_attention(group: dist.ProcessGroup) -> contextlib.ExitStack:
    """Enter torch's context_parallel and stay in it, because the backward must also run inside.

    Nothing else here uses torch's attention. It needs a buffer to cut, of 2 tokens for each rank.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    buffer = torch.zeros(2 * dist.get_world_size(group), device="cuda")
    options = {"buffers": [buffer], "buffer_seq_dims": [0], "no_restore_buffers": {buffer}}
    entered = contextlib.ExitStack()
    entered.enter_context(context_parallel(DeviceMesh.from_group(group, "cuda"), **options))
    return entered


_VARIANTS = 1 << 15
_ring = partial(Burst, strategy="ring")
_over_nccl = partial(TorchTransport, engine_use="never")

IMPLEMENTATIONS = {
    "bmt_burst": Implementation("balanced", Burst),
    "bmt_burst q": Implementation("balanced", partial(_ring, backward="q"), _VARIANTS),
    "bmt_burst kv": Implementation("balanced", partial(_ring, backward="kv"), _VARIANTS),
    "bmt_burst without a bias": Implementation(
        "balanced", partial(Burst, biased=False), kinds=("bee",)
    ),
    "bmt_burst low memory": Implementation("balanced", partial(_ring, group_bytes=9 << 24)),
    "bmt_burst nccl": Implementation("balanced", partial(Burst, transport=_over_nccl), _VARIANTS),
    "ring": Implementation("balanced", _ring, _VARIANTS),
    "all-gather": Implementation("balanced", partial(Burst, strategy="all-gather"), _VARIANTS),
    "one-call": Implementation(
        "balanced",
        partial(Burst, strategy="one-call"),
        _VARIANTS,
        kinds=("causal", "full", "documents", "window"),
    ),
    "ulysses": Implementation("contiguous", partial(Burst, strategy="ulysses")),
    "usp": Implementation("balanced", _usp, _VARIANTS),
    "naive ulysses": Implementation("contiguous", _naive_ulysses),
    "ring_flash_attn zigzag": Implementation(
        "zigzag", _ring_flash_attn, kernel="fa2" if _HAS_FA2 else "aten"
    ),
    "torch context_parallel": Implementation("zigzag", _torch_context_parallel, kernel="cudnn"),
}


def kernel_alone(case: Case) -> Attention:
    """Make a yardstick: the block kernel on one GPU with the whole case, in one call."""
    options = SequenceParallel(layout="contiguous").groups
    return partial(burst_attn_func, mask=case.visible, flash=case.kernel, **options)


def fa4_varlen(case: Case) -> Attention:
    """Make a yardstick: FlashAttention-4's own function for packed sequences, on one GPU.

    Raises Unavailable if the package is not installed, for other kernels, and for masks of one
    dense call.
    """
    usable = torch.cuda.is_available() and kernels.installed("flash_attn.cute")
    if case.kernel not in ("auto", "fa4") or not usable:
        raise Unavailable("needs GPUs, the package flash-attn-4 and the kernel 'fa4'")
    if masks.kind(case.mask) not in ("documents", "window"):
        raise Unavailable("is for documents and windows")
    from flash_attn.cute.interface import flash_attn_varlen_func

    slices, high = case.visible.slices, case.visible.slices[0].high
    starts = [row * case.seq_len + s.q[0] for row in range(case.batch) for s in slices]
    cu_seqlens = torch.tensor(
        [*starts, case.batch * case.seq_len], dtype=torch.int32, device="cuda"
    )
    longest = max(s.q[1] - s.q[0] for s in slices)
    options = {"causal": True} if high is None else {"window_size": (high - 1, 0)}
    for side in ("q", "k"):
        options |= {f"cu_seqlens_{side}": cu_seqlens, f"max_seqlen_{side}": longest}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, *_ = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), **options)
        return out.unflatten(0, q.shape[:2])

    return attention


YARDSTICKS = {"kernel alone": kernel_alone, "FA4 varlen": fa4_varlen}


def kernel_name(case: Case, device: torch.device, dtype: torch.dtype, biased: bool = False) -> str:
    """Return the name of a case's kernel or, if biased, of the kernel for its biases."""
    q = torch.empty(1, 1, case.heads, case.head_dim, device=device, dtype=dtype)
    spec = Spec(case.head_dim**-0.5)
    k = q[:, :, : case.kv_heads]
    kernel = kernels.pick(case.kernel, q, k, spec)
    return (pick_biased(kernel, q, k, spec) if biased else kernel).name
