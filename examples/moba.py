"""MoBA as an extension: each query attends to its own block and to the blocks that score highest.

    python examples/moba.py

This is an example of an extension, and not part of the library. For a query q of a document and an
earlier block b of `block_size` keys (arXiv 2502.13189):

    score_b = q . mean(keys of b)

Each query head attends to the keys up to the query in its own block, and to the `topk` earlier
blocks with the highest scores. No gradient flows through the choice. `MoBA` says what is near (the
own blocks, as a mask) and makes a plan that chooses. The library sends keys and values, computes
both parts forward and backward, and merges them. `MobaMemory` chooses for new tokens of a cache.

The script trains a small CPM on two ranks, whole and in chunks, and continues a text.

Letters: B batch, S tokens of a rank, F of them that choose, H query heads, G kv heads, D head size,
n blocks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from bmt_burst import Cache, Chunks, Mask, SequenceParallel, Slice, simulate
from bmt_burst.base.dtypes import accumulator_dtype
from bmt_burst.blocks.documents import documents, find_low
from bmt_burst.blocks.extension import BlockChoice
from bmt_burst.blocks.memory import BlockMemory
from bmt_burst.blocks.plan import BlockPlan
from bmt_burst.extensions import read_extension, register_extension
from bmt_burst.loss import IGNORE_INDEX
from bmt_burst.sequence.span import Span, length, overlap, shifted


def choose_blocks(q: Tensor, means: Tensor, first: Tensor, own: Tensor, topk: int) -> Tensor:
    """Return the `topk` earlier blocks of each query head: (F, H, topk), counted from the start of
    the query's document, -1 where there are fewer.

    q      (F, H, D)
    means  (n, G, D) of the whole blocks of all documents
    first  (F,): which of these is the first one of the query's document
    own    (F,): the number of the query's own block in its document
    """
    wide = means.repeat_interleave(q.shape[1] // means.shape[1], 1)
    scores = torch.einsum("fhd,nhd->fhn", q.to(wide.dtype), wide)
    blocks = torch.arange(len(means), device=q.device) - first.view(-1, 1, 1)
    earlier = (blocks >= 0) & (blocks < own.view(-1, 1, 1))
    scores = functional.pad(scores.masked_fill(~earlier, -torch.inf), (0, topk), value=-torch.inf)
    best, places = scores.topk(topk, -1)
    return (places - first.view(-1, 1, 1)).masked_fill(best == -torch.inf, -1)


class MobaPlan(BlockPlan):
    """The part of a rank in a call."""

    topk: int

    def choose_rows(self, rings: Any, q: Tensor, k: Tensor) -> Tensor:
        starts, tokens, stops = self.find_ends(q.device)
        blocks = torch.tensor(self._whole_blocks, device=q.device)
        first = torch.searchsorted(blocks, starts)
        own = (stops[tokens] - starts) // self.block_size
        means = self._find_means(rings, k)
        rows = zip(q, means, strict=True)
        chosen = [choose_blocks(x[tokens], m, first, own, self.topk) for x, m in rows]
        return torch.stack(chosen).int()

    def _find_means(self, rings: Any, k: Tensor) -> Tensor:
        """Return the means of all whole blocks: (B, n, G, D). No span cuts a block."""
        wide = accumulator_dtype(k.dtype)
        found = [k.new_empty(len(k), 0, *k.shape[2:], dtype=wide)]
        for number, (start, stop) in enumerate(self.spans.spans):
            [whole] = self.spans.gather(rings, [k], number)
            here = [at - start for at in self._whole_blocks if start <= at < stop]
            parts = [whole[:, at : at + self.block_size].to(wide).mean(1) for at in here]
            found += [torch.stack(parts, 1)] if parts else []
        return torch.cat(found, 1)

    @property
    def _whole_blocks(self) -> list[int]:
        """The first keys of all whole blocks, rising."""
        spans, size = documents(self.problem.mask), self.block_size
        return [at for start, stop in spans for at in range(start, stop - size + 1, size)]

    def find_ends(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        starts, ends = torch.tensor(documents(self.problem.mask)).T.contiguous()
        nearest = torch.searchsorted(starts, self.positions, right=True).sub(1).clamp_min(0)
        starts, ends = starts[nearest], ends[nearest]
        stops = starts + (self.positions - starts) // self.block_size * self.block_size
        tokens = ((stops > starts) & (self.positions < ends)).nonzero().flatten()
        return starts[tokens].to(device), tokens.to(device), stops.to(device)


class BlockMeans:
    """The means of the whole blocks of a cache's keys."""

    def __init__(self, size: int):
        self.size, self.means = size, list[Tensor]()  # (B, G, D) each
        self.rest: Tensor | None = None  # (B, T, G, D), keys of an unfinished block

    def extend(self, keys: Tensor) -> None:
        keys = keys if self.rest is None else torch.cat((self.rest, keys), 1)
        whole = keys.shape[1] // self.size * self.size
        parts = keys[:, :whole].split(self.size, 1) if whole else ()
        self.means += [part.to(accumulator_dtype(part.dtype)).mean(1) for part in parts]
        self.rest = keys[:, whole:].clone()

    def select_rows(self, rows: Tensor) -> None:
        self.means = [mean[rows] for mean in self.means]
        self.rest = None if self.rest is None else self.rest[rows]


