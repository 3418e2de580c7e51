"""Ways to compute attention over a sequence that is cut over ranks: ours, a built-in Ulysses, and peers if installed.

An implementation is made once per case and then called with this rank's q, k, v; it says which layout its shards have.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bmt_burst import SequenceParallel, Transport, burst_attn_func, kernels
from bmt_burst.transport import Delivery, Done
from bmt_burst.transport.torch_dist import TorchTransport

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(RuntimeError):
    """An implementation that cannot run this case here; says why."""


@dataclass(frozen=True)
class Case:
    """One measurement: global sequence length, sizes, mask and the block kernel."""

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    kernel: str


@dataclass(frozen=True)
class Implementation:
    """An implementation.

    most_tokens  how many tokens a GPU it is measured with at most; variants of one thing need no more
    kernel       what it computes with, if not with the case's
    """

    layout: str
    make: Callable[[Case, SequenceParallel], Attention]
    most_tokens: int | None = None
    kernel: str | None = None


class Burst:
    """Ours, over a transport of its own, so that the memory it holds is this case's."""

    def __init__(
        self, case: Case, sp: SequenceParallel, transport: Callable[[Any], Transport] = TorchTransport, **options
    ):
        groups = dict(sp.groups)
        if sp.process_group is None:
            intra, inter = sp.double_group
            self.transport = transport(intra)
            groups["double_group"] = self.transport, inter
        elif isinstance(sp.process_group, Transport):  # alone, or imagined
            if transport is not TorchTransport:
                raise Unavailable("needs several ranks")
            self.transport = sp.process_group
        else:
            self.transport = groups["process_group"] = transport(sp.process_group)
        self.options = {"causal": case.causal, "flash": case.kernel, **groups, **options}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return burst_attn_func(q, k, v, **self.options)


class _Waiting(TorchTransport):
    """A ring whose deliveries are there before anything else begins: shows what overlap is worth."""

    def deliver(self, *args) -> Delivery:
        delivery = super().deliver(*args)
        delivery.wait()
        return _Arrived(delivery.memory, Done(), delivery.recycled, original=delivery)


@dataclass(frozen=True, kw_only=True)
class _Arrived(Delivery):
    """A delivery that was waited for already."""

    original: Delivery

    def release(self) -> None:
        self.original.release()


def held_bytes(attention: Attention) -> int:
    """Memory that an implementation keeps beyond what torch's allocator counts."""
    return attention.transport.held_bytes if isinstance(attention, Burst) else 0


def deliveries(attention: Attention) -> str | None:
    """How blocks of ours move on GPUs; None for others."""
    if not isinstance(attention, Burst) or not isinstance(attention.transport, TorchTransport):
        return None
    return "copy engines" if attention.transport.copy_engines else "exchanges"


def _single_ring(sp: SequenceParallel, case: Case, chunks: int = 1) -> dist.ProcessGroup:
    """The process group that peers run over, who cut a rank's tokens into equal `chunks`."""
    if case.seq_len % (chunks * sp.size):
        raise Unavailable(f"{case.seq_len} tokens do not divide over {sp.size} ranks with {chunks} chunks each")
    if not isinstance(sp.process_group, dist.ProcessGroup):
        raise Unavailable("is measured on a single ring of several ranks")
    return sp.process_group


def _ulysses(case: Case, sp: SequenceParallel) -> Attention:
    """Ulysses (arXiv 2309.14509): every rank gets whole sequences of some heads, and the same kernel."""
    group = _single_ring(sp, case)
    if case.heads % sp.size or case.kv_heads % sp.size:
        raise Unavailable(f"{case.heads}:{case.kv_heads} heads do not divide over {sp.size} ranks")
    alone = kernel_alone(case)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_AllToAll.apply(x, 2, 1, group) for x in (q, k, v))
        return _AllToAll.apply(alone(q, k, v), 1, 2, group)

    return attention


class _AllToAll(torch.autograd.Function):
    """Cuts (B, S, H, D) along one dimension and joins what comes along another."""

    @staticmethod
    def forward(ctx, x: Tensor, cut: int, join: int, group) -> Tensor:
        ctx.way = cut, join, group
        size = dist.get_world_size(group)
        sent = torch.stack([part.contiguous() for part in x.chunk(size, cut)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(list(received), join)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cut, join, group = ctx.way
        return _AllToAll.apply(grad, join, cut, group), None, None, None


def _ring_flash_attn(case: Case, sp: SequenceParallel) -> Attention:
    if importlib.util.find_spec("ring_flash_attn") is None or importlib.util.find_spec("flash_attn_2_cuda") is None:
        raise Unavailable("needs the packages ring-flash-attn and flash-attn 2")
    try:
        from ring_flash_attn import zigzag_ring_flash_attn_func
    except ImportError as error:  # it names things that some versions of transformers lack
        raise Unavailable(f"ring-flash-attn does not import: {error}") from error
    return partial(zigzag_ring_flash_attn_func, causal=case.causal, group=_single_ring(sp, case, chunks=2))


def _torch_context_parallel(case: Case, sp: SequenceParallel) -> Attention:
    """torch's attention over gathered keys and values by cuDNN, in its own load-balanced layout (which is zigzag)."""
    if not torch.cuda.is_available():
        raise Unavailable("torch's context parallel attention needs GPUs")
    if not case.causal:
        raise Unavailable("torch's context parallel attention is measured with a causal mask, for which it is balanced")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _replace_torch_attention(_single_ring(sp, case, chunks=2))
    grouped = case.heads != case.kv_heads

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return attention


@cache
def _replace_torch_attention(group: dist.ProcessGroup) -> contextlib.ExitStack:
    """Enters torch's context_parallel, in which a backward has to run too, for good: nobody else here needs torch's
    attention. It wants a buffer to cut, whose tokens are 2 a rank at least.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    buffer = torch.zeros(2 * dist.get_world_size(group), device="cuda")
    options = {"buffers": [buffer], "buffer_seq_dims": [0], "no_restore_buffers": {buffer}}
    entered = contextlib.ExitStack()
    entered.enter_context(context_parallel(DeviceMesh.from_group(group, "cuda"), **options))
    return entered


_VARIANTS = 1 << 15
_over_nccl = partial(TorchTransport, copy_engines=False)

IMPLEMENTATIONS = {
    "bmt_burst": Implementation("zigzag", Burst),
    "bmt_burst q": Implementation("zigzag", partial(Burst, backward="q"), _VARIANTS),
    "bmt_burst kv": Implementation("zigzag", partial(Burst, backward="kv"), _VARIANTS),
    "bmt_burst low memory": Implementation("zigzag", partial(Burst, group_bytes=9 << 24)),
    "bmt_burst nccl": Implementation("zigzag", partial(Burst, transport=_over_nccl), _VARIANTS),
    "bmt_burst no overlap": Implementation("zigzag", partial(Burst, transport=_Waiting), _VARIANTS),
    "ulysses": Implementation("contiguous", _ulysses),
    "ring_flash_attn zigzag": Implementation("zigzag", _ring_flash_attn, kernel="fa2"),
    "torch context_parallel": Implementation("zigzag", _torch_context_parallel, kernel="cudnn"),
}


def kernel_alone(case: Case) -> Attention:
    """The block kernel on one GPU with the whole case: a yardstick."""
    return partial(burst_attn_func, causal=case.causal, flash=case.kernel, **SequenceParallel().groups)


def kernel_name(case: Case, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel that a case's name means here."""
    q = torch.empty(1, 1, case.heads, case.head_dim, device=device, dtype=dtype)
    return kernels.pick(case.kernel, q, q[:, :, : case.kv_heads]).name
