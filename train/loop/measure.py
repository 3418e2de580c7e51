"""The work of a step over all ranks, its phases, operations, speed and losses, for records."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmt_burst import IGNORE_INDEX, SequenceParallel
from models.config import CPMConfig
from models.cpm_live.config import LiveConfig
from train.data.batches import Dealer, Work
from train.data.source import Stored
from train.engine import Engine
from train.settings.config import TrainConfig
from train.settings.kinds import ModelConfig
from train.settings.settings import DTYPES

# Dense 16-bit TFLOP/s from the vendors' datasheets. The first entry is used that has all of its
# words in the device's name.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200 NVL": 835.0,
    "H20": 148.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "B100": 1800.0,
    "A100": 312.0,
    "A800": 312.0,
}
_LIGHTNING_CHUNK = 64  # tokens, whose pairs are computed
LIGHTNING_BACKWARD = 2.5  # operations, relative to a forward


class Clock:
    """Seconds by phase. On GPUs events measure them, and nothing waits until `read`."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._mark()
        with torch.profiler.record_function(name):
            yield
        self._marks[name].append((start, self._mark()))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds = {
            name: sum(self._seconds(*pair) for pair in pairs) for name, pairs in self._marks.items()
        }
        self._marks.clear()
        return seconds

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def _seconds(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) / 1e3 if self._cuda else stop - start


@dataclass(frozen=True)
class StepWork:
    """The work of a step, over all ranks.

    pairs    visible pairs of a query and a key, over all layers, of one head
    counts   numbers of documents and the like
    balance  the most work of a rank, in pairs, relative to the mean of all ranks. A group waits for
             its slowest rank in each micro-batch, and all groups at the end for the slowest
    by_source  number of targets in rows of each source of a mixture
    """

    targets: float
    pairs: float
    counts: dict[str, int]
    balance: float
    by_source: tuple[float, ...] = ()


def count_work(
    micro_batches: Sequence[Work], sp: SequenceParallel, engine: Engine, sources: int = 0
) -> StepWork:
    """Count the work of a step of `sources` sources. Every rank must call this function."""
    group, groups = dist.get_rank() // sp.size, dist.get_world_size() // sp.size
    slowest = [0.0] * groups
    names = list(micro_batches[0].counts)
    pairs, counts = 0, [0] * len(names)
    if sp.rank == 0:  # the other ranks of a group have the same numbers
        slowest[group] = sum(max(batch.work) for batch in micro_batches)
        pairs = sum(sum(batch.work) for batch in micro_batches)
        counts = [sum(batch.counts[name] for batch in micro_batches) for name in names]
    mine, by_source = 0, [0] * sources
    for batch in micro_batches:
        of_rows = (batch.labels != IGNORE_INDEX).sum(-1).tolist()
        mine += sum(of_rows)
        for source, count in zip(batch.sources or (), of_rows, strict=False):
            by_source[source] += count
    targets, all_pairs, *sums = engine.sum([mine, pairs, *by_source, *counts, *slowest])
    of_sources, sums = tuple(sums[:sources]), sums[sources:]
    all_counts = dict(zip(names, map(int, sums), strict=False))
    # without attention layers, tokens cost the same
    balance = max(sums[len(names) :]) * dist.get_world_size() / all_pairs if all_pairs else 1.0
    return StepWork(targets, all_pairs, all_counts, balance, of_sources)


def measure_speed(
    config: TrainConfig,
    model: ModelConfig,
    sp: SequenceParallel,
    device: torch.device,
    seconds: float,
    pairs: float,
) -> dict[str, float]:
    """Return tokens per second over all ranks, TFLOP/s and MFU of a rank, and peak memory."""
    tokens = config.batch_size * config.seq_len
    tflops = step_flops(model, tokens, pairs) / dist.get_world_size() / seconds / 1e12
    values = {"tokens_per_s": tokens / seconds, "tflops_per_rank": tflops}
    if peak := peak_tflops(device, DTYPES[config.dtype]):
        values["mfu"] = tflops / peak
    if device.type == "cuda":
        # torch does not count the memory of the rings
        held = sp.rings.inner.held_bytes
        values["peak_gib"] = (torch.cuda.max_memory_allocated() + held) / 2**30
    return values


