"""Compares plans with measured training runs, and writes the tables of docs/planning.md.

    python bench/plans.py

It plans every row of bench/results/training-*.jsonl, and runs on some numbers of GPUs. It takes a
minute and needs no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.tables import Row, read_rows, table, tokens
from models.config import PRESETS
from train.planning.memory import Step, plan_step
from train.planning.report import saving_flags
from train.planning.search import Cluster, plan, recommend, with_options
from train.planning.seconds import GIB, H200, step_seconds
from train.run.config import TrainConfig
from train.run.options import parse_options

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/planning.md"
MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# The runs that the rates of train/planning/seconds.py are from: model, layers, GPUs, tokens,
# checkpointing.
CALIBRATION = {
    ("minicpm-2b", 40, 1, 32768, "selective"),
    ("minicpm4-8b", 8, 1, 32768, "selective"),
    ("minicpm4-8b", 4, 1, 131072, "selective"),
}


@dataclass(frozen=True)
class Comparison:
    """A measured run and its plan, in GiB and seconds."""

    row: Row
    config: TrainConfig
    gib: float
    seconds: float

    @property
    def calibrates(self) -> bool:
        """Whether rates are from this run."""
        row = self.row
        names = ("model", "layers", "gpus", "seq_len", "checkpointing")
        return tuple(row[name] for name in names) in CALIBRATION and not row["offload"]


def config_of(row: Row) -> TrainConfig:
    """Return the settings of a measured run."""
    _, more = parse_options(row.get("more", []))
    names = "model", "seq_len", "batch_size", "dtype", "checkpointing", "offload"
    later = "checkpointing_blocks", "checkpointing_every", "mlp_tile"  # older rows lack some
    return TrainConfig(
        **{name: row[name] for name in names},
        **{name: row.get(name) for name in later},
        **more,
        sp_size=row["sp"],
        micro_batch_size=1,
    )


def step_of(row: Row) -> Step:
    """Plan a measured run."""
    model = PRESETS[row["model"]]
    model = dataclasses.replace(model, num_layers=row["layers"], sparse=row.get("sparse"))
    return plan_step(config_of(row), model, row["gpus"], row["engine"])


@functools.cache
def compare() -> tuple[Comparison, ...]:
    """Return every measured run with its plan."""
    files = sorted((ROOT / "bench/results").glob("training-*.jsonl"))
    rows = (row for row in read_rows(files) if "error" not in row)
    return tuple(_compare(row) for row in rows if not _is_outdated(row))


def _is_outdated(row: Row) -> bool:
    """Whether blocks saved more than they do now, or sparse attention worked in another way."""
    saved = row.get("checkpointing_blocks") or row["checkpointing"] == "none"
    return bool(saved or row.get("sparse") or row["seq_len"] == 1228800)


def _compare(row: Row) -> Comparison:
    step = step_of(row)
    seconds = step_seconds(step, H200).total
    return Comparison(row, config_of(row), step.memory.total / GIB, seconds)


def plans_table() -> str:
    """Return the table of measured runs and their plans."""
    header = ["model, layers", "engine", "GPUs", "tokens", "options"]
    header += ["GiB", "plan", "s/step", "plan", "used for"]
    return table(header, [_plan_cells(each) for each in compare()])


def _plan_cells(each: Comparison) -> list[str | int]:
    row = each.row
    more = ["--offload-optimizer"] if each.config.offload_optimizer else []
    more += ["sparse"] if row.get("sparse") else []
    return [
        f"{row['model']}, {row['layers']}",
        row["engine"],
        row["gpus"],
        tokens(row["seq_len"]),
        " ".join(saving_flags(each.config) + more),
        f"{row['peak_gib']:.1f}",
        f"{each.gib:.1f} ({each.gib / row['peak_gib'] - 1:+.1%})",
        f"{row['step_s']:.2f}",
        f"{each.seconds:.2f} ({each.seconds / row['step_s'] - 1:+.0%})",
        "rates" if each.calibrates else "check",
    ]


MODELS, LENGTHS = ("minicpm4-0.5b", "minicpm4-8b"), (32768, 131072, 1048576)
_HOST_GIB = 128.0  # for each GPU


def options_table() -> str:
    """Return the table of recommended options."""
    settings = itertools.product(MODELS, (1, 2, 8), (24, 80, 139))
    return table(
        ["model", "GPUs", "GiB", *map(tokens, LENGTHS)], [recommended(*x) for x in settings]
    )


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


TABLES = {"plans": plans_table, "options": options_table}


def main() -> None:
    def write(found: re.Match[str]) -> str:
        return f"{found[1]}{TABLES[found[2]]()}\n{found[3]}"

    PAGE.write_text(MARKED.sub(write, PAGE.read_text()))


if __name__ == "__main__":
    main()
