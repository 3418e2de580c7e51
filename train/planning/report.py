"""Plans as text."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from train.base.wording import counted, flag
from train.data.shares import source_words
from train.settings.config import TrainConfig
from train.settings.settings import DTYPES

from .assumptions import describe_assumptions
from .search import (
    Planned,
    find_longest,
    find_smaller,
    possible_chunks,
    recommend,
    savings,
    with_options,
)
from .seconds import GIB

_MEETING = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_HOST:29500"]
# options that a command has in any case, with what is to be filled in
_NEEDED = {"--steps": "STEPS", "--lr": "LR", "--data": "DATA", "--output": "RUN"}
_KIB = 1 << 10
_SHORT_S = 0.1  # shorter steps are not planned well


@dataclass(frozen=True)
class Budget:
    """The tokens of a whole run, and what a GPU costs for an hour, each None if it is not known."""

    tokens: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--tokens", self.tokens), ("--price-per-gpu-hour", self.price)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value:g}")
        if self.price is not None and self.tokens is None:
            raise ValueError("--price-per-gpu-hour needs --tokens, which is not given")


def describe(planned: Planned, budget: Budget) -> str:
    """Return the memory, the seconds and the cost of one plan."""
    lines = [_describe_run(planned), *describe_assumptions(planned, budget.tokens)]
    lines += ["", *_describe_memory(planned), "", *_describe_time(planned)]
    if budget.tokens is not None:
        lines += [_describe_cost(planned, budget.tokens, budget.price)]
    return "\n".join(lines)


def _describe_run(planned: Planned) -> str:
    """Return the run and its GPUs."""
    config, cluster = planned.config, planned.cluster
    groups, chunks = cluster.gpus // config.sp_size, list[str]()
    if (count := planned.step.chunks) > 1:
        tokens = counted(-(-config.seq_len // count), "token")
        chunks = [f"each in {count} chunks of up to {tokens}"]
    within_chunk = dataclasses.replace(config, chunk=None)
    return "; ".join(
        (
            f"{config.model_source}: {planned.model.num_parameters:,} parameters, "
            f"{config.dtype}{' and fp8' * config.fp8}, engine {planned.engine}",
            f"{counted(cluster.gpus, 'GPU')} of {cluster.gib:g} GiB",
            f"{counted(config.batch_size, 'sequence')} of {counted(config.seq_len, 'token')} a "
            f"step, each over {counted(config.sp_size, 'rank')}, {groups} data parallel",
            *chunks,
            "saving " + (" ".join(saving_flags(within_chunk)) or "everything"),
            *["gathered weights stay for the backward"] * planned.keeps_weights,
        )
    )


def _describe_memory(planned: Planned) -> Iterator[str]:
    """Yield the parts of the memory of a GPU, and what is on the host."""
    memory, cluster = planned.step.memory, planned.cluster
    yield f"memory of a GPU, at the peak ({memory.moment}), in GiB:"
    for part, nbytes in memory.parts.items():
        if nbytes:
            yield f"  {part:<18}{nbytes / GIB:8.2f}"
    verdict = "fits" if memory.total <= cluster.usable else "does NOT fit"
    yield f"  {'total':<18}{memory.total / GIB:8.2f}  {verdict}: {cluster.usable / GIB:.1f} usable"
    if memory.host:
        known = "" if cluster.host_gib is None else f" of {cluster.host_gib:g}"
        yield f"memory of the host for each GPU: {memory.host / GIB:.1f}{known} GiB"
        if (count := cluster.of_host) > 1:
            yield f"  of a host with {count} GPUs: {count * memory.host / GIB:.1f} GiB, pinned"


def _describe_time(planned: Planned) -> Iterator[str]:
    """Yield the parts of the time of a step, and the speed."""
    hardware, seconds = planned.cluster.hardware, planned.seconds
    yield f"seconds of a step, at rates of {hardware.name} ({hardware.source}):"
    for part, value in seconds.parts.items():
        yield f"  {part:<36}{value:10.2f}"
    yield f"  {'total':<36}{seconds.total:10.2f}"
    speed = planned.tokens_per_s
    yield f"{speed:,.0f} tokens/s, {speed / planned.cluster.gpus:,.0f} for each GPU"
    if planned.step.memory.host:
        yield "The rates of copies to the host and of AdamW there are assumed."
    if planned.config.dtype == "fp32":
        yield "These are rates of 16 bits. Steps in fp32 take longer."
    if seconds.total < _SHORT_S:
        yield "The host limits steps as short as this. They take longer."


def _describe_cost(planned: Planned, tokens: float, price: float | None) -> str:
    """Return the days and the price of a run of so many tokens."""
    steps = math.ceil(tokens / (planned.config.batch_size * planned.config.seq_len))
    length = planned.days(tokens)
    sentence = f"{tokens:,.0f} tokens ({counted(steps, 'step')}) take {length:,.1f} days"
    if price is None:
        return sentence
    hours = planned.cluster.gpus * length * 24
    return f"{sentence} and {hours:,.0f} GPU hours, which cost {hours * price:,.0f}"


def table(planned: Planned, recommended: Planned) -> str:
    """Return the longest sequence of each combination of what blocks save, otherwise with the
    options of the `recommended` plan. If `planned` has no chunks, there are also rows with those
    that are recommended, or with some if these keep less than layer inputs. The last row is that of
    the recommended plan, unless another one is.
    """
    rows: list[tuple[str, ...]] = [("options", "longest", "GiB", "host", "s/step", "tokens/s")]
    combinations = [*savings(planned.config.chunk)]
    chunk = recommended.config.chunk
    if planned.config.chunk is None and chunk is None:
        inputs = inputs_of_token(planned)
        some = possible_chunks(planned)[1:2]
        chunk = next((n for n in some if kept_of_token(planned, n) < inputs), None)
    if planned.config.chunk is None and chunk is not None:
        combinations += [x for x in savings(chunk) if x["mlp_tile"] is None]
    own = {name: getattr(recommended.config, name) for name in combinations[0]}
    if own not in combinations:  # as with --checkpointing-blocks
        combinations.append(own)
    for options in combinations:
        other = with_options(recommended, **options)
        name = " ".join(saving_flags(other.config)) or "(none)"
        speed = (f"{other.seconds.total:.2f}", f"{other.tokens_per_s:,.0f}")
        speed = speed if other.fits else ("does not fit", "")
        gib = [f"{x / GIB:.1f}" for x in (other.step.memory.total, other.step.memory.host)]
        rows.append((name, f"{find_longest(other):,}", *gib, *speed))
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    tokens = counted(planned.config.seq_len, "token")
    lines = [f"longest sequence, and a step of {tokens}, if no gathered weights stay:"]
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        lines.append("  ".join([name.ljust(first), *right]).rstrip())
    return "\n".join(lines)


def advice(planned: Planned, found: Planned | None) -> str:
    """Return the command of `recommend`'s plan, with its memory and time."""
    if found is None:
        others = with_options(planned, offload_optimizer=False)
        if planned.config.offload_optimizer and recommend(others):
            return "No options fit with --offload-optimizer. Without it, some do"
        gpus = counted(planned.cluster.gpus, "GPU")
        return f"No options fit. Give a shorter --seq-len, or more than {gpus}"
    gib = found.step.memory.total / GIB
    lines = [f"recommended ({gib:.1f} GiB, {found.seconds.total:.2f} s a step):", command(found)]
    if not found.cluster.careful.fits(found.step):
        lines = ["little memory is left: measured runs took up to 7 % more", *lines]
    if planned.config.chunk not in (None, found.config.chunk):
        lines = [f"--chunk {planned.config.chunk} does not fit", *lines]
    if found.config.chunk is None:
        lines = [*_explain_chunks(planned), *lines]
    return "\n".join(lines)


