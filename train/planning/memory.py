"""The memory and the work of a training step on one rank, as docs/planning.md describes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from bmt_burst.offload import PIECE_BYTES
from bmt_burst.planning import (
    AttentionMemory,
    AttentionShape,
    LightningShape,
    Work,
    choice_dtype,
    chunk_tokens,
)
from models.config import LIGHTNING, CPMConfig
from train.data.batches import choose_micro_batch_size
from train.settings.config import TrainConfig
from train.settings.settings import DTYPES

from .sharding import Sharding, bmtrain_sharding, torch_sharding
from .units import Shape, Unit, find_unit

PARTS = (
    "weights",
    "optimizer",
    "gradients",
    "gathered weights",
    "activations",
    "kept keys",
    "kept states",
    "working memory",
    "loss",
    "rings",
)
_FP32 = 4
AnyShape = AttentionShape | LightningShape


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a rank when a step needs most.

    parts   on the GPU, by the names in PARTS
    host    in the host's memory
    parked  activations that leave the GPU in a forward, and return
    moment  "forward", "loss", "backward" or "optimizer"
    """

    parts: Mapping[str, int]
    host: int
    parked: int
    moment: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class AttentionRun:
    """A run of a layer's attention: "forward", "backward", or "again", with kept choices."""

    shape: AnyShape
    run: str


@dataclass(frozen=True)
class Step:
    """A step of one rank, which updates a `shard` of parameters after all micro-batches.

    chunks             of a sequence: 1 if it is computed as a whole
    forward, backward  the work of one micro-batch, without attention
    attention          how often each attention runs in it
    """

    memory: StepMemory
    micro_batches: int
    chunks: int
    forward: Work
    backward: Work
    attention: Mapping[AttentionRun, float]
    shard: int
    on_host: bool


Parts = Mapping[str, float]  # bytes by the names in PARTS; those that are missing are 0


@dataclass(frozen=True)
class _Layers:
    """A unit with its attentions, in the row of a step's units."""

    unit: Unit
    attention: Sequence[AnyShape]
    parameters: int

    @property
    def memory(self) -> AttentionMemory:
        """The most memory of its attentions."""
        found = [shape.memory for shape in self.attention] or [AttentionMemory(0, 0, 0)]
        most = zip(*map(astuple, found), strict=True)
        return AttentionMemory(*map(max, most))

    @property
    def forward(self) -> float:
        """The most bytes of its forward."""
        return max(self.unit.forward, self.unit.forward_attention + self.memory.forward)

    @property
    def backward(self) -> float:
        """The most bytes of its backward."""
        return max(self.unit.backward, self.unit.backward_attention + self.memory.backward)


