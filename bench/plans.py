"""Compares plans with measured training runs, and writes the table of docs/planning.md.

    python bench/plans.py

It plans every row of bench/results/training-*.jsonl, on this machine without a GPU.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# As a script: Python put this folder first in the path, but imports begin at the repository.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.tables import Row, read_rows, tokens
from models.config import PRESETS
from train.planning.hardware import GIB, H200
from train.planning.memory import Step, plan_step
from train.planning.report import saving_flags
from train.planning.seconds import step_seconds
from train.run.config import TrainConfig
from train.run.options import parse_options

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/planning.md"
MARKED = re.compile(r"(<!-- plans -->\n).*?(<!-- end -->)", re.DOTALL)

# The runs that the rates of train/planning/hardware.py are from: model, layers, GPUs, tokens,
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


def compare() -> Iterator[Comparison]:
    """Yield every measured run with its plan."""
    files = sorted((ROOT / "bench/results").glob("training-*.jsonl"))
    for row in read_rows(files):
        if "error" not in row:
            step = step_of(row)
            seconds = step_seconds(step, H200).total
            yield Comparison(row, config_of(row), step.memory.total / GIB, seconds)


def table() -> str:
    """Return the table of the page."""
    lines = [
        "| model, layers | engine | GPUs | tokens | options | GiB | plan | s/step | plan | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in compare():
        row = each.row
        sparse = ["sparse"] if row.get("sparse") else []
        cells = (
            f"{row['model']}, {row['layers']}",
            row["engine"],
            row["gpus"],
            tokens(row["seq_len"]),
            " ".join(saving_flags(each.config) + sparse),
            f"{row['peak_gib']:.1f}",
            f"{each.gib:.1f} ({each.gib / row['peak_gib'] - 1:+.1%})",
            f"{row['step_s']:.2f}",
            f"{each.seconds:.2f} ({each.seconds / row['step_s'] - 1:+.0%})",
            "rates" if each.calibrates else "check",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    PAGE.write_text(MARKED.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