def _explain_chunks(planned: Planned) -> Iterator[str]:
    """Yield why chunks are not recommended, if the run could have some."""
    for chunk in possible_chunks(planned)[:1]:
        kept, inputs = kept_of_token(planned, chunk), inputs_of_token(planned)
        verdict = "would not be faster" if kept < inputs else "do not pay for this model"
        yield (
            f"chunks (--chunk) {verdict}: they keep {kept / _KIB:,.0f} KiB a token, the inputs of "
            f"all layers are {inputs / _KIB:,.0f} KiB"
        )


def kept_of_token(planned: Planned, chunk: int) -> float:
    """Return the bytes that chunks keep of each token."""
    step, config = with_options(planned, **next(savings(chunk))).step, planned.config
    rows = config.batch_size * config.sp_size / planned.cluster.gpus / step.micro_batches
    return step.memory.parts["kept keys"] / rows / -(-config.seq_len // config.sp_size)


def inputs_of_token(planned: Planned) -> int:
    """Return the bytes of the inputs of all layers, for each token."""
    model = planned.model
    return model.num_layers * model.hidden_size * DTYPES[planned.config.dtype].itemsize


def command(planned: Planned) -> str:
    """Return the command that starts a run on each host. Capitals are to be filled in: they stand
    for options that every run needs and that have their default here.
    """
    cluster = planned.cluster
    config = dataclasses.replace(planned.config, processes=1)  # torchrun starts the others
    given = _given_options(config)
    hosts = ["--nnodes", str(cluster.hosts)] if cluster.hosts > 1 else []
    launcher = ["torchrun", *hosts, "--nproc-per-node", str(cluster.of_host)]
    launcher += [*(_MEETING if hosts else []), "train/pretrain.py"]
    names = {name for name, *_ in given}
    missing = [option for option in _NEEDED.items() if option[0] not in names]
    return shlex.join([*launcher, *_join([*given, *missing])])


def saving_flags(config: TrainConfig) -> list[str]:
    """Return the options for what blocks save."""
    saving = {flag(name) for name in next(iter(savings()))}
    return _join(option for option in _given_options(config) if option[0] in saving)


def _given_options(config: TrainConfig) -> list[tuple[str, ...]]:
    """Return the options that differ from the defaults, each with its value if it has one."""
    options: list[tuple[str, ...]] = []
    for field in dataclasses.fields(TrainConfig):
        name, value = flag(field.name), getattr(config, field.name)
        if value == field.default or value is None:
            continue
        if isinstance(value, bool):
            options.append((name if value else f"--no-{field.name.replace('_', '-')}",))
        elif field.name in ("data", "val_data"):
            options.append((name, *source_words(value)))
        else:
            text = json.dumps(dict(value)) if isinstance(value, dict) else str(value)
            options.append((name, text))
    return options


def _join(options: Iterable[tuple[str, ...]]) -> list[str]:
    return [word for option in options for word in option]


def explain_shortage(planned: Planned) -> str:
    """Return the largest part of a plan that does not fit, and the options of a smaller one."""
    memory = planned.step.memory
    largest = max(memory.parts, key=lambda part: memory.parts[part])
    sentence = (
        f"the plan is {memory.total / GIB:.1f} GiB of {planned.cluster.gib:.1f}; "
        f"{largest} are {memory.parts[largest] / GIB:.1f} of it"
    )
    other = find_smaller(planned)
    if other is None:
        return f"{sentence}; give a shorter --seq-len or more GPUs to share it: --sp-size"
    options = dict(next(savings()), micro_batch_size=1, offload_optimizer=False)
    words = _join(x for x in _given_options(other.config) if x[0] in map(flag, options))
    gib = other.step.memory.total / GIB
    return f"{sentence}; with {' '.join(words)} it is {gib:.1f} GiB"
