"""Functions in CuTe DSL that add a bias to scores. FlashAttention-4 compiles them into its kernels.

A bias is one number of `biases` (H, width) fp32. These are the numbers of all distances, -reach to
reach, then the table, so that width is 2 reach + 1 + R. The package passes some scores with the
indices of their queries and keys in a sequence, and the sequence's number.

Tensors are passed as addresses. If the package gets a tensor, it limits each index with two
divisions, which take longer than everything here. These functions limit the indices themselves.
"""

# No `from __future__ import annotations`: CuTe DSL reads the annotations themselves. The package
# passes q_idx, kv_idx, seqlen_info, aux_tensors and aux_scalars by name.
import hashlib
from pathlib import Path

import cutlass
import torch
from cutlass import cute

_MANY = 1 << 30  # the size of a tensor with only a known address


@cute.jit
def add_by_distance(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    """Add the bias by distance to scores. Positions of a sequence rise by 1.

    aux_scalars: biases; width; places (sequences, 2) int32: reach + the first key's position - the
    first query's, and 2 reach.
    """
    biases, width, places = aux_scalars
    biases = _numbers(cutlass.Float32, biases, head[0] * width)
    places = _numbers(cutlass.Int32, places, batch[0] * 2)
    ahead, last = places[0], places[1]
    added = cute.make_rmem_tensor(score.shape, cutlass.Float32)
    for i in cutlass.range_constexpr(cute.size(score.shape)):
        added[i] = biases[cutlass.max(cutlass.min(kv_idx[i] - q_idx[i] + ahead, last), 0)]
    return score + added.load()


@cute.jit
def add_by_segments(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    """Add the bias to scores of any tokens.

    aux_scalars: biases; width; places (sequences, 4) int32: first and last query, first and last
    key; reach; other; the last of `pairs`; then the tensors of `CallBias` and its `SegmentIds` by
    name. `pairs` must not be empty.
    """
    biases, width, places, reach, other, last, *numbers = aux_scalars
    biases = _numbers(cutlass.Float32, biases, head[0] * width)
    places = _numbers(cutlass.Int32, places, batch[0] * 4)
    numbers = [_numbers(cutlass.Int32, address) for address in numbers]
    q_group, q_base, q_position, kv_group, kv_segment, kv_position, pairs = numbers
    first_query, last_query, first_key, last_key = places[0], places[1], places[2], places[3]
    added = cute.make_rmem_tensor(score.shape, cutlass.Float32)
    for i in cutlass.range_constexpr(cute.size(score.shape)):
        query = cutlass.max(cutlass.min(first_query + q_idx[i], last_query), 0)
        key = cutlass.max(cutlass.min(first_key + kv_idx[i], last_key), 0)
        # For two different groups the entry is arbitrary and not used.
        entry = cutlass.max(cutlass.min(q_base[query] + kv_segment[key], last), 0)
        row = cutlass.select_(q_group[query] == kv_group[key], pairs[entry], other)
        distance = cutlass.max(cutlass.min(kv_position[key] - q_position[query], reach), -reach)
        added[i] = biases[reach + cutlass.select_(row < 0, distance, reach + 1 + row)]
    return score + added.load()


@cute.jit
def gradient_of_sum(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
    """Return the gradient of scores without the bias: it is the same as with the bias."""
    return grad


def scalars(*numbers: int | torch.Tensor) -> tuple:
    """Return aux_scalars: numbers, and the addresses of tensors."""
    return tuple(
        cutlass.Int64(x.data_ptr()) if isinstance(x, torch.Tensor) else cutlass.Int32(x)
        for x in numbers
    )


def _numbers(dtype, address, first=0):
    """Return a tensor at an address, from entry `first` on."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer + first, cute.make_layout(_MANY))


# The package finds compiled kernels by this key. By default the key is only the function's source.
_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
for _function in (add_by_distance, add_by_segments, gradient_of_sum):
    _function.__cute_hash__ = f"{_function.__name__} {_SOURCE}"
    _function.__vec_size__ = 1