def plan_step(
    config: TrainConfig, model: CPMConfig, gpus: int, engine: str, keeps_weights: bool = False
) -> Step:
    """Return a rank's step on `gpus` ranks, or raise ValueError if the batch does not fit."""
    groups = gpus // config.sp_size
    micro_batch_size = choose_micro_batch_size(config, groups)
    micro_batches = config.batch_size // groups // micro_batch_size
    chunk = config.tokens_of_chunk
    chunks = 1 if chunk is None else -(-config.seq_len // chunk)
    dtype = DTYPES[config.dtype]
    accumulates = micro_batches * chunks > 1  # an engine adds up chunks like micro-batches
    if engine == "bmtrain":
        sharding = bmtrain_sharding(dtype.itemsize, config.offload_optimizer, accumulates)
    else:
        sharding = torch_sharding(dtype.itemsize, accumulates, keeps_weights)
    layers = _find_layers(config, model, micro_batch_size)
    memory = _find_memory(config, model, gpus, sharding, layers, chunks)
    forward = sum((each.unit.forward_work for each in layers), Work())
    backward = sum((each.unit.backward_work for each in layers), Work())
    if chunks > 1:
        *blocks, _ = layers
        # all but the last chunk run twice, and without the loss where only keys are kept
        twice = sum((each.unit.forward_work for each in blocks), Work()) * (chunks - 1)
        forward, backward = forward * chunks + twice, backward * chunks
    shard = -(-model.num_parameters // gpus)
    moved = sharding.moved_whole * model.num_parameters + sharding.moved * shard
    backward += Work(traffic=chunks * moved)
    return Step(
        memory,
        micro_batches,
        chunks,
        forward,
        backward,
        _count_attention(layers, chunks),
        shard,
        config.offload_optimizer,
    )


def _count_attention(layers: list[_Layers], chunks: int) -> Mapping[AttentionRun, float]:
    """Return how often each attention runs in a micro-batch.

    The chunks' softmax attentions are together one attention to the whole sequence. The forward
    that keeps keys is one to all tokens before the last chunk. Choices of sparse attention are made
    once. Lightning attention runs once for each chunk.
    """
    found: defaultdict[AttentionRun, float] = defaultdict(float)
    for each in layers:
        for shape in each.attention:
            all_tokens, earlier, times, again = shape, shape, chunks, chunks - 1
            if isinstance(shape, AttentionShape):
                all_tokens, times, again = replace(shape, chunk=None), 1, int(chunks > 1)
                earlier = replace(all_tokens, tokens=shape.tokens - shape.tokens // chunks)
            for run, count in each.unit.runs.items():
                found[AttentionRun(all_tokens, run)] += times * count / len(each.attention)
            if again:
                found[AttentionRun(earlier, "again")] += again
    return found


def _count_kept(layers: list[_Layers], chunks: int) -> tuple[int, int]:
    """Count the bytes that chunks keep: of keys, values, sums of their gradients and choices, and
    of the states of lightning layers.
    """
    kept = states = 0
    for each in layers:
        shapes = [shape for shape in each.attention if isinstance(shape, AttentionShape)]
        for shape in shapes:
            keys = shape.kept_tokens * each.unit.kept_of_token // len(shapes)
            kept += shape.batch * (keys + shape.choice_bytes)
        for other in each.attention:
            if isinstance(other, LightningShape) and other.chunked:
                states += other.count_kept(chunks)
    return kept, states


def _unit_tokens(config: TrainConfig) -> int:
    """Return the tokens of each row that a rank computes at once."""
    chunk = config.tokens_of_chunk
    tokens = config.seq_len if chunk is None else chunk_tokens(config.seq_len, chunk)
    return -(-tokens // config.sp_size)


def _find_layers(config: TrainConfig, model: CPMConfig, batch: int) -> list[_Layers]:
    """Return the row of units, with the loss at its end."""
    tokens, chunk = _unit_tokens(config), config.tokens_of_chunk
    sparse = model.infllm
    if sparse is not None and sparse.is_dense(config.seq_len):
        sparse = None
    if sparse is not None and chunk is not None:  # the whole sequence decides, not a chunk
        sparse = replace(sparse, dense_len=-1)
    model = replace(model, sparse=sparse)
    whole = replace(config.saving(), offload=None)
    shape = Shape(
        model,
        DTYPES[config.dtype],
        batch,
        offload=config.offload,
        chosen=choice_dtype(config.seq_len, sparse),
        is_alone=config.sp_size == 1,
        chunked=chunk is not None,
    )
    of_layers, mixers = model.layer_parameters, model.mixer_of_layers
    row, size = [], config.checkpointing_every or 1
    for first in range(0, model.num_layers, size):
        saving = whole if config.checkpointing_every else whole.for_block(first)
        group = range(model.num_layers)[first : first + size]
        of_group = replace(
            shape,
            layers=len(group),
            mixers=mixers[first : group.stop],
            saving=replace(saving, blocks=None),  # it applies to these blocks
            offload=config.offload and saving.checkpointing != "none",
        )
        unit = find_unit(of_group, tokens)
        if config.fp8:
            unit = _in_fp8(unit, of_group, tokens)
        shapes = [mixer_shape(config, model, batch, layer) for layer in group]
        row.append(_Layers(unit, shapes, sum(of_layers[first : group.stop])))
    loss = find_unit(replace(shape, layers=0, offload=False, chunked=False), tokens)
    return [*row, _Layers(loss, (), 0)]


def _in_fp8(unit: Unit, shape: Shape, tokens: int) -> Unit:
    """Return a unit of blocks that multiply in float8. Their small layers, which do not, hardly
    count. Compiled blocks also save the result of a norm, and the backward holds the gradients of
    gate and up in float8, once by rows and once by columns.
    """
    rows, model = shape.batch * tokens, shape.model
    recomputes = shape.saving.checkpointing != "none"
    kept = 0 if recomputes else shape.layers * rows * model.hidden_size * shape.dtype.itemsize
    casts = 4 * model.intermediate_size * min(rows, shape.saving.tile or rows)
    return replace(
        unit,
        saved=unit.saved + kept,
        forward=unit.forward + kept,
        backward=unit.backward + kept + casts,
        forward_work=unit.forward_work.in_fp8(),
        backward_work=unit.backward_work.in_fp8(),
    )


def mixer_shape(config: TrainConfig, model: CPMConfig, batch: int, layer: int) -> AnyShape:
    """Return the attention of a layer."""
    dtype, chunk = DTYPES[config.dtype], config.tokens_of_chunk
    if model.mixer_of_layers[layer] == LIGHTNING:
        tokens = config.seq_len if chunk is None else chunk_tokens(config.seq_len, chunk)
        sizes = tokens, model.num_heads, model.head_dim
        return LightningShape(batch, *sizes, dtype, config.sp_size, chunked=chunk is not None)
    return AttentionShape(
        batch=batch,
        tokens=config.seq_len,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_size=model.head_dim,
        dtype=dtype,
        ranks=config.sp_size,
        inner=config.ulysses_size or config.inner_size or config.sp_size,
        strategy=config.attention["strategy"],
        window=model.windows[layer],
        sparse=model.infllm,
        chunk=chunk,
    )


def _find_memory(
    config: TrainConfig,
    model: CPMConfig,
    gpus: int,
    sharding: Sharding,
    layers: list[_Layers],
    chunks: int,
) -> StepMemory:
    """Return the moment that needs most."""
    kept, states = _count_kept(layers, chunks)
    shard = -(-model.num_parameters // gpus)
    head = model.vocab_size * model.hidden_size
    outside = (1 if model.tie_embeddings else 2) * head + model.hidden_size  # of the blocks
    tables = 2 * _FP32 * (model.head_dim // 2) * _unit_tokens(config)
    constant = {
        "weights": sharding.weights * shard,
        "optimizer": sharding.optimizer * shard,
        "gradients": sharding.summed * shard,
        "rings": max(each.memory.held for each in layers),
    }
    running = {
        "activations": tables,
        "kept keys": kept,
        "kept states": states,
        "gathered weights": sharding.outside * outside,
    }
    # gradients outside the blocks are reduced last
    last = {
        "gathered weights": (sharding.head_gradient + sharding.reduced) * outside,
        "gradients": sharding.gradients * shard,
    }
    found = ("optimizer", last), *_find_moments(sharding, layers, gpus, head)
    moments = [(name, _add(constant, running, parts)) for name, parts in found]
    name, worst = max(moments, key=lambda moment: sum(moment[1].values()))
    parked = [nbytes for each in layers for nbytes in each.unit.parked]
    host = sum(map(_pinned_bytes, parked)) + sharding.host * shard
    return StepMemory(worst, host, int(sum(parked)), name)


def _add(*all_parts: Parts) -> dict[str, int]:
    return {part: int(sum(parts.get(part, 0) for parts in all_parts)) for part in PARTS}


def _pinned_bytes(nbytes: float) -> int:
    """Return a tensor's bytes on the host, where its last piece fills a power of two."""
    pieces, rest = divmod(int(nbytes), PIECE_BYTES)
    return pieces * PIECE_BYTES + (1 << (rest - 1).bit_length() if rest else 0)


def _find_moments(
    sharding: Sharding, layers: list[_Layers], gpus: int, head: int
) -> Iterator[tuple[str, Parts]]:
    """Yield the moments of forward and backward, without what a rank has for the whole step."""
    before = [0.0, *itertools.accumulate(each.unit.saved for each in layers)]
    kept = [sharding.kept * n for n in itertools.accumulate(each.parameters for each in layers)]
    *blocks, (loss, saved) = zip(layers, before, strict=False)
    yield (
        "loss",
        {
            "activations": saved,
            "loss": max(loss.forward, loss.backward),
            "gathered weights": sharding.head * head + kept[-1],
        },
    )
    for index, (each, saved) in enumerate(blocks):
        gathered = sharding.forward * each.parameters / len(each.attention)
        parts = {"activations": saved, "working memory": each.forward}
        yield "forward", {**parts, "gathered weights": gathered + kept[index]}
    # gradients outside the blocks are reduced at once, or stay whole until the end
    gradients = 0.0 if sharding.head_gradient else sharding.gradients * head / gpus
    for index, (each, saved) in reversed([*enumerate(blocks)]):
        count, of_block = len(each.attention), each.parameters / len(each.attention)
        gathered = sharding.backward * of_block + sharding.head_gradient * head
        if count > 1:  # a group of blocks also gathers one of them to recompute it
            gathered += sharding.forward * of_block
        if count > 1 or index + 1 < len(blocks):  # another block's gradients are reduced
            gathered += sharding.reduced * of_block
        # what the block before it parked returns meanwhile
        returning = sum(blocks[index - 1][0].unit.parked)
        yield (
            "backward",
            {
                "activations": saved + each.unit.saved,
                "working memory": each.backward - each.unit.saved + returning,
                "gathered weights": gathered + kept[index],
                "gradients": gradients,
            },
        )
        gradients += sharding.gradients * each.parameters / gpus
