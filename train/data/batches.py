"""The sequences that a rank reads, the masks of their documents, and the rank's part of each."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bmt_burst import Chunks, InfLLMV2, Layout, Mask, SequenceParallel
from models.config import CPMConfig
from train.base.wording import counted
from train.data.folder import Row
from train.data.mixture import Mixture
from train.data.skips import Skips
from train.data.source import Source, Stored

_LARGEST_DEFAULT = 8  # sequences


class Settings(Protocol):
    """The fields of TrainConfig by which sequences are dealt to ranks and cut."""

    @property
    def seq_len(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def micro_batch_size(self) -> int | None: ...
    @property
    def eval_sequences(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def tokens_of_chunk(self) -> int | None: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Work(ABC):
    """One micro-batch of any kind of model: B sequences, S tokens of each on this rank's device.

    labels   (B, S) int64, IGNORE_INDEX where there is no target
    work     for each rank that shares the sequences, the visible pairs of its queries: of one head,
             summed over all layers with attention
    sources  the number of each row's source in a mixture; None for other data
    """

    labels: Tensor
    work: tuple[int, ...]
    sources: tuple[int, ...] | None = None

    @property
    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Numbers of documents and the like, for the record of a step."""

    @abstractmethod
    def losses(self, model: nn.Module) -> tuple[Tensor, ...]:
        """Return a rank's sum of losses, its targets and, with `sources`, each row's sum, (B,)."""

    @property
    def part_count(self) -> int:
        """The number of parts that `losses_by_part` yields."""
        return 1

    def losses_by_part(self, model: nn.Module) -> Iterator[tuple[Tensor, ...]]:
        """Yield `losses` of parts that add up to the whole. Each must have its backward before the
        next is computed. Yield () after work without a loss, so that a watchdog hears of it. The
        last part has a loss.
        """
        yield self.losses(model)


SomeWork = TypeVar("SomeWork", bound=Work)


