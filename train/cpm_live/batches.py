"""The rows of CPM-Live's data that a rank reads ahead in a thread, and its part of each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bmt_burst import IGNORE_INDEX, Layout, Scores, SequenceParallel
from bmt_burst.bias.extension import stack_scores
from models.cpm_bee import check_subs
from models.cpm_live.config import BeeConfig, LiveConfig
from train.cpm_live.instances import MOST_SUBS
from train.cpm_live.rows import PackedRows, Row
from train.data.batches import Dealer, Settings, Work, keys_seen
from train.data.source import Source

Extended = tuple[Tensor, Tensor]  # tokens and sub-ids, (N,) int64


@dataclass(frozen=True, kw_only=True)
class LiveMicroBatch(Work):
    """One micro-batch of instances.

    inputs     arguments of the model's forward that precede `scores`
    scores     scores of the whole rows
    layouts    layouts of the rows on the ranks
    instances  number of instances in all B rows
    targets    number of targets on all ranks that share the rows
    """

    inputs: tuple[Tensor, ...]
    scores: tuple[Scores, ...]
    layouts: tuple[Layout, ...]
    instances: int
    targets: int

    @property
    def counts(self) -> dict[str, int]:
        return {"instances": self.instances, "targets": self.targets}

    def losses(self, model: nn.Module) -> tuple[Tensor, ...]:
        by_row = self.sources is not None
        return model(*self.inputs, self.scores, self.labels, self.layouts, by_row=by_row)

    def to(self, device: torch.device) -> LiveMicroBatch:
        inputs = tuple(x.to(device) for x in self.inputs)
        return replace(self, inputs=inputs, labels=self.labels.to(device))


class LiveBatches(Dealer[LiveMicroBatch]):
    """Micro-batches of this rank: whole rows of its data parallel group, cut over its ranks.

    By default each row is cut for equal work. A step's are made while the one before is computed.
    """

    def __init__(
        self, config: Settings, model: LiveConfig, sp: SequenceParallel, device: torch.device
    ):
        super().__init__(config, sp, device)
        sp.layout_of(config.seq_len)  # raises ValueError if it is too short
        self._model = model
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._ahead: dict[int, Future] = {}  # by the first sample of the step

    def of_step(self, data: Source, first: int, last: bool = False) -> list[LiveMicroBatch]:
        made = self._ahead.pop(first, None) or self._reader.submit(super().of_step, data, first)
        found = made.result()
        following = first + self.config.batch_size
        if not last:
            self._ahead = {following: self._reader.submit(super().of_step, data, following)}
        return [batch.to(self.device) for batch in found]

    def _read(self, data: PackedRows, indices: Sequence[int | None]) -> LiveMicroBatch:
        return self._make(
            data, [_blank_row(data.read(0)) if i is None else data.read(i) for i in indices]
        ).to(self.device)

    def _make(
        self, data: Source | None, rows: Sequence[Row], sources: tuple[int, ...] | None = None
    ) -> LiveMicroBatch:
        layouts = [self.sp.layout_of(row.scores.seq_len) for row in rows]
        if self.config.layout == "auto" and self.sp.size > 1:
            layouts = [Layout.balanced(row.scores.mask, self.sp.size) for row in rows]
        inputs, labels = self._inputs(rows, layouts)
        seen = [keys_seen(row.scores.mask) * self._model.num_attentions for row in rows]
        counts = zip(*map(self._count_pairs, seen, layouts), strict=True)
        scores = tuple(row.scores for row in rows)
        # attention reads the plan of the rows' scores, as one sequence
        whole = scores[0] if len(set(scores)) == 1 else stack_scores(scores)
        assert whole.terms is not None and whole.digest
        return LiveMicroBatch(
            inputs=inputs,
            labels=self._shard(labels, layouts),
            scores=scores,
            layouts=tuple(layouts),
            instances=sum(row.instances for row in rows),
            targets=sum(int((row != IGNORE_INDEX).sum()) for row in labels),
            work=tuple(map(sum, counts)),
            sources=sources,
        )

    @abstractmethod
    def _inputs(
        self, rows: Sequence[Row], layouts: Sequence[Layout]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the model's arguments before `scores`, and the labels of each row, (S,) int64."""

    def _shard_fields(
        self, rows: Sequence[Row], layouts: Sequence[Layout], *names: str
    ) -> list[Tensor]:
        return [self._shard([row.fields[name].long() for row in rows], layouts) for name in names]


class BeeBatches(LiveBatches):
    """Micro-batches of a Bee. Its losses depend on their size: all rows share an extended table."""

    _model: BeeConfig

    def _inputs(
        self, rows: Sequence[Row], layouts: Sequence[Layout]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        mine = self._shard_fields(rows, layouts, "input", "input_sub")
        extended = extended_table(rows)
        check_subs(self._model, extended[1])
        return (*mine, *extended), [
            row_labels(row, extended, self._model.vocab_size) for row in rows
        ]


class AntBatches(LiveBatches):
    def _inputs(
        self, rows: Sequence[Row], layouts: Sequence[Layout]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        mine = self._shard_fields(rows, layouts, "input", "segment")
        positions = torch.stack([layout.positions(self.sp.rank) for layout in layouts])
        return (*mine, positions), [row.targets for row in rows]


def extended_table(rows: Sequence[Row]) -> Extended:
    """Return rows' tokens with a sub-id above 0, rising, or (0, 1) if there are none."""
    tokens, subs = (
        torch.cat([row.fields[name] for row in rows]).long() for name in ("input", "input_sub")
    )
    pairs = (tokens * MOST_SUBS + subs)[subs > 0].unique()
    pairs = pairs if len(pairs) else torch.tensor([1])
    return pairs // MOST_SUBS, pairs % MOST_SUBS


def row_labels(row: Row, extended: Extended, vocab_size: int) -> Tensor:
    """Return the targets of a row: (S,) int64. A target with a sub-id above 0 is its place in the
    extended table, after the vocabulary.
    """
    table = extended[0] * MOST_SUBS + extended[1]
    places = torch.searchsorted(table, row.targets * MOST_SUBS + row.target_subs)
    return torch.where(row.target_subs > 0, vocab_size + places, row.targets)


def _blank_row(row: Row) -> Row:
    """Return a row without targets, and without sub-ids, which would extend the table."""
    return replace(
        row,
        targets=torch.full_like(row.targets, IGNORE_INDEX),
        target_subs=row.target_subs * 0,
        fields={name: x * 0 if name == "input_sub" else x for name, x in row.fields.items()},
        instances=0,
    )
