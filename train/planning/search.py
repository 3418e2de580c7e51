"""The search for options: the longest sequence that they allow, and the fastest that fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from models.config import CPMConfig
from train.checkpoints.rank_file import available_memory
from train.settings.config import TrainConfig, refuses_chunk
from train.settings.kinds import ModelConfig, kind_of
from train.settings.settings import DTYPES

from .memory import Step, plan_step
from .seconds import GIB, Hardware, StepSeconds, count_keys, step_seconds, usable_bytes

TILE = 16384  # tokens of --mlp-tile that plans recommend
_LONGEST = 1 << 26  # tokens of a sequence, more are not planned
_MOST_RANKS = 1 << 10  # that share a sequence
_MOST_CHUNKS = 1 << 13  # of a sequence, since the time for a plan grows with them
_GRAIN = 1024  # tokens of a rank: the longest sequence is a multiple of these
_TRIES = 24
_TRUSTED = 0.92  # of the memory, since measured runs took up to 7 % more than planned
_LEAST_GIB = 3.0  # of a GPU, for a plan with less memory
_GPUS_OF_HOST = 8  # at most
_GRADIENT_BYTES = {"torch": 4, "bmtrain": 2}  # of a parameter, at least, when they are reduced
_GROUPS = (2, 4, 8)  # of --checkpointing-every
CHUNKS = (8192, 16384, 32768, 65536)  # a rank's tokens in the chunks that plans recommend


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run and the GiB of each. If they are known, also the GiB of the host for each,
    and the GB/s (10^9 bytes) that a host receives from other hosts.
    """

    gpus: int
    gib: float
    hardware: Hardware
    host_gib: float | None = None
    network: float | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"--gpus must be at least 1, got {self.gpus}")
        if self.host_gib is not None and not self.host_gib > 0:
            raise ValueError(f"--host-memory must be positive, got {self.host_gib:g}")
        if self.network is not None and not 0 < self.network < math.inf:
            raise ValueError(f"--network must be positive and finite, got {self.network:g}")
        usable_bytes(self.gib)

    @property
    def of_host(self) -> int:
        """The GPUs of a host, at most eight."""
        return max(n for n in range(1, _GPUS_OF_HOST + 1) if self.gpus % n == 0)

    @property
    def hosts(self) -> int:
        return self.gpus // self.of_host

    @property
    def careful(self) -> Cluster:
        """The same GPUs with a trusted part of their memory."""
        return dataclasses.replace(self, gib=self.gib * _TRUSTED)

    @property
    def usable(self) -> int:
        """Bytes of each GPU that a step may use."""
        return usable_bytes(self.gib)

    def fits(self, step: Step) -> bool:
        """Whether a step fits the memory of GPUs and hosts."""
        host = step.memory.host
        return step.memory.total <= self.usable and (
            self.host_gib is None or host <= self.host_gib * GIB
        )


