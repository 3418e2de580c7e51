"""FlashAttention-4: the `flash-attn-4` package (CuTe DSL), for Hopper and Blackwell.

A process compiles a kernel, in seconds, when it first uses a combination of dtype, head size,
number of query heads for a kv head, softcap and `Fa4Kernel.variant`. The package keeps kernels on
disk if the environment variable FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is 1.

The source of 4.0.0b36 for Hopper shows:

- A sequence without keys gets an out of 0 and an lse of -inf, one without queries dk and dv of 0.
- The backward treats an lse of -inf as 0 and relies on the mask.
- Forward and backward skip the same pairs of blocks, also where a band hides all of a block. So the
  backward in a fixed order waits for no block that is never computed.
- A softcap bounds scores before they are masked. tanh is the GPU's, accurate to 11 bits.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..base.dtypes import accumulator_dtype
from ..merging.merge import empty_lse
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import Kernel, import_failure, installed, refuses_half
from .packed import effective_band, pack, pack_rows, sequences, unpack, unpack_rows

# 4.0.0b36 silently computes wrong gradients for other sizes, such as 80. They are padded to one
# of these. On Blackwell it lacks 192, and for 256 the gradient of lse, by which delta is passed.
_HEAD_SIZES = (64, 96, 128)
_HEAD_SIZES_HOPPER = (*_HEAD_SIZES, 192, 256)

# Head sizes of q and of v that its kernels for Hopper compute without padding, faster than with it.
# Its backward asserts equal sizes if k has fewer heads than q. 96 and 64 are computed too, but that
# gains nothing at 8K tokens (docs/results-time.md).
_VALUE_SIZES_HOPPER = ((192, 128),)

# The package adds up offsets in 32 bits, and silently computes wrong gradients (its issue 2611). So
# calls on larger q are cut by heads, and larger k refused.
_MOST_ENTRIES = 1 << 30
_MOST_KEY_ENTRIES = (1 << 31) - 1

# The package compiles separate kernels for sequences of one block. To let lengths vary without new
# kernels, it is told that short packed sequences may be this long, which costs nothing, and dense
# parts of sequences that may be one block are packed.
_LONGEST_AT_LEAST = 1024
_LARGEST_BLOCK = 256

# It compiles separate kernels for more packed sequences than this.
_FEW_SEQUENCES = 256

# While a process writes a kernel to disk, others that need it wait for its lock. 4.0.0b36 raises
# after 15 s, which is too short if many processes compile on the same cores.
_LOCK_SECONDS = 600


class Fa4Kernel(Kernel):
    name = "fa4"
    writes_new_memory = True

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if not installed("flash_attn.cute"):
            return "the package flash-attn-4 is not installed"
        if k.numel() > _MOST_KEY_ENTRIES:
            return f"it adds up offsets in 32 bits, and k has {k.numel()} entries"
        generation = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 0
        if spec.deterministic and generation == 12:
            return "its backward is not deterministic on GPUs of compute capability 12"
        largest = (_HEAD_SIZES_HOPPER if generation == 9 else _HEAD_SIZES)[-1]
        return refuses_half(spec, q, (9, 0), largest, caps=generation == 9)

    def broken(self) -> str | None:
        return import_failure("flash-attn-4", functions)

    def variant(self, call: KernelCall, batch: int) -> tuple[bool, ...]:
        """Return the facts of a call, besides dtypes and numbers of heads, for which the package
        compiles a kernel again.
        """
        left, right = effective_band(call)
        band = left is not None, right is not None, left is None and right == 0
        if _is_dense(call):
            return *band, False, call.q_tokens <= _LARGEST_BLOCK
        return *band, True, batch * len(call.sequences()) > _FEW_SEQUENCES

    def forward(self, q, k, v, call, spec):
        if _fits_once(q, k):
            return self.forward_once(q, k, v, call, spec)
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), empty_lse(q)
        for heads, kv_heads in _cut_heads(q, k):
            inputs = _take(q, heads), _take(k, kv_heads), _take(v, kv_heads)
            out[:, :, heads], lse[:, heads] = self.forward_once(*inputs, call, spec)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        if _fits_once(q, k):
            return self.backward_once(dout, q, k, v, out, lse, delta, call, spec)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        wide = accumulator_dtype(k.dtype)
        sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v)]
        for heads, kv_heads in _cut_heads(q, k):
            inputs = _take(dout, heads), _take(q, heads), _take(k, kv_heads), _take(v, kv_heads)
            softmax = _take(out, heads), _take(lse, heads, 1), _take(delta, heads, 1)
            dq[:, :, heads], *of_keys = self.backward_once(*inputs, *softmax, call, spec)
            for total, grad in zip(sums, of_keys, strict=True):
                total[:, :, kv_heads] += grad
        return dq, *(total.to(k.dtype) for total in sums)

    def forward_once(self, q, k, v, call, spec, added=None):
        """Compute `forward` in one call of the package. With `added`, the arguments for what an
        extension adds to scores, tokens are packed.
        """
        of_head = q.numel() // q.shape[2]
        if of_head > _MOST_ENTRIES or q.numel() > _MOST_KEY_ENTRIES:  # no heads are left to cut
            has = f"q has {q.numel()} entries, {of_head} a head"
            raise ValueError(f"fa4 adds up offsets in 32 bits, and {has}: pass another kernel")
        head_size, batch = q.shape[-1], len(q)
        arguments, packed = _arguments(call, spec, q, added)
        size, value_size = _computed_sizes(spec, q, k, added)
        q, k, v = _fit_heads(q, size), _fit_heads(k, size), _fit_heads(v, value_size)
        if packed:
            q, k, v = pack(q, k, v)
        out, lse, *_ = functions()[0](q, k, v, return_lse=True, **arguments)
        if packed:
            [out], lse = unpack(batch, out), unpack_rows(lse, batch)
        return _fit_heads(out, head_size), lse

    def backward_once(self, dout, q, k, v, out, lse, delta, call, spec, added=None):
        """Compute `backward` in one call of the package, as `forward_once`."""
        head_size, batch = q.shape[-1], len(q)
        arguments, packed = _arguments(call, spec, q, added)
        size, value_size = _computed_sizes(spec, q, k, added)
        q, k = _fit_heads(q, size), _fit_heads(k, size)
        v, dout = _fit_heads(v, value_size), _fit_heads(dout, value_size)
        if out is None:
            # The kernel computes with rowsum(out * dout) - dlse, where dlse is the gradient of lse.
            out = q.new_zeros(value_size).expand(dout.shape)
            arguments["dlse"] = pack_rows(-delta).contiguous() if packed else -delta
        else:
            out = _fit_heads(out, value_size)
        if packed:
            dout, q, k, v, out = pack(dout, q, k, v, out)
            lse = pack_rows(lse)
        arguments["deterministic"] = spec.deterministic
        grads = functions()[1](q, k, v, out, dout, lse.contiguous(), **arguments)[:3]
        if packed:
            grads = unpack(batch, *grads)
        return tuple(_fit_heads(grad, head_size) for grad in grads)


def _fits_once(q: Tensor, k: Tensor) -> bool:
    """Whether the package computes a call right without cutting its heads."""
    return _reach(q) <= _MOST_ENTRIES and _reach(k) <= _MOST_KEY_ENTRIES


def _reach(x: Tensor) -> int:
    """Count the entries of memory from the first one of x to its last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _cut_heads(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the query heads of each part of a call, with at most _MOST_ENTRIES, and their kv heads:
    whole groups of heads that share a kv head, or equal parts of one group.
    """
    batch, tokens, heads, head_size = q.shape
    group, of_head = heads // k.shape[2], batch * tokens * head_size
    most = max(_MOST_ENTRIES // of_head, 1)
    count = max(n for n in range(1, most + 1) if n % group == 0 or group % n == 0)
    for first in range(0, heads, count):
        last = min(first + count, heads)
        yield slice(first, last), slice(first // group, (last - 1) // group + 1)


def _take(x: Tensor | None, heads: slice, dim: int = 2) -> Tensor | None:
    """Return heads of x, or None if x is None. The result has no gaps where other heads were."""
    return x if x is None else x.narrow(dim, heads.start, heads.stop - heads.start).contiguous()


def _computed_sizes(
    spec: Spec, q: Tensor, k: Tensor, added: dict[str, Any] | None
) -> tuple[int, int]:
    """Return the head sizes of q and k, and of v and out, that the package computes correctly."""
    size = min(size for size in _HEAD_SIZES_HOPPER if size >= q.shape[-1])
    sizes = size, spec.value_size or size
    if added is not None or q.shape[2] != k.shape[2] or sizes not in _VALUE_SIZES_HOPPER:
        return size, size
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != 9:
        return size, size
    return sizes


def _fit_heads(x: Tensor, head_size: int) -> Tensor:
    """Return x with `head_size` columns: it adds columns of zeros, or leaves columns out."""
    missing = head_size - x.shape[-1]
    return functional.pad(x, (0, missing)) if missing > 0 else x[..., :head_size] if missing else x


def _arguments(
    call: KernelCall, spec: Spec, q: Tensor, added: dict[str, Any] | None
) -> tuple[dict[str, Any], bool]:
    """Return the package's arguments besides tensors, and whether it takes packed tokens. Dense
    calls need no tables, so a CUDA graph may capture them.
    """
    left, right = effective_band(call)
    arguments: dict[str, Any] = {"softmax_scale": spec.scale, **(added or {})}
    if spec.softcap is not None:
        arguments["softcap"] = spec.softcap
    arguments["causal"] = left is None and right == 0
    if not arguments["causal"]:
        arguments |= {"window_size_left": left, "window_size_right": right}
    if added is None and _is_dense(call):
        return arguments, False
    of = sequences(call, len(q), q.device)
    arguments |= {"cu_seqlens_q": of.cu_seqlens_q, "cu_seqlens_k": of.cu_seqlens_k}
    longest = max(of.longest, _LONGEST_AT_LEAST)
    return arguments | {"max_seqlen_q": longest, "max_seqlen_k": longest}, True


def _is_dense(call: KernelCall) -> bool:
    """Whether a call is one tile of all tokens, and has several blocks or is a whole sequence."""
    if call.tiles != (((0, call.q_tokens), (0, call.kv_tokens)),):
        return False
    shortest = min(call.q_tokens, call.kv_tokens)
    return shortest > _LARGEST_BLOCK or (call.is_whole and call.q_tokens == call.kv_tokens)


@functools.cache
def functions() -> tuple[Callable, Callable]:
    """Import the package's forward and backward."""
    from flash_attn.cute import cache_utils, interface

    if cache_utils.CUTE_DSL_CACHE_ENABLED:
        cache_utils.JITPersistentCache.LOCK_TIMEOUT_SECONDS = _LOCK_SECONDS
    # Otherwise every process warns about an unused argument for every kernel that it compiles.
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning, module="cutlass")
    return interface._flash_attn_fwd, interface._flash_attn_bwd


def cache_folder() -> Path:
    """Return the package's folder of compiled kernels. Raises OSError if there is none."""
    from flash_attn.cute import cache_utils

    if not cache_utils.CUTE_DSL_CACHE_ENABLED:
        raise OSError("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is not 1")
    folder: Path = cache_utils.get_cache_path()
    return folder