class MobaMemory(BlockMemory):
    """Keys and values of a layer, and means of blocks."""

    def __init__(self, kind: Any, room: Any, k: Tensor, v: Tensor):
        super().__init__(kind, room, k, v)
        self.block_size, self.topk = kind.extension.block_size, kind.extension.topk
        self.sums_of_keys = self.blocks = BlockMeans(self.block_size)

    def choose(self, row: int, q: Tensor, places: Tensor) -> Tensor:
        means, own = self.blocks.means, (places // self.block_size).to(q.device)
        of_row = torch.stack([mean[row] for mean in means]) if means else self.kept[0][row, :0]
        chosen = choose_blocks(q, of_row, torch.zeros_like(own), own, self.topk)
        return torch.cat((chosen, own.view(-1, 1, 1).expand(*q.shape[:2], 1)), 2)


@dataclass(frozen=True)
class MoBA(BlockChoice):
    """Attention to the own block, and to the `topk` earlier blocks with the highest scores.

    Raises ValueError for numbers below 1.
    """

    block_size: int = 512
    topk: int = 3

    name = "MoBA"
    kind = "moba"
    memory = MobaMemory

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} of MoBA must be a positive int, got {value!r}")

    def check(self, tensors: Any, q: Tensor, k: Tensor) -> None:
        if tensors:
            raise ValueError(f"MoBA takes no choose_by, got {len(tensors)} tensors")

    def near_mask(self, mask: Mask) -> Mask:
        slices = []
        for s in mask.slices:
            (start, stop), low = s.kv, find_low(s)
            for at in range(start, stop, self.block_size):
                block: Span = (at, min(at + self.block_size, stop))
                queries = overlap(shifted(block, low), s.q)
                if length(queries):
                    slices.append(Slice(queries, block, low))
        return Mask(mask.seq_len, tuple(slices), mask.kv_len)

    def is_exact(self, longest: int) -> bool:
        return longest <= (self.topk + 1) * self.block_size

    def make_plan(self, problem: Any, rank: int, near: Any, span_bytes: int) -> MobaPlan:
        size = self.block_size
        plan = MobaPlan(problem, rank, near, size, size, span_bytes)
        plan.topk = self.topk
        return plan

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        return cls(**values)


register_extension(MoBA)


def main(steps: int = 30) -> None:
    """Train a small CPM with MoBA on two ranks, whole and in chunks, and continue a text."""
    from models.config import CPMConfig
    from models.cpm import CPM

    of_file = {"kind": "moba", "block_size": 8, "topk": 2}
    config = CPMConfig(64, 32, 64, 2, 4, 2, 8, sparse=read_extension(of_file))
    tokens = (torch.arange(160) * 7 % 61).unsqueeze(0)  # each token follows from the one before
    mask = Mask.documents((0, 100, 160))
    torch.manual_seed(0)
    weights = CPM(config).state_dict()

    def train(ring: Any) -> tuple[list[float], str]:
        sp = SequenceParallel(ring.rank, ring.size, process_group=ring)
        model, losses = CPM(config, sp), []
        model.load_state_dict(weights)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for step in range(steps):
            optimizer.zero_grad()
            if step % 2:
                losses.append(step_in_chunks(model, sp, tokens, mask))
            else:
                losses.append(step_whole(model, sp, tokens, mask))
            for p in model.parameters():
                assert p.grad is not None, "every weight is used"
                p.grad = sp.sum(p.grad)
            optimizer.step()
        return losses, continue_text(model, sp, tokens[:, :90])

    (losses, text), *_ = simulate(2, train)
    print(f"loss of a token: {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps on 2 ranks")
    print(f"continued: {text}")


def step_whole(model: Any, sp: SequenceParallel, tokens: Tensor, mask: Mask) -> float:
    """Run forward and backward of the mean loss. Return the loss."""
    batch = sp.sequence(mask)
    labels = batch.shift_labels(tokens)
    targets = int((labels != IGNORE_INDEX).sum())
    own = batch.shard(tokens), batch.positions(), batch.shard(labels)
    loss, _ = model(*own, cache=batch)
    (loss / targets).backward()
    return float(sp.sum(loss.detach())) / targets


def step_in_chunks(model: Any, sp: SequenceParallel, tokens: Tensor, mask: Mask) -> float:
    """Do the same in chunks of 40 tokens."""
    chunks = Chunks(mask, 40, model.config.num_layers, sp)
    labels, total = sp.sequence(mask).shift_labels(tokens), 0.0
    targets = int((labels != IGNORE_INDEX).sum())
    positions = mask.positions()
    for phase in (chunks.forward, chunks.backward):
        for chunk in phase():
            own = chunk.shard(tokens), chunk.shard(positions, 0), chunk.shard(labels)
            results = model(*own, cache=chunk)
            if phase == chunks.backward:
                (results[0] / targets).backward()
                total += float(sp.sum(results[0].detach())) / targets
    return total


@torch.no_grad()
def continue_text(model: Any, sp: SequenceParallel, prompt: Tensor, count: int = 8) -> str:
    """Return the most likely next tokens."""
    cache, length_ = Cache(sp, model.config.num_layers, 120), prompt.shape[1]
    for chunk in cache.prefill(length_, 40):
        positions = torch.arange(length_)
        logits = model(chunk.shard(prompt), chunk.shard(positions, 0), cache=chunk)
    found = []
    for at in range(length_, length_ + count):
        found.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([[found[-1]]]), torch.tensor([at]), cache=cache)
    return " ".join(map(str, found))


if __name__ == "__main__":
    main()