def free_host_gib(gpus: int) -> float | None:
    """Return the free memory of this host for each of `gpus` GPUs, or None if it has no GPU."""
    return available_memory() / GIB / gpus if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Planned:
    """A run with these options, on these GPUs. `keeps_weights` is that of TorchEngine."""

    config: TrainConfig
    model: CPMConfig
    cluster: Cluster
    engine: str
    step: Step
    seconds: StepSeconds
    keeps_weights: bool = False

    @property
    def received(self) -> float:
        """The bytes that a host receives from others in a step: of weights, twice unless they stay,
        of gradients to reduce and, if hosts share a sequence, of keys as in the double ring.
        """
        step, hosts = self.step, self.cluster.hosts
        itemsize = DTYPES[self.config.dtype].itemsize
        gathers, gradient = 2 - self.keeps_weights, max(_GRADIENT_BYTES[self.engine], itemsize)
        weights = step.chunks * self.model.num_parameters * (gathers * itemsize + gradient)
        keys = sum(count * count_keys(run, step.chunks) for run, count in step.attention.items())
        sharing = -(-self.config.sp_size // self.cluster.of_host)
        received = weights * (hosts - 1) / hosts + keys * (sharing - 1) / sharing
        return step.micro_batches * received

    @property
    def fits(self) -> bool:
        return self.cluster.fits(self.step)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all GPUs."""
        return self.config.batch_size * self.config.seq_len / self.seconds.total

    def days(self, tokens: float) -> float:
        """Return the days of a run of so many tokens."""
        return tokens / self.tokens_per_s / 86400


def plan(
    config: TrainConfig, cluster: Cluster, engine: str, keeps_weights: bool = False
) -> Planned:
    """Plan a run. Raises ValueError for a model or sizes that cannot be planned."""
    model = dense_model(config)
    if cluster.gpus % config.sp_size:
        raise ValueError(
            f"--sp-size {config.sp_size} does not divide the number of GPUs, {cluster.gpus}"
        )
    if config.sp_size > _MOST_RANKS:
        raise ValueError(
            f"expected --sp-size of at most {_MOST_RANKS:,} in a plan, got {config.sp_size:,}"
        )
    if config.seq_len > _LONGEST:
        raise ValueError(
            f"expected --seq-len of at most {_LONGEST:,} in a plan, got {config.seq_len:,}"
        )
    if config.chunk is not None and (reason := _refuses_chunk(config, config.chunk)):
        raise ValueError(reason)
    if config.fp8 and cluster.hardware.fp8 is None:
        raise ValueError(
            f"--fp8 needs GPUs that multiply in float8, which {cluster.hardware.name} lacks"
        )
    step = plan_step(_in_hosts(config, cluster), model, cluster.gpus, engine, keeps_weights)
    seconds = step_seconds(step, cluster.hardware)
    planned = Planned(config, model, cluster, engine, step, seconds, keeps_weights)
    if cluster.network is None or cluster.hosts == 1:
        return planned
    waiting = planned.received / cluster.network / 1e9 - seconds.total
    parts = {"waiting for other hosts": waiting} if waiting > 0 else {}
    return dataclasses.replace(planned, seconds=StepSeconds({**seconds.parts, **parts}))


def _in_hosts(config: TrainConfig, cluster: Cluster) -> TrainConfig:
    """Return the settings with the double ring that a run takes for sequences over several hosts,
    unless other groups are given.
    """
    inner, given = cluster.of_host, (config.inner_size, config.ulysses_size)
    is_grid = config.sp_size > inner and config.sp_size % inner == 0
    if not is_grid or given != (None, None) or config.strategy == "ulysses":
        return config
    return dataclasses.replace(config, inner_size=inner)


def dense_model(config: TrainConfig) -> CPMConfig:
    """Return the model of a run. Raises ValueError if it is no dense CPM."""
    model: ModelConfig = config.model_config()
    if not isinstance(model, CPMConfig):
        raise ValueError(
            f"{config.model_name} is a {kind_of(model).name}: expected a dense CPM, since the "
            "memory and the time of attention with a bias are not planned"
        )
    return model


def savings(chunk: int | None = None) -> Iterator[dict[str, object]]:
    """Yield options for what blocks save, the simplest first. A `chunk` excludes offloading."""
    ways = ("none", "selective", "full")
    offloads = (False, True) if chunk is None else (False,)
    for offload, tile, checkpointing in itertools.product(offloads, (None, TILE), ways):
        if not offload or checkpointing != "none":
            others = {"checkpointing_blocks": None, "checkpointing_every": None, "chunk": chunk}
            yield {"checkpointing": checkpointing, "offload": offload, "mlp_tile": tile, **others}


def possible_chunks(planned: Planned) -> list[int]:
    """Return the tokens of the chunks that the same run may be recommended with."""
    config = planned.config
    if config.chunk is not None:
        return [config.chunk]
    sizes = [tokens * config.sp_size for tokens in CHUNKS]
    return [n for n in sizes if n < config.seq_len and not _refuses_chunk(config, n)]


def _refuses_chunk(config: TrainConfig, tokens: int) -> str | None:
    """Return why a plan cannot have --chunk `tokens`, or None if it can."""
    count = -(-config.seq_len // tokens)
    if count > _MOST_CHUNKS:
        return (
            f"--chunk {tokens} cuts --seq-len {config.seq_len} into {count:,} chunks: expected at "
            f"most {_MOST_CHUNKS:,} in a plan"
        )
    return refuses_chunk(config, tokens)


def with_options(planned: Planned, **options: object) -> Planned:
    """Plan the same run with other options."""
    config = dataclasses.replace(planned.config, **options)  # type: ignore[arg-type]
    return plan(config, planned.cluster, planned.engine)


def find_longest(planned: Planned) -> int:
    """Return the longest sequence that fits, a multiple of 1024 tokens on each rank, or 0. With
    --chunk it may be a multiple of the chunk instead.
    """
    grain, chunk = _GRAIN * planned.config.sp_size, planned.config.chunk
    if chunk is None or not grain <= chunk < _LONGEST:
        return _search_longest(planned, grain)
    whole = _search_longest(planned, chunk)
    # One chunk more makes all of them shorter. With as many chunks, memory grows with the length.
    if not whole or planned.config.fp8:  # which takes few lengths
        return whole or _search_longest(planned, grain)
    lengths = range(whole // grain * grain, whole + chunk, grain)[1:]
    fitting = bisect_left(lengths, 1, key=lambda n: not with_options(planned, seq_len=n).fits)
    return max([whole, *lengths[:fitting]])


def _search_longest(planned: Planned, grain: int) -> int:
    """Return the longest sequence that fits, a multiple of `grain` tokens, or 0."""
    if not with_options(planned, seq_len=grain).fits:
        return 0
    longest = min(_LONGEST, _MOST_CHUNKS * (planned.config.chunk or _LONGEST))
    fits, too_long = 1, longest // grain  # in grains
    guess = 2 * fits
    for _ in range(_TRIES):
        if too_long - fits <= max(fits // 128, 1):
            break
        tried = with_options(planned, seq_len=guess * grain)
        if tried.fits:
            fits = guess
        else:
            too_long = guess
        guess = min(max(_guess(tried, guess), fits + 1), too_long - 1)
    return fits * grain


def find_any_longest(planned: Planned) -> int:
    """Return the longest sequence that fits a trusted part of the memory, without offloading if one
    fits, or raise ValueError.
    """
    careful = dataclasses.replace(planned, cluster=planned.cluster.careful)
    offloads: dict[str, object] = {"offload_optimizer": planned.engine == "bmtrain"}
    for more in ({}, offloads):
        longest = max(
            find_longest(with_options(careful, **(options | more)))
            for options in savings(planned.config.chunk)
            if not options["offload"]
        )
        if longest:
            return longest
    raise ValueError(
        f"no sequence fits: expected more than {planned.cluster.gpus} GPUs of "
        f"{planned.cluster.gib:g} GiB, or a smaller --model"
    )


def _guess(tried: Planned, grains: int) -> int:
    """Guess how many grains fill the memory. All but the weights grows with the length."""
    memory = tried.step.memory
    constant = ["weights", "optimizer", "gradients", "rings"]
    constant += ["activations"] * (tried.step.chunks > 1)  # those of one chunk
    fixed = sum(memory.parts[part] for part in constant)
    room = (tried.cluster.usable - fixed) / max(memory.total - fixed, 1)
    if tried.cluster.host_gib is not None and memory.parked:
        of_optimizer = memory.host - memory.parked  # nearly
        room = min(room, (tried.cluster.host_gib * GIB - of_optimizer) / memory.parked)
    return int(grains * min(max(room, 0.1), 10.0))


def recommend(planned: Planned) -> Planned | None:
    """Return the fastest plan that fits a trusted part of the memory, otherwise the fastest that
    fits, or None. Options must make it faster by 1 %.

    Without --chunk, chunks are the last options. With it, they are left out only if none fits.
    """
    given, chunks = planned.config.chunk, possible_chunks(planned)
    for cluster in (planned.cluster.careful, planned.cluster):
        within = dataclasses.replace(planned, cluster=cluster)
        whole = _find_fastest(within, (None,)) if given is None else None
        if found := _pick_faster(whole, _find_fastest(within, chunks)):
            return dataclasses.replace(found, cluster=planned.cluster)
    return None if given is None else recommend(with_options(planned, chunk=None))


def _find_fastest(planned: Planned, chunks: Iterable[int | None]) -> Planned | None:
    """Return the fastest plan that fits with one of these chunks, or None."""
    plans = [with_options(planned, **options) for chunk in chunks for options in savings(chunk)]
    if planned.engine == "bmtrain" and not any(other.fits for other in plans):
        plans += [with_options(other, offload_optimizer=True) for other in plans]
    found: Planned | None = None
    for candidate in (each for other in plans for each in (other, *_with_groups(other))):
        found = _pick_faster(found, candidate if candidate.fits else None)
    return found and _save_more(found)


def _pick_faster(found: Planned | None, other: Planned | None) -> Planned | None:
    """Return the plan `found`, or the other one if it is faster by 1 %, or if none was found."""
    if found is None or other is None:
        return found or other
    return other if other.seconds.total < 0.99 * found.seconds.total else found


def as_run(planned: Planned) -> Planned:
    """Return the plan as pretrain.py runs it, which fills a trusted part of the memory.

    With --checkpointing selective alone, only as many blocks recompute as memory needs. On FSDP2,
    gathered weights stay for the backward if there is room.
    """
    config, cluster = planned.config, planned.cluster
    careful = cluster.careful
    chosen = config.checkpointing_blocks, config.checkpointing_every
    if config.checkpointing == "selective" and not config.offload and chosen == (None, None):
        planned = _save_more(dataclasses.replace(planned, cluster=careful))
    if planned.engine == "torch":
        kept = plan(planned.config, careful, planned.engine, keeps_weights=True)
        planned = kept if kept.fits else planned
    return dataclasses.replace(planned, cluster=cluster)


def _with_groups(planned: Planned) -> Iterator[Planned]:
    """Yield plans that keep the input of a group of blocks, if the host's memory is short."""
    host_gib, config = planned.cluster.host_gib, planned.config
    if host_gib is not None and config.offload and planned.step.memory.host > host_gib * GIB:
        for every in _GROUPS:
            if every <= planned.model.num_layers:
                grouped = with_options(planned, checkpointing_every=every)
                yield grouped
                if grouped.fits:
                    return


def _save_more(planned: Planned) -> Planned:
    """Return the plan in which as many of the last blocks as fit save everything."""
    config = planned.config
    if config.checkpointing == "none" or config.offload or config.checkpointing_every:
        return planned
    layers = range(planned.model.num_layers)
    blocks = bisect_left(
        layers, 1, key=lambda n: with_options(planned, checkpointing_blocks=n).fits
    )
    return planned if blocks == len(layers) else with_options(planned, checkpointing_blocks=blocks)


def find_smaller(planned: Planned) -> Planned | None:
    """Return the fastest plan for a run that was out of memory, or None. It has less memory than
    `planned`, also if that should have fitted, and micro-batches of one sequence.
    """
    cluster = planned.cluster
    share = min(planned.step.memory.total / cluster.usable, 1.0)
    less = dataclasses.replace(cluster, gib=max(cluster.gib * share, _LEAST_GIB))
    return recommend(with_options(dataclasses.replace(planned, cluster=less), micro_batch_size=1))
