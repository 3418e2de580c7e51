"""Compilation of the kernels of a run before its first step.

Other processes take short steps of a model with the run's kinds of layers, with masks of all kinds.
They launch nothing, and their peers are imagined. `bmt_burst.ahead` compiles the kernels that these
steps need. All of this ends before the run builds its model.
"""

from __future__ import annotations

import itertools
import math
import os
import time
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
from train.base.wording import counted
from train.data.batches import Batches
from train.data.folder import Row
from train.data.mixture import parts
from train.data.source import Source, Stored
from train.engine.adamw import Update
from train.loop.inputs import Inputs
from train.run.distributed import choose_engine
from train.run.watchdog import Watchdog
from train.settings.config import TrainConfig
from train.settings.settings import DTYPES

UPDATES = "train.engine.triton_adamw"
_MODULES = UPDATES, "train.planning.warming", "train.data.batches", "models"  # kernels depend on
_NOT_COMPILED = "kernels will be compiled in the steps that first need them"
_MOST_SECONDS = 120.0
_SAMPLED_ROWS = 16  # of a source, whose documents are counted
_MANY_DOCUMENTS = 64  # of the rows of a rank, from which on a call may have hundreds of sequences
_FEW_TOKENS = 1 << 13  # of a rank, for which "auto" may take one-call as well as the ring
_CHUNKS = 3  # of a sequence of the rehearsal, at most


