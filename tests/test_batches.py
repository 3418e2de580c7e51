"""The sequences that a rank reads: every sample once on any mesh."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bmt_burst import InfLLMV2, Mask, SequenceParallel, simulate
from models.config import CPMConfig
from tests.test_model import SMALL, initialized
from tests.test_sparse import SMALL as SPARSE
from train.data.batches import Batches, keys_seen, sparse_keys
from train.data.folder import Row, Sequences
from train.loop.measure import measure_losses
from train.settings.config import TrainConfig


class Tokens:
    """A token file in memory."""

    def __init__(self, count: int):
        self.folder, self.instances, self.index = "memory", None, {"vocab_size": count}
        self.tokens = np.arange(count, dtype=np.uint16)


def batches(
    monkeypatch, rank: int, world: int, sp_size: int, model: CPMConfig = SMALL, **options
) -> Batches:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    config = TrainConfig(**{"seq_len": 16} | options)
    layout = "zigzag" if config.layout == "auto" else config.layout
    sp = SequenceParallel(rank % sp_size, sp_size, layout)
    return Batches(config, model, sp, torch.device("cpu"))


@pytest.mark.parametrize(
    ("world", "sp_size", "options", "size"),
    [
        (4, 2, {}, 4),
        (3, 1, {"batch_size": 9}, 3),
        (2, 1, {"batch_size": 44}, 2),
        (2, 2, {"batch_size": 64}, 8),
        (2, 1, {"batch_size": 8, "micro_batch_size": 2}, 2),
    ],
)
def test_every_group_reads_its_share_in_micro_batches_that_fit(
    monkeypatch, world, sp_size, options, size
):
    data = Sequences(Tokens(16 * 100 + 1), 16, seed=0)
    count = options.get("batch_size", 8)
    read = []
    for group in range(world // sp_size):
        of_group = batches(monkeypatch, group * sp_size, world, sp_size, **options)
        assert of_group.micro_batch_size == size
        for batch in of_group.of_step(data, first=count):
            assert batch.tokens.shape == batch.labels.shape == (size, 16 // sp_size)
            assert (batch.masks, batch.layouts, batch.documents) == (None, None, 0)
            read += (batch.tokens[:, 0] // 16).tolist()
    assert read == [data.order(sample) for sample in range(count, 2 * count)]


def validation_losses(monkeypatch, world: int, sp_size: int) -> list[float]:
    """Return the validation loss of five sequences on each rank."""
    data = Sequences(Tokens(16 * 18 + 1), 16, seed=0)
    sizes = {"micro_batch_size": 1, "batch_size": 6, "eval_sequences": 5}
    dealt = [batches(monkeypatch, rank, world, sp_size, **sizes) for rank in range(world)]
    sums, everyone = [None] * world, threading.Barrier(world)

    def work(ring):
        def sum_over_ranks(values):
            sums[ring.rank] = values
            everyone.wait()
            return [sum(each) for each in zip(*sums, strict=True)]

        first = ring.rank // sp_size * sp_size
        group = ring.subring(range(first, first + sp_size))
        sp = SequenceParallel(ring.rank - first, sp_size, process_group=group)
        engine = SimpleNamespace(model=initialized(SMALL, sp=sp), sum=sum_over_ranks)
        return measure_losses({"": data}, dealt[ring.rank], engine, lambda: None)[0]["val_loss"]

    return simulate(world, work)


def test_validation_losses_do_not_depend_on_the_ranks(monkeypatch):
    """In fp32. Five sequences do not divide, so groups have rows without targets."""
    [alone] = validation_losses(monkeypatch, 1, 1)
    assert validation_losses(monkeypatch, 6, 3) == [pytest.approx(alone, rel=1e-6)] * 6


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(monkeypatch):
    for world, options, message in (
        (3, {}, "--batch-size 8 .* 3 data parallel groups: give --batch-size 6 or 9"),
        (16, {}, "--batch-size 8 .* 16 data parallel groups: give --batch-size 16"),
        (1, {"micro_batch_size": 3}, "not .* --micro-batch-size 3 times 1 data parallel group"),
        (2, {"micro_batch_size": 8}, "8 times 2 data parallel groups: .* that divides 4"),
    ):
        with pytest.raises(ValueError, match=message):
            batches(monkeypatch, 0, world, 1, **options)
    for layout in ("auto", "contiguous"):
        with pytest.raises(ValueError, match="too short for 32 ranks"):
            batches(monkeypatch, 0, 32, 32, layout=layout)


def test_the_longest_document_of_a_micro_batch_decides_whether_its_calls_are_sparse(monkeypatch):
    """One row's document is long enough. Alone, the other row's work is that of a dense call."""
    sparse = dataclasses.replace(SPARSE, dense_len=50)
    model = dataclasses.replace(SMALL, sparse=sparse)
    of_rank = batches(monkeypatch, 0, 1, 1, model=model, seq_len=64)
    tokens = torch.zeros(64, dtype=torch.int64)
    short, long = (Row(tokens, tokens, documents) for documents in ((0, 40, 64), (0, 64)))
    works = {}
    for name, rows in (("short", [short]), ("long", [long]), ("both", [short, long])):
        [works[name]] = of_rank._of_documents(rows).work
    chosen, dense = (
        int(keys(Mask.documents(short.documents)).sum()) * SMALL.num_layers
        for keys in (lambda mask: sparse_keys(mask, sparse), keys_seen)
    )
    assert chosen < dense == works["short"]
    assert works["both"] == works["long"] + chosen


def test_ranks_share_the_work_of_sparse_layers(monkeypatch):
    """Balanced for dense layers, one rank would have 8 % too much. The layout counts far keys twice
    because their kernels take twice as long, and `work` counts them once.
    """
    model = dataclasses.replace(SMALL, sparse=InfLLMV2())
    of_rank = batches(monkeypatch, 0, 2, 2, model=model, seq_len=1 << 15)
    tokens = torch.zeros(1 << 15, dtype=torch.int64)
    work = of_rank._of_documents([Row(tokens, tokens, (0, 20000, 24000, 1 << 15))]).work
    assert max(work) < 1.03 * sum(work) / 2
