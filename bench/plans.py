"""Compares plans with measured training runs, and writes the tables of docs/planning.md.

    python bench/plans.py

It plans the rows of bench/results/training-*.jsonl and the newest ones of steps-*.jsonl and
chunks-*.jsonl, and prints each run with its plan. It also plans runs on some numbers of GPUs. It
takes minutes and needs no GPU.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.options import first_layers
from bench.tables import Row, read_rows, table, tokens
from models.config import PRESETS
from train.planning.memory import Step, plan_step
from train.planning.report import inputs_of_token, kept_of_token, saving_flags
from train.planning.search import Cluster, as_run, find_longest, plan, recommend, with_options
from train.planning.seconds import GIB, GPUS, H200, step_seconds
from train.settings.config import TrainConfig
from train.settings.options import parse_options

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/planning.md"
MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# The runs that the rates of train/planning/seconds.py are from: model, layers, GPUs, tokens,
# checkpointing, engine, commit.
CALIBRATION = {
    ("minicpm4-8b", 6, 2, 4096, "none", "torch", "1a989e8"),
    ("minicpm4-8b", 32, 4, 131072, "none", "torch", "63d9e421"),
    ("minicpm-sala", 10, 2, 131072, "full", "torch", "1ac1ff092f5a70f3ef054d6ad1aedfdf0696fcd8"),
}

# The files of runs that chose by a plan what they keep.
_NEWER = "steps-*", "chunks-*", "training-*-again.jsonl", "training-2-nvidia-h200-sala.jsonl"


@dataclass(frozen=True)
class Comparison:
    """A measured run and its plan, in GiB and seconds."""

    row: Row
    config: TrainConfig
    gib: float
    seconds: float

    @property
    def run(self) -> tuple:
        """The run as in CALIBRATION."""
        names = ("model", "layers", "gpus", "seq_len", "checkpointing", "engine", "commit")
        return tuple(self.row[name] for name in names)

    @property
    def calibrates(self) -> bool:
        """Whether rates are from this run."""
        return self.run in CALIBRATION and self.config.chunk is None

    @property
    def is_warm(self) -> bool:
        """Whether the measured seconds are without compilation."""
        return not self.row.get("includes_compilation")

    @property
    def use(self) -> str:
        """The purpose of the run, in words."""
        return "rates" if self.calibrates else "check" if self.is_warm else "memory"

    @property
    def gpu(self) -> str:
        """The kind of the GPUs, such as H200."""
        return str(self.row["gpu_name"].split()[1])

    @property
    def kind(self) -> tuple[str, ...]:
        """The GPU, the engine, the kind of steps, and the use: what a line of the page has."""
        steps = ["sparse" if self.row.get("sparse") else "dense"]
        steps += ["in chunks"] if self.config.chunk else []
        steps += ["float8"] if self.config.fp8 else []
        return self.gpu, self.row["engine"], ", ".join(steps), self.use

    @property
    def gib_error(self) -> float:
        """The planned memory relative to the measured one, less 1."""
        return float(self.gib / self.row["peak_gib"] - 1)

    @property
    def seconds_error(self) -> float:
        """The planned seconds relative to the measured ones, less 1."""
        return float(self.seconds / self.row["step_s"] - 1)


def config_of(row: Row) -> TrainConfig:
    """Return the settings of a measured run."""
    _, more = parse_options(row.get("more", []))
    names = "model", "seq_len", "batch_size", "dtype", "checkpointing", "offload"
    later = "checkpointing_blocks", "checkpointing_every", "mlp_tile", "chunk"
    options: dict[str, Any] = {name: row[name] for name in names}
    options |= {name: row.get(name) for name in later}  # older rows lack some
    options |= {"fp8": bool(row.get("fp8")), "sp_size": row["sp"]}
    rows = row["batch_size"] * row["sp"] // row["gpus"]  # of a group of ranks
    options["micro_batch_size"] = row.get("micro_batch_size") or rows
    return TrainConfig(**options | more)


def step_of(row: Row) -> Step:
    """Plan a measured run."""
    model = PRESETS[row["model"]]
    model = dataclasses.replace(model, num_layers=row["layers"], sparse=row.get("sparse"))
    return plan_step(config_of(row), model, row["gpus"], row["engine"])


@functools.cache
def compare() -> tuple[Comparison, ...]:
    """Return every measured run with its plan."""
    results = ROOT / "bench/results"
    older = read_rows(sorted(results.glob("training-?-nvidia-h200.jsonl")))
    files = itertools.chain(*(sorted(results.glob(name)) for name in _NEWER))
    newer = itertools.chain(*map(_newest, files))
    return (
        *(_compare_older(row) for row in older if not _is_outdated(row)),
        *(_compare(row) for row in newer if _is_comparable(row)),
    )


def _is_comparable(row: Row) -> bool:
    """Whether a row says all that its plan needs."""
    return row["mask"] == "causal"


def _newest(file: Path) -> Iterable[Row]:
    """Return the last row of each run. Those before it are of older commits."""
    rows = read_rows([file])
    return {(row.get("case"), str(row.get("more")), row["engine"]): row for row in rows}.values()


def _is_outdated(row: Row) -> bool:
    """Whether blocks saved more than they do now, or sparse attention worked in another way."""
    saved = row.get("checkpointing_blocks") or row["checkpointing"] == "none"
    return bool(saved or row.get("sparse") or row["seq_len"] == 1228800 or "error" in row)


def _compare_older(row: Row) -> Comparison:
    """Plan a run from before runs chose what they keep by a plan."""
    step = step_of(row)
    seconds = step_seconds(step, H200).total
    return Comparison(row, config_of(row), step.memory.total / GIB, seconds)


def _compare(row: Row) -> Comparison:
    """Plan a run as pretrain.py does it."""
    mixers = row.get("mixers") or first_layers(PRESETS[row["model"]], row["layers"]).mixers
    model = _write_model(row["model"], row["layers"], tuple(mixers or ()))
    config = dataclasses.replace(config_of(row), model=model, sparse=row["sparse"])
    hardware = next(x for name, x in GPUS.items() if name.upper() in row["gpu_name"])
    planned = as_run(plan(config, Cluster(row["gpus"], hardware.gib, hardware), row["engine"]))
    memory = planned.step.memory.total / GIB
    return Comparison(row, planned.config, memory, planned.seconds.total)


@functools.cache
def _write_model(name: str, layers: int, mixers: tuple[str, ...]) -> str:
    """Write the configuration of a model with other layers. Return the file."""
    model = dataclasses.replace(PRESETS[name], num_layers=layers, mixers=mixers or None)
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(model.to_dict(), file)
    atexit.register(os.unlink, file.name)
    return file.name


def runs_table() -> str:
    """Return the table of measured runs and their plans."""
    header = ["model, layers", "engine", "GPUs", "tokens", "options"]
    header += ["GiB", "plan", "s/step", "plan", "used for"]
    return table(header, [_run_cells(each) for each in compare()])


def _run_cells(each: Comparison) -> list[str | int]:
    row = each.row
    more = ["--offload-optimizer"] if each.config.offload_optimizer else []
    more += ["--fp8"] if each.config.fp8 else []
    more += ["sparse"] if row.get("sparse") else []
    return [
        f"{row['model']}, {row['layers']}",
        row["engine"],
        f"{row['gpus']} {each.gpu}",
        f"{each.config.micro_batch_size} x {tokens(row['seq_len'])}",
        " ".join(saving_flags(each.config) + more) or "none",
        f"{row['peak_gib']:.1f}",
        f"{each.gib:.1f} ({each.gib_error:+.1%})",
        f"{row['step_s']:.2f}",
        f"{each.seconds:.2f} ({each.seconds_error:+.0%})",
        each.use,
    ]


def plans_table() -> str:
    """Return the table of the errors of plans: a line for all runs of one kind."""
    kinds: dict[tuple, list[Comparison]] = {}
    for each in compare():
        kinds.setdefault(each.kind, []).append(each)
    header = ["GPUs", "engine", "steps", "runs", "tokens of a sequence"]
    header += ["error of GiB", "error of seconds", "used for"]
    return table(header, [_kind_cells(*item) for item in sorted(kinds.items())])


def _kind_cells(kind: tuple, runs: Sequence[Comparison]) -> list[str | int]:
    *names, use = kind
    lengths = [each.row["seq_len"] for each in runs]
    columns = (
        _join_ends(tokens(min(lengths)), tokens(max(lengths))),
        _join_ends(*(f"{end(each.gib_error for each in runs):+.1%}" for end in (min, max))),
        _join_ends(*(f"{end(each.seconds_error for each in runs):+.0%}" for end in (min, max))),
    )
    return [*names, len(runs), *columns, use]


def _join_ends(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


LENGTHS = (32768, 131072, 1048576)
# for each model, numbers of GPUs and their GiB
_GPUS = {
    "minicpm4-0.5b": ((1, 24), (1, 80), (1, 139), (8, 80)),
    "minicpm4-8b": ((1, 80), (1, 139), (2, 80), (2, 139), (8, 24), (8, 80), (8, 139)),
}
_HOST_GIB = 128.0  # for each GPU


def options_table() -> str:
    """Return the table of recommended options."""
    rows = [recommended(model, *each) for model, gpus in _GPUS.items() for each in gpus]
    return table(["model", "GPUs", "GiB", *map(tokens, LENGTHS)], rows)


def recommended(model: str, gpus: int, gib: int) -> list[str | int]:
    """Return a row: the options that are recommended for each length."""
    config = TrainConfig(
        model=model,
        dtype="bf16",
        seq_len=LENGTHS[0],
        sp_size=gpus,
        batch_size=1,
        micro_batch_size=1,
    )
    run = plan(config, Cluster(gpus, gib, H200, _HOST_GIB), "bmtrain")
    found = [recommend(with_options(run, seq_len=length)) for length in LENGTHS]
    texts = [_describe(one.config) if one else "does not fit" for one in found]
    return [model, gpus, gib, *texts]


def _describe(config: TrainConfig) -> str:
    """Return the options of a configuration, each with its value."""
    words = saving_flags(config) + ["--offload-optimizer"] * config.offload_optimizer
    pairs = re.sub(r" (?=--)", "\n", " ".join(words)).splitlines()
    return " ".join(f"`{pair}`" for pair in pairs) or "none"


# model, GPUs, their kind, engine, whether attention is sparse, whether the optimizer is on the host
CHUNKED = (
    ("minicpm4-0.5b", 1, "h100", "torch", True, False),
    ("minicpm4-8b", 2, "h200", "torch", True, False),
    ("minicpm4-8b", 2, "h100", "bmtrain", True, True),
    ("minicpm-sala", 2, "h200", "torch", True, False),
    ("minicpm-sala", 8, "h200", "torch", True, False),
    ("minicpm4-8b", 8, "h200", "torch", False, False),
    ("minicpm4-8b", 8, "h100", "torch", False, False),
    ("llama3-8b", 8, "h200", "torch", False, False),
    ("minicpm-2b", 1, "h200", "torch", False, False),
)
_RANK_CHUNK = 16384
_WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("`full` `--mlp-tile 16384`", {"checkpointing": "full", "mlp_tile": 16384}),
    (
        "and `--checkpointing-every 4`",
        {"checkpointing": "full", "mlp_tile": 16384, "checkpointing_every": 4},
    ),
    ("`--chunk`, `selective`", {"checkpointing": "selective", "chunk": _RANK_CHUNK}),
    ("`--chunk`, `full`", {"checkpointing": "full", "chunk": _RANK_CHUNK}),
    ("of 8K, `full`", {"checkpointing": "full", "chunk": 8192}),
)


def chunks_table() -> str:
    """Return the table of the longest sequences with and without chunks."""
    header = ["model", "GPUs", "engine", "kept", "inputs", *(name for name, _ in _WAYS)]
    return table(header, [in_chunks(*run) for run in CHUNKED])


def in_chunks(
    model: str, gpus: int, gpu: str, engine: str, is_sparse: bool, offloads_optimizer: bool
) -> list[str | int]:
    """Return a row: KiB of a token, and the longest sequence of each way."""
    config = TrainConfig(
        model=model,
        dtype="bf16",
        seq_len=4 * _RANK_CHUNK * gpus,
        sp_size=gpus,
        batch_size=1,
        micro_batch_size=1,
        sparse={} if is_sparse else None,
        offload_optimizer=offloads_optimizer,
    )
    run = plan(config, Cluster(gpus, GPUS[gpu].gib, GPUS[gpu]), engine)
    kept, inputs = kept_of_token(run, _RANK_CHUNK * gpus), inputs_of_token(run)
    longest = []
    for _, options in _WAYS:
        chunk = options.get("chunk") and options["chunk"] * gpus
        longest.append(find_longest(with_options(run, **options | {"chunk": chunk})))
    more = " sparse" * is_sparse + " `--offload-optimizer`" * offloads_optimizer
    sizes = [f"{nbytes / 1024:.0f}" for nbytes in (kept, inputs)]
    return [model + more, f"{gpus} {gpu.upper()}", engine, *sizes, *map(tokens, longest)]


TABLES = {"plans": plans_table, "options": options_table, "chunks": chunks_table}


def main() -> None:
    def write(found: re.Match[str]) -> str:
        return f"{found[1]}{TABLES[found[2]]()}\n{found[3]}"

    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(runs_table())
    PAGE.write_text(MARKED.sub(write, PAGE.read_text()))


if __name__ == "__main__":
    main()