@dataclass(frozen=True)
class Rehearsal:
    """The facts of a run that its kernels depend on.

    attention       options of burst_attn_func
    layout          of TrainConfig, so it may be "auto"
    rows            the sequences that a rank computes at once
    inner           the ranks of a host, or of a group that shares heads
    many_documents  whether a call may have hundreds of documents, None if they are not kept apart
    chunks          the chunks in which a sequence is computed, 1 if it is computed as a whole
    """

    model: CPMConfig
    attention: dict[str, Any]
    dtype: torch.dtype
    layout: str
    seq_len: int
    rows: int
    size: int
    inner: int
    many_documents: bool | None
    chunks: int
    engine: str

    @property
    def longest(self) -> int:
        """The tokens of a document in which queries choose blocks. 0 without sparse attention."""
        sparse = self.model.infllm
        return sparse.exact_tokens + sparse.block_size if sparse else 0

    @property
    def small(self) -> CPMConfig:
        """A model with one layer of each kind. Attention is sparse from the shortest document on in
        which queries choose blocks, and the whole sequence decides for its chunks.
        """
        sparse = self.model.sparse
        if found := self.model.infllm:
            dense_len = min(found.dense_len, self.longest) if self.chunks == 1 else -1
            sparse = replace(found, dense_len=dense_len)
        facts: dict[str, Any] = {"vocab_size": 64, "intermediate_size": 64, "rope_scaling": None}
        model = self.model.one_layer_of_each_kind()
        return replace(model, sparse=sparse, family=None, **facts)

    def arguments(self) -> list[tuple[Any, ...]]:
        """Return the arguments of `take_steps`: some ranks with each strategy, and the sides that
        they may send.
        """
        tokens = -(-self.seq_len // (self.size * self.chunks))
        tokens *= 1 if self.many_documents is None else self.rows
        strategies = [self.attention["strategy"]]
        if strategies == ["auto"]:
            is_short = 1 < self.size == self.inner and tokens <= _FEW_TOKENS
            strategies = ["ring", "one-call"][: 1 + is_short]
        # a run with more chunks may send the other side
        both = self.size > 1 < self.chunks and self.model.infllm is None
        sample = sorted({0, 1 % self.size, self.size // 2, self.size - 1})
        sides = ["q", "kv"] if both else [None]
        return [(self, *each) for each in itertools.product(sample, strategies, sides)]

    def examples(self) -> list[list[int]]:
        """Return the ends of documents of sequences."""
        sparse, apart = self.model.infllm, self.many_documents is not None
        found = ahead.sample_documents(
            self.seq_len,
            self.size,
            chunks=min(self.chunks, _CHUNKS),
            bands=(self.model.window or 0, sparse.window_size if sparse else 0),
            longest=self.longest,
            many=bool(self.many_documents),
        )
        return found if apart else found[:1]


@dataclass
class _Examples:
    """Rows of data with the `ends` of documents, as Batches read them."""

    documents: bool
    ends: list[list[int]]

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, index: int | None) -> Row:
        zeros = torch.zeros(self.ends[0][-1], dtype=torch.int64)
        return Row(zeros, zeros, tuple(self.ends[index or 0]))


def take_steps(run: Rehearsal, rank: int, strategy: str, side: str | None) -> None:
    """Take steps of all kinds, as this rank of a sequence."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = _Examples(run.many_documents is not None, run.examples())
    tokens = data.ends[0][-1]
    sp = ahead.imagine_ranks(rank, run.size, run.inner, side)
    if run.layout != "auto":
        sp = sp.with_layout(run.layout)
    # not within `device`: torch looks for its own torch.empty there, which is replaced meanwhile
    model = CPM(run.small, sp, **run.attention | {"strategy": strategy}).to(device, run.dtype)
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
                for part in batch.losses_by_part(model):
                    if part:
                        part[0].backward()
        with torch.no_grad():  # an evaluation
            batch.losses(model)
    finally:
        dist.destroy_process_group()
    _update_weights(run, device)


def _update_weights(run: Rehearsal, device: torch.device) -> None:
    from train.engine import triton_adamw

    master = torch.empty(16, device=device)
    weight = master.to(run.dtype) if run.engine == "bmtrain" else None
    numbers = Update(1e-3, 1, 1.0, (0.9, 0.95), 1e-8, 0.1)
    # sums over micro-batches are fp32
    for gradient in (master,) if weight is None else (weight, master):
        triton_adamw.update(master, master, master, gradient, weight, numbers)


def warm(
    config: TrainConfig,
    inputs: Inputs,
    sp: SequenceParallel,
    rows: int,
    device: torch.device,
    watchdog: Watchdog,
) -> list[str]:
    """Compile the kernels that a run on GPUs will need, unless they are on disk. Return lines for
    the log. `rows` are the sequences that a rank computes at once. Models with biases are left out.

    Every rank must call it. One rank of each host starts processes.
    """
    if device.type != "cuda" or not isinstance(inputs.model, CPMConfig):
        return []
    ahead.settle_keys(*_MODULES)
    line, failed = "", False
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        try:
            line = _compile(find_facts(config, inputs, sp, rows, device), watchdog)
        except Exception as error:  # noqa: BLE001 - of any process, after which the run goes on
            line, failed = f"{_NOT_COMPILED}: {error}", True
    outcomes = ranks.gather((line, failed))
    return list(dict.fromkeys(text for n, (text, failed) in enumerate(outcomes) if failed or not n))


def _compile(run: Rehearsal, watchdog: Watchdog) -> str:
    """Compile the kernels of a run. Return a line for the log."""
    gpus, began = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), time.monotonic()
    arguments = run.arguments(), run.seq_len, gpus, _MODULES
    reports = 0
    watchdog.alive("compiling kernels")
    for count in ahead.compile_kernels(take_steps, *arguments):
        reports += 1
        watchdog.alive("compiling kernels")
        # the other ranks wait without a sign of life
        if (seconds := time.monotonic() - began) > min(_MOST_SECONDS, watchdog.timeout / 2):
            raise TimeoutError(f"{counted(count, 'kernel')} took more than {seconds:.0f} s")
    places = " and ".join(map(str, ahead.find_folders()))
    if reports == 1:
        return f"found {counted(count, 'compiled kernel')} in {places}"
    return f"compiled {counted(count, 'kernel')} in {seconds:.1f} s; kept in {places}"


def find_facts(
    config: TrainConfig, inputs: Inputs, sp: SequenceParallel, rows: int, device: torch.device
) -> Rehearsal:
    """Return the facts of a run that its kernels depend on."""
    data, chunk = inputs.training, config.tokens_of_chunk
    assert isinstance(inputs.model, CPMConfig), "others are left out"
    many = rows * _count_documents(data) >= _MANY_DOCUMENTS if data.documents else None
    return Rehearsal(
        model=inputs.model,
        attention=config.attention,
        dtype=DTYPES[config.dtype],
        layout=config.layout,
        seq_len=config.seq_len,
        rows=rows,
        size=sp.size,
        inner=sp.rings.inner.size,
        many_documents=many,
        chunks=1 if chunk is None else -(-config.seq_len // chunk),
        engine=choose_engine(config, device),
    )


def _count_documents(data: Source) -> float:
    """Return the most documents of some rows, or inf if rows cannot be read in any order."""
    found = [1.0]
    for source in parts(data).values():
        if not isinstance(source, Stored):
            return math.inf
        count = min(_SAMPLED_ROWS, len(source))
        rows = (source.read(i * len(source) // _SAMPLED_ROWS) for i in range(count))
        found += [len(row.documents) - 1 for row in rows]
    return max(found)
