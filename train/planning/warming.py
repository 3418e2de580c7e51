"""Compilation of the kernels of a run before its first step.

Other processes take short steps of a model with the run's kinds of layers, with masks of all kinds.
They launch nothing, and their peers are imagined. `bmt_burst.ahead` compiles what these steps need.
"""

from __future__ import annotations

import importlib
import itertools
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bmt_burst import SequenceParallel, ahead
from bmt_burst.nn import BurstAttention
from models.config import CPMConfig
from models.cpm import CPM
from train.base import ranks
from train.data.batches import Batches
from train.data.folder import Row
from train.engine.adamw import Update
from train.loop.inputs import Inputs
from train.run.watchdog import Watchdog
from train.settings.config import TrainConfig
from train.settings.settings import DTYPES

UPDATES = "train.engine.triton_adamw"
MODULES = UPDATES, "train.planning.warming", "train.data.batches", "models"  # kernels depend on
_MOST_SECONDS = 120.0
_CHUNKS = 3  # of a sequence of the rehearsal, at most


@dataclass(frozen=True)
class Rehearsal:
    """The facts of a run that its kernels depend on.

    attention  options of burst_attn_func
    layout     of TrainConfig, so it may be "auto"
    rows       the sequences that a rank computes at once
    inner      the ranks of a host, or of a group that shares heads
    documents  whether they are kept apart
    chunks     the chunks in which a sequence is computed, 1 if it is computed as a whole
    """

    model: CPMConfig
    attention: dict[str, Any]
    dtype: torch.dtype
    layout: str
    seq_len: int
    rows: int
    size: int
    inner: int
    documents: bool
    chunks: int

    @property
    def small(self) -> CPMConfig:
        """A model with one layer of each kind. Attention is sparse from the shortest document on in
        which queries choose blocks, and the whole sequence decides for its chunks.
        """
        sparse = self.model.sparse
        if found := self.model.infllm:
            dense_len = min(found.dense_len, found.shortest_document) if self.chunks == 1 else -1
            sparse = replace(found, dense_len=dense_len)
        model = replace(self.model.one_layer_of_each_kind(), sparse=sparse, family=None)
        return replace(model, vocab_size=64, intermediate_size=64, rope_scaling=None)

    def arguments(self) -> list[tuple[Any, ...]]:
        """Return the arguments of `take_steps`: strategies, some ranks, and what they send."""
        strategies = [self.attention["strategy"]]
        if strategies == ["auto"]:
            # of documents, one-call needs no other kernels than the ring
            is_other = 1 < self.size == self.inner and not self.documents
            strategies = ["ring", "one-call"][: 1 + is_other]
        runs = [replace(self, attention=self.attention | {"strategy": x}) for x in strategies]
        # a run with more chunks may send the other side
        both = self.size > 1 < self.chunks and self.model.infllm is None
        sample = sorted({0, 1 % self.size, self.size // 2, self.size - 1})
        return [*itertools.product(runs, sample, ["q", "kv"] if both else [None])]

    def examples(self) -> list[list[int]]:
        """Return the ends of documents of sequences."""
        found = ahead.sample_documents(
            self.seq_len,
            self.size,
            chunks=min(self.chunks, _CHUNKS),
            window=self.model.window,
            sparse=self.model.infllm,
        )
        return found if self.documents else found[:1]


class _Examples(list[list[int]]):
    """The ends of documents of sequences, which Batches reads as rows of data."""

    documents = True

    def read(self, index: int | None) -> Row:
        zeros = torch.zeros(self[0][-1], dtype=torch.int64)
        return Row(zeros, zeros, tuple(self[index or 0]))


def take_steps(run: Rehearsal, rank: int, side: str | None) -> None:
    """Take steps of all kinds, as this rank of a sequence."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = _Examples(run.examples())
    data.documents, tokens = run.documents, data[0][-1]
    sp = ahead.imagine_ranks(rank, run.size, run.inner, side)
    if run.layout != "auto":
        sp = sp.with_layout(run.layout)
    # not within `device`: torch looks for its own torch.empty there, which is replaced meanwhile
    model = CPM(run.small, sp, **run.attention).to(device, run.dtype)
    for mixer in (block.self_attn for block in model.layers):
        if isinstance(mixer, BurstAttention):  # as many stages and passes as in the run
            count = mixer.kind.group_bytes * tokens // run.seq_len
            mixer.kind = replace(mixer.kind, group_bytes=max(count, 1))
    chunk = tokens // min(run.chunks, _CHUNKS) if run.chunks > 1 else None
    settings = SimpleNamespace(seq_len=tokens, layout=run.layout, tokens_of_chunk=chunk)
    dist.init_process_group("fake", rank=rank, world_size=run.size, store=FakeStore())
    try:
        for rows in {min(run.rows, 2), 1} if data.documents else {min(run.rows, 2)}:
            settings.batch_size = settings.micro_batch_size = rows
            batches: Any = Batches(settings, run.small, sp, device)
            for _, batch in batches.of_rows(data):
                for losses in batch.losses_by_part(model):
                    if losses:
                        losses[0].backward()
        with torch.no_grad():  # an evaluation
            batch.losses(model)
    finally:
        dist.destroy_process_group()
    update = importlib.import_module(UPDATES).update
    master = torch.empty(16, device=device)
    half, numbers = master.to(run.dtype), Update(1e-3, 1, 1.0, (0.9, 0.95), 1e-8, 0.1)
    # sums over micro-batches are fp32
    for gradient, weight in ((master, None), (half, half), (master, half)):
        update(master, master, master, gradient, weight, numbers)


def warm(
    config: TrainConfig,
    inputs: Inputs,
    sp: SequenceParallel,
    rows: int,
    device: torch.device,
    watchdog: Watchdog,
    compiler: ahead.Compiler | None = None,
) -> list[str]:
    """Compile the kernels that a run on GPUs will need, unless they are on disk. Return lines for
    the log. `rows` are the sequences that a rank computes at once. Models with biases are left out.

    Every rank must call it. One rank of each host compiles, with `compiler` if it was started.
    """
    if device.type != "cuda" or not isinstance(inputs.model, CPMConfig):
        return []
    ahead.settle_keys(*MODULES)
    line, failed = "", False
    if device.index == 0:
        run, gpus = find_facts(config, inputs, sp, rows), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        limit = min(_MOST_SECONDS, watchdog.timeout / 2)  # others wait without a sign of life
        arguments = run.arguments(), run.seq_len, gpus, MODULES, limit, compiler
        try:
            for progress in ahead.compile_kernels(take_steps, *arguments):
                watchdog.alive("compiling kernels")
                line = str(progress)
        except Exception as error:  # noqa: BLE001 - of any process, after which the run goes on
            line = f"kernels will be compiled in the steps that first need them: {error}"
            failed = True
    outcomes = ranks.gather((line, failed))
    return list(dict.fromkeys(text for n, (text, failed) in enumerate(outcomes) if failed or not n))


def find_facts(config: TrainConfig, inputs: Inputs, sp: SequenceParallel, rows: int) -> Rehearsal:
    """Return the facts of a run that its kernels depend on."""
    chunk = config.tokens_of_chunk
    assert isinstance(inputs.model, CPMConfig), "others are left out"
    return Rehearsal(
        model=inputs.model,
        attention=config.attention,
        dtype=DTYPES[config.dtype],
        layout=config.layout,
        seq_len=config.seq_len,
        rows=rows,
        size=sp.size,
        inner=sp.rings.inner.size,
        documents=inputs.training.documents,
        chunks=1 if chunk is None else -(-config.seq_len // chunk),
    )
