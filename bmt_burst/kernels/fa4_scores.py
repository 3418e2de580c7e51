"""What FlashAttention-4 does with scores that have a bias: functions in CuTe DSL, compiled into its kernels."""

# No `from __future__ import annotations`: CuTe DSL reads the functions as they are. The package passes q_idx, kv_idx,
# seqlen_info and aux_tensors by these names.
import cutlass
from cutlass import cute


@cute.jit
def add_by_distance(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """A score and what it adds: aux_tensors are biases (H, 2 reach + 1) fp32 and, of each sequence, (sequences, 2)
    int32: what to add to key's index - query's, and 2 reach, the last place."""
    biases, places = aux_tensors
    place = kv_idx[0] - q_idx[0] + places[batch[0], 0]
    place = cutlass.max(cutlass.min(place, places[batch[0], 1]), 0)
    added = cute.make_rmem_tensor(1, cutlass.Float32)
    added[0] = biases[head[0], place]
    return score + added.load()


@cute.jit
def gradient_by_distance(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """The gradient of the score without its bias: the same."""
    return grad