class Dealer(ABC, Generic[SomeWork]):
    """Deals whole sequences to data parallel groups. `skips` are ranges that are left out."""

    skips = Skips()

    def __init__(self, config: Settings, sp: SequenceParallel, device: torch.device):
        self.config, self.sp, self.device = config, sp, device
        self.dp_rank, self.dp_size = dist.get_rank() // sp.size, dist.get_world_size() // sp.size
        self.micro_batch_size = choose_micro_batch_size(config, self.dp_size)

    def of_step(self, data: Source, first: int, last: bool = False) -> list[SomeWork]:
        """Return the micro-batches of the step that starts at sample `first`. After the `last` one
        nothing is read ahead. The order does not depend on the number of groups.
        """
        size, share = self.micro_batch_size, self.config.batch_size // self.dp_size
        first += self.dp_rank * share
        return [
            self._of_samples(data, range(start, start + size))
            for start in range(first, first + share, size)
        ]

    def of_evaluation(self, data: Stored) -> Iterator[SomeWork]:
        """Yield micro-batches of evenly spaced sequences, as many on every rank."""
        count = min(self.config.eval_sequences, len(data))
        for chosen in self._deal([i * len(data) // count for i in range(count)]):
            yield self._read(data, chosen)

    def _deal(self, indices: Sequence[int]) -> Iterator[list[int | None]]:
        """Yield the sequences of this group's micro-batches. None fills up the last ones."""
        size = self.micro_batch_size
        chosen = [*indices, *[None] * (-len(indices) % (size * self.dp_size))]
        for start in range(self.dp_rank * size, len(chosen), size * self.dp_size):
            yield chosen[start : start + size]

    def _of_samples(self, data: Source, samples: Sequence[int]) -> SomeWork:
        sources, places = None, [self.skips.place(sample) for sample in samples]
        if isinstance(data, Mixture):
            sources = tuple(data.number_of(place) for place in places)
        return self._make(data, [data.of_sample(place) for place in places], sources)

    def _shard(self, wholes: Sequence[Tensor], layouts: Sequence[Layout]) -> Tensor:
        """Return this rank's part of each whole row (S,): (B, S_local)."""
        return torch.stack(
            [at.shard(x, self.sp.rank, 0) for x, at in zip(wholes, layouts, strict=True)]
        )

    def _count_pairs(self, seen: Tensor, layout: Layout) -> tuple[int, ...]:
        """Return the visible pairs of each rank, by the keys that each query sees, (S,)."""
        return tuple(int(layout.shard(seen, rank, 0).sum()) for rank in range(self.sp.size))

    @abstractmethod
    def _make(
        self, data: Any, rows: Sequence[Any], sources: tuple[int, ...] | None = None
    ) -> SomeWork:
        """Return a micro-batch of rows of `data`, with the numbers of their sources."""

    @abstractmethod
    def _read(self, data: Any, indices: Sequence[int | None]) -> SomeWork:
        """Return a micro-batch of these sequences. None stands for a sequence without targets."""

    def describe(self, data: Source) -> str:
        """Describe in a few words which tokens attend to each other."""
        return data.description


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Work):
    """One micro-batch of text.

    tokens     (B, S) int64
    positions  for the rotary embedding: (S,) int64, or (B, S) if positions restart in each document
    masks      a mask for all rows or for each; None if each token attends to all before it
    layouts    a layout for all rows or for each; None for the layout of `sp`
    documents  number of documents in all B sequences, also cut ones; 0 if they are not kept apart
    """

    tokens: Tensor
    positions: Tensor
    masks: Mask | tuple[Mask, ...] | None
    layouts: Layout | tuple[Layout, ...] | None
    documents: int
    chunks: Chunks | None = None

    @property
    def counts(self) -> dict[str, int]:
        return {"documents": self.documents} if self.documents else {}

    def losses(self, model: nn.Module) -> tuple[Tensor, ...]:
        by_row = self.sources is not None
        if self.chunks is None:
            return self._run(model, by_row=by_row)
        parts = [self._run_chunk(model, x, by_row=by_row) for x in self.chunks.forward(last=True)]
        return tuple(torch.stack(x).sum(0) for x in zip(*parts, strict=True))

    @property
    def part_count(self) -> int:
        # all chunks but the last are computed twice
        return 2 * len(self.chunks.chunks) - 1 if self.chunks else 1

    def losses_by_part(self, model: nn.Module) -> Iterator[tuple[Tensor, ...]]:
        if self.chunks is None:
            yield self.losses(model)
            return
        for chunk in self.chunks.forward():
            self._run_chunk(model, chunk)
            yield ()
        for chunk in self.chunks.backward():
            yield self._run_chunk(model, chunk, by_row=self.sources is not None)

    def score_tokens(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return each token's loss, 0 without a target, and the most likely next token: (B, S)."""
        if self.chunks is None:
            losses, best = self._run(model, by_token=True)
            return losses, best
        parts = [self._run_chunk(model, x, by_token=True) for x in self.chunks.forward(last=True)]
        losses, best = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return losses, best

    def _run(self, model: nn.Module, **how: bool) -> tuple[Tensor, ...]:
        inputs = self.tokens, self.positions, self.labels
        return model(*inputs, mask=self.masks, layout=self.layouts, **how)

    def _run_chunk(self, model: nn.Module, chunk: Any, **how: bool) -> tuple[Tensor, ...]:
        inputs = (x[..., chunk.span] for x in (self.tokens, self.positions, self.labels))
        return model(*inputs, cache=chunk, **how)


@dataclass(frozen=True)
class _RowPlan:
    mask: Mask
    layout: Layout
    work: tuple[int, ...]


class Batches(Dealer[MicroBatch]):
    """Micro-batches of this rank: whole sequences of its data parallel group, cut over its ranks.

    By default the layout is zigzag. If documents are kept apart or layers have windows, it balances
    the work, in full layers if there are any. Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self, config: Settings, model: CPMConfig, sp: SequenceParallel, device: torch.device
    ):
        super().__init__(config, sp, device)
        self._model = model
        self._windows = Counter(model.windows[layer] for layer in model.attention_layers)
        whole, balanced = Mask.causal(config.seq_len), config.layout == "auto" and model.window
        self._whole = self._plan_row(whole, bool(balanced), self._is_sparse([whole]))

    def describe(self, data: Source) -> str:
        model, seen = self._model, data.description
        if sparse := model.infllm:
            least = f" if a document has {sparse.dense_len:,} tokens"
            blocks = f"{sparse.most_blocks} blocks of {counted(sparse.block_size, 'token')}"
            seen += f", sparse attention to {blocks}{least if sparse.dense_len != -1 else ''}"
        if found := model.lightning_layers:
            seen += f", lightning attention in {found} of {counted(model.num_layers, 'layer')}"
        if model.window is None:
            return seen
        windowed, layers = model.windows.count(model.window), counted(model.num_layers, "layer")
        return f"{seen}, a window of {counted(model.window, 'token')} in {windowed} of {layers}"

    def of_rows(self, rows: Any) -> Iterator[tuple[list[int | None], MicroBatch]]:
        """Yield micro-batches of all `rows`, as many on every rank, with the rows' numbers.

        rows  Sequences, or others with `documents`, a length and read(index), also for None
        """
        for chosen in self._deal(range(len(rows))):
            yield chosen, self._read(rows, chosen)

    def _read(self, data: Any, indices: Sequence[int | None]) -> MicroBatch:
        return self._make(data, [data.read(index) for index in indices])

    def _make(
        self, data: Any, rows: Sequence[Row], sources: tuple[int, ...] | None = None
    ) -> MicroBatch:
        batch = self._of_documents(rows) if data.documents else self._of_whole(rows)
        return dataclasses.replace(batch, sources=sources)

    def _of_whole(self, rows: Sequence[Row]) -> MicroBatch:
        """Return a micro-batch of rows that are one text each. They share a mask and a layout."""
        plan, windowed = self._whole, any(self._windows)
        return MicroBatch(
            **self._shard_rows(rows, [plan] * len(rows)),
            positions=plan.layout.positions(self.sp.rank, self.device),
            masks=plan.mask if windowed else None,
            layouts=plan.layout if windowed else None,
            documents=0,
            chunks=self._cut(plan.mask),
        )

    def _of_documents(self, rows: Sequence[Row]) -> MicroBatch:
        masks = [Mask.documents(row.documents) for row in rows]
        balanced, is_sparse = self.config.layout == "auto", self._is_sparse(masks)
        plans = [self._plan_row(mask, balanced, is_sparse) for mask in masks]
        layouts = tuple(plan.layout for plan in plans)
        return MicroBatch(
            **self._shard_rows(rows, plans),
            positions=self._shard([mask.positions() for mask in masks], layouts).to(self.device),
            masks=tuple(masks),
            layouts=layouts,
            documents=sum(len(row.documents) - 1 for row in rows),
            chunks=self._cut(masks),
        )

    def _cut(self, masks: Mask | list[Mask]) -> Chunks | None:
        """Return the chunks of rows with these masks, if the run has chunks."""
        tokens, layers = self.config.tokens_of_chunk, self._model.num_layers
        if tokens is None:
            return None
        return Chunks(masks, tokens, layers, self.sp, layout=self._chunk_layout)

    @property
    def _chunk_layout(self) -> str:
        return "zigzag" if self.config.layout == "auto" else self.config.layout

    def _shard_rows(self, rows: Sequence[Row], plans: Sequence[_RowPlan]) -> dict[str, Any]:
        """Return this rank's tokens and labels of each row, and the work of all ranks."""
        layouts = [plan.layout for plan in plans]
        return {
            "tokens": self._shard([row.tokens for row in rows], layouts).to(self.device),
            "labels": self._shard([row.labels for row in rows], layouts).to(self.device),
            "work": tuple(map(sum, zip(*(plan.work for plan in plans), strict=True))),
        }

    def _is_sparse(self, masks: Iterable[Mask]) -> bool:
        """Whether calls of rows with these masks are sparse. The longest document decides."""
        sparse, infllm = self._model.sparse, self._model.infllm
        slices = (s for mask in masks for s in mask.slices)
        longest = max((stop - start for (start, stop) in (s.kv for s in slices)), default=0)
        is_dense = infllm is not None and infllm.is_dense(longest)
        return sparse is not None and not is_dense

    def _plan_row(self, mask: Mask, balanced: bool, is_sparse: bool) -> _RowPlan:
        in_layers = {
            window: mask if window is None else mask.windowed(window) for window in self._windows
        }
        chunk = self.config.tokens_of_chunk
        if chunk is None:
            layout = self.sp.layout_of(mask.seq_len)
        else:
            cut = mask.seq_len, self.sp.size, chunk
            layout, balanced = Layout.chunks(*cut, self._chunk_layout), False
        sparse = self._model.infllm if is_sparse else None
        if balanced and self.sp.size > 1:
            # full layers first
            full = in_layers[min(in_layers, key=bool)] if in_layers else mask
            extension = self._model.sparse if is_sparse else None
            layout = Layout.balanced(extension.work_mask(full) if extension else full, self.sp.size)
        seen = [
            count * (sparse_keys(mask, sparse) if sparse else keys_seen(in_layers[window]))
            for window, count in self._windows.items()
        ]
        pairs = sum(seen, torch.zeros(mask.seq_len, dtype=torch.int64))
        return _RowPlan(mask, layout, self._count_pairs(pairs, layout))


def sparse_keys(mask: Mask, sparse: InfLLMV2) -> Tensor:
    """Return the keys that each query of causal documents attends to in a sparse call, and the cost
    of the choice in keys: (seq_len,) int64.

    A query attends to the tokens at or before it in its `most_blocks` blocks, or in all visible
    blocks if they are fewer. If they are more, it chooses: it multiplies with each visible
    compressed key, in the forward only. That is a sixth of the operations of a key (`step_flops`),
    rounded down. A token in no document attends to nothing.
    """
    places, size, stride = keys_seen(mask) - 1, sparse.kernel_size, sparse.kernel_stride
    own = places // sparse.block_size
    blocks = own.clamp_max(sparse.most_blocks - 1)
    attended = blocks * sparse.block_size + places % sparse.block_size + 1
    compressed = sum(
        ((places + 1 - tokens) // step + 1).clamp_min(0)
        for tokens, step in ((size, stride), (4 * size, 4 * stride))
    )
    return attended + torch.where(own >= sparse.most_blocks, compressed // 6, 0)


def keys_seen(mask: Mask) -> Tensor:
    """Return the number of keys that each query sees: (seq_len,) int64. The sum is `mask.area`.

    In a slice, query i sees the keys between i - high + 1 and i - low + 1, both clamped to the
    slice's keys. Each clamped place is a line of slope 0, 1 and 0 again. Sums over the changes of
    values and slopes take the time of the tokens alone, however many slices there are.
    """
    far = mask.seq_len + mask.kv_len  # more than any distance: the bound of a slice without one
    rows = [
        (*s.q, *s.kv, -far if s.low is None else s.low, far if s.high is None else s.high)
        for s in mask.slices
    ]
    jumps, bends = torch.zeros(2, mask.seq_len + 1, dtype=torch.int64)
    if rows:
        first, stop, kv_start, kv_stop, low, high = torch.tensor(rows).unbind(1)
        last, one = stop - 1, torch.ones_like(first)
        for sign, bound in ((1, low), (-1, high)):
            before = bound.clamp(-far, far) - 1  # a key's place is i - before
            at_first, at_last = (torch.clamp(i - before, kv_start, kv_stop) for i in (first, last))
            rises, stays = (torch.clamp(key + before, first, last) for key in (kv_start, kv_stop))
            jumps.index_add_(0, first, at_first, alpha=sign)
            jumps.index_add_(0, stop, at_last, alpha=-sign)
            bends.index_add_(0, rises + 1, one, alpha=sign)
            bends.index_add_(0, stays + 1, one, alpha=-sign)
    return (jumps + bends.cumsum(0)).cumsum(0)[:-1]


def choose_micro_batch_size(config: Settings, dp_size: int) -> int:
    """Return the configured size, or the largest default that divides a group's share."""
    share, rest = divmod(config.batch_size, dp_size)
    size = config.micro_batch_size
    if rest:
        fitting = [n for n in (config.batch_size - rest, config.batch_size - rest + dp_size) if n]
        raise ValueError(
            f"--batch-size {config.batch_size} is not a multiple of "
            f"{counted(dp_size, 'data parallel group')}: "
            f"give --batch-size {' or '.join(map(str, fitting))}"
        )
    if size and share % size:
        raise ValueError(
            f"--batch-size {config.batch_size} is not a multiple of --micro-batch-size {size} "
            f"times {counted(dp_size, 'data parallel group')}: leave out --micro-batch-size, or "
            f"give one that divides {share}"
        )
    return size or max(n for n in range(1, _LARGEST_DEFAULT + 1) if share % n == 0)