def step_flops(model: CPMConfig | LiveConfig, tokens: int, pairs: float) -> float:
    """Return the operations of forward and backward over `tokens`, without recomputation.

    Each token costs 6 operations for each entry of a matrix that multiplies it: 2 in the forward
    and 4 in the backward. Norms, biases and other elementwise operations count nothing.

    Attention costs 12 * heads * head_dim for each visible pair of a query and a key: two products
    of 2 * head_dim operations in the forward and four in the backward. `pairs` is the sum of
    visible pairs over all layers with attention. A causal layer has seq_len * (seq_len + 1) / 2
    pairs for each sequence, and fewer with documents, windows and sparse attention (`sparse_keys`).
    PaLM (arXiv 2204.02311, appendix B) counts all pairs instead.

    Each token also costs `lightning_flops` in each lightning layer, and 2.5 times as many in the
    backward.
    """
    heads, size = model.num_heads, model.head_dim
    found = 6.0 * model.num_multiplied * tokens + 12.0 * heads * size * pairs
    if isinstance(model, CPMConfig):
        of_layer = (1 + LIGHTNING_BACKWARD) * lightning_flops(heads, size)
        found += model.lightning_layers * of_layer * tokens
    return found


def lightning_flops(heads: int, head_dim: int) -> float:
    """Return the operations of a forward for a token: with its state and with a chunk of 64."""
    return 4.0 * heads * head_dim * (head_dim + _LIGHTNING_CHUNK)


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the 16-bit peak of a device in TFLOP/s, or None if it is not known."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    known = (peak for name, peak in _PEAK_TFLOPS.items() if words.issuperset(name.split()))
    return next(known, None)


class LossSums:
    """Sums of a step's token losses on this rank, also of each source. Only `read` waits."""

    def __init__(self, sources: int):
        self._sources = sources
        self._losses: list[Tensor] = []
        self._numbers: list[int] = []

    def add(self, batch: Work, losses: Tensor) -> None:
        """Add the losses of a micro-batch: their sum, or (B,) for a batch with sources."""
        self._losses.append(losses.detach().view(-1))
        self._numbers += batch.sources or ()

    def read(self) -> list[float]:
        """Return the sum of all losses, then the sum of each source."""
        losses = torch.cat(self._losses).double()
        of_sources = [0.0] * self._sources
        if self._sources:
            for number, loss in zip(self._numbers, losses.tolist(), strict=True):
                of_sources[number] += loss
        return [float(losses.sum()), *of_sources]


def mean_losses(
    name: str, sources: Iterable[str], losses: Sequence[float], targets: Sequence[float]
) -> dict[str, float]:
    """Return the mean loss of each named source that has targets, as NAME/SOURCE."""
    return {
        f"{name}/{source}": loss / count
        for source, loss, count in zip(sources, losses, targets, strict=True)
        if source and count
    }


@torch.no_grad()
def measure_losses(
    sources: Mapping[str, Stored], batches: Dealer, engine: Engine, alive: Callable[[], None]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean token loss of each source and of all, as a record names them, over evenly
    spaced sequences, and the number of targets of each. Every rank must call it. `alive` is called
    before each micro-batch.
    """
    sums = []
    for data in sources.values():
        loss = targets = 0.0
        for batch in batches.of_evaluation(data):
            alive()
            batch_loss, batch_targets = batch.losses(engine.model)
            loss, targets = loss + float(batch_loss), targets + float(batch_targets)
        sums += [loss, targets]
    sums = engine.sum(sums)
    losses, targets_of = sums[::2], sums[1::2]
    mean = sum(losses) / sum(targets_of) if sum(targets_of) else math.nan
    named = {f"val_loss/{source}": n for source, n in zip(sources, targets_of, strict=True)}
    means = {"val_loss": mean, **mean_losses("val_loss", sources, losses, targets_of)}
    return means, {"val_loss": sum(targets_of), **named}
