"""The memory of weights, gradients and the optimizer on a rank, for each engine.

An engine shards them over all ranks, gathers the weights of a block while it runs, and reduces its
gradients. Numbers here are bytes for each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

_FP32 = 4
_MOMENTS = 2 * _FP32  # of AdamW


@dataclass(frozen=True)
class Sharding:
    """Bytes of an engine for each parameter.

    Of a rank's shard, for the whole step:
    weights, optimizer  the weights with their masters, and AdamW's state
    summed              sums of gradients over earlier micro-batches and chunks
    host                what is in the host's memory

    Of a rank's shard, once its gradients are known:
    gradients           gradients of a backward

    Of whole weights, while they are gathered:
    forward, backward   a block's, with its gradients in the backward
    reduced             a block's, while the block before it computes its backward
    kept                all blocks', from their forward to their backward
    outside             those outside the blocks, for the whole step
    head, head_gradient the vocabulary's that make logits, while the loss runs, and from then on

    Read and written in each micro-batch and chunk, where weights are gathered, and gradients are
    reduced and added up:
    moved_whole, moved  of whole weights, and of a rank's shard
    """

    weights: int
    optimizer: int
    summed: int
    host: int
    gradients: int
    forward: int
    backward: int
    reduced: int
    kept: int
    outside: int
    head: int
    head_gradient: int
    moved_whole: int
    moved: int


def bmtrain_sharding(itemsize: int, offloaded: bool, accumulates: bool) -> Sharding:
    """Return the bytes of train/engine/bmtrain.py. It keeps masters in addition to weights in 16
    bits. A backward gathers a block's weights and has a buffer of its gradients.

    itemsize     bytes of a weight in forward and backward
    offloaded    whether masters are on the host
    accumulates  whether there are several micro-batches or chunks
    """
    is_master = itemsize == _FP32 and not offloaded  # weights are their own masters
    state = _MOMENTS + (0 if is_master else _FP32)
    return Sharding(
        weights=itemsize,
        optimizer=0 if offloaded else state,
        summed=_FP32 if accumulates else 0,
        host=state + _FP32 if offloaded else 0,
        gradients=itemsize,
        forward=itemsize,
        backward=2 * itemsize,
        reduced=0,
        kept=0,
        outside=0,
        head=itemsize,
        head_gradient=0,
        # two gathers and a reduction, without copies; sums in fp32
        moved_whole=3 * itemsize,
        moved=4 * itemsize + 2 * _FP32,
    )


def torch_sharding(itemsize: int, accumulates: bool, keeps_weights: bool) -> Sharding:
    """Return the bytes of train/engine/torch.py, FSDP2, for TorchEngine's `keeps_weights`. Weights
    are masters, and are rounded when they are gathered.

    It gathers the next block into a buffer while one computes, and reduces gradients in fp32
    meanwhile. Weights outside the blocks stay gathered, and their gradients are reduced last.
    """
    gathers = 1 if keeps_weights else 2
    return Sharding(
        weights=_FP32,
        optimizer=_MOMENTS,
        summed=_FP32 if accumulates else 0,
        host=0,
        gradients=0 if accumulates else _FP32,
        forward=3 * itemsize,
        # kept weights are not gathered again
        backward=(1 if keeps_weights else 4) * itemsize,
        reduced=_FP32,
        kept=itemsize if keeps_weights else 0,
        outside=itemsize,
        head=0,
        head_gradient=itemsize,
        # weights are rounded, gathered and copied out; gradients are copied to fp32 and reduced
        moved_whole=gathers * 3 * itemsize + itemsize + 2 * _FP32,
        moved=gathers * (_FP32 + itemsize) + 4 * _FP32,
    )
