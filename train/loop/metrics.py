"""The output of a run on rank 0: a progress bar, JSON lines, TensorBoard events and a loss curve.

metrics.jsonl   a record a line, as docs/runs.md describes. When a run resumes, records
                after its checkpoint move to metrics.jsonl.dropped
tensorboard/    the same values
loss.png        the curves, drawn at each save and at the end
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from train.base.files import drawing, print_error, printing, replacing, writing
from train.base.wording import counted
from train.loop.wandb_run import WandbRun

_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "skipped": "skipped ({} in all)".format,
    "grad_norm": "gradient norm {:.3f}".format,
    "lr": "lr {:.2e}".format,
    "documents": partial(counted, noun="document"),
    "instances": partial(counted, noun="instance"),
    "targets": partial(counted, noun="target"),
    "balance": "balance {:.3f}".format,
    "tokens_per_s": "{:,.0f} tokens/s".format,
    "mfu": "MFU {:.1%}".format,
    "peak_gib": "{:.1f} GiB".format,
    "tokens": partial(counted, noun="token so far", plural="tokens so far"),
}


class Metrics:
    """The records of a run after step `start`. Later ones are put aside. `wandb` also gets them.
    Without a terminal, a line is printed every `log_every` steps and at the ends.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        steps: int,
        log_every: int = 10,
        wandb: WandbRun | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.records = _keep_until(folder / "metrics.jsonl", start)
        self._file = open(folder / "metrics.jsonl", "a")
        threading.excepthook = _print_write_error
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        self.steps, self._log_every, self._wandb = steps, log_every, wandb
        self._drawn = -1  # records
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step shown, and when
        self._bar = tqdm(
            total=steps,
            initial=start,
            unit="step",
            desc="training",
            dynamic_ncols=True,
            disable=None,
        )

    def record(self, step: int, **values: float) -> None:
        """Write one record. Floats keep full precision."""
        record = {"step": step, **values}
        self.records.append(record)
        with writing(self._file.name):
            self._file.write(
                json.dumps({k: v if math.isfinite(v) else None for k, v in record.items()}) + "\n"
            )
            self._file.flush()
        with writing(self.folder / "tensorboard"):
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.record(step, values)

    def has(self, step: int, name: str) -> bool:
        return any(record["step"] == step and name in record for record in reversed(self.records))

    def progress(self, step: int) -> None:
        """Show the last record, which belongs to `step`."""
        record, now = self.records[-1], time.monotonic()
        first = self._first = self._first or (step, now)
        line = ", ".join(text(record[name]) for name, text in _SHOWN.items() if name in record)
        shown = step in (first[0], self.steps) or step % self._log_every == 0
        with printing():
            if not self._bar.disable:
                self._bar.set_postfix_str(line, refresh=False)
                self._bar.update()
            elif shown:
                times = self._times(first, step, now)
                print(f"step {step}/{self.steps}: {line}, {times}", flush=True)

    def _times(self, shown: tuple[int, float], step: int, now: float) -> str:
        """Return the elapsed time and the time left, by the mean step since one was `shown`."""
        first, since = shown
        seconds = (now - since) / (step - first) if step > first else now - self._began
        elapsed, left = (
            tqdm.format_interval(x) for x in (now - self._began, seconds * (self.steps - step))
        )
        return f"{elapsed} elapsed, ETA {left}"

    def say(self, text: str) -> None:
        with printing():
            self._bar.write(text)
            sys.stdout.flush()

    def draw(self) -> None:
        """Draw loss.png if there are new records. A failure is printed and does not end the run."""
        if self._drawn == len(self.records):
            return
        try:
            plot_losses(self.records, self.folder / "loss.png")
            self._drawn = len(self.records)
        except Exception as error:  # noqa: BLE001 - matplotlib may raise anything
            self.say(f"loss.png was not drawn: {type(error).__name__}: {error}")

    def close(self) -> None:
        with printing():
            self._bar.close()
        with writing(self.folder / "tensorboard"):
            self._board.close()
        if self._wandb:
            self._wandb.close()
        with writing(self._file.name):
            self._file.close()
        self.draw()


class NoMetrics:
    """Metrics of a rank that records and prints nothing, since rank 0 does."""

    def has(self, step: int, name: str) -> bool:
        return False

    def record(self, step: int, **values: float) -> None: ...
    def progress(self, step: int) -> None: ...
    def say(self, text: str) -> None: ...
    def draw(self) -> None: ...
    def close(self) -> None: ...


def plot_losses(records: list[dict[str, Any]], file: Path) -> None:
    with drawing(file) as (_, axes):
        for name, label in (("loss", "training"), ("val_loss", "validation")):
            points = [(r["step"], r[name]) for r in records if name in r]
            if points:
                marker = "o" if name == "val_loss" else None
                axes.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1.2)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()


def _keep_until(file: Path, step: int) -> list[dict[str, Any]]:
    """Keep the records up to `step` in a file, and return them. Move others to FILE.dropped."""
    records, kept, dropped = [], [], []
    for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else []):
        record = _parse(line)
        if record is None:
            print(f"{file}: line {number + 1} is not a record, and is dropped", file=sys.stderr)
        if record is None or record["step"] > step:
            dropped.append(line + b"\n")
        else:
            records.append(record)
            kept.append(line + b"\n")
    rest = file.with_name(file.name + ".dropped")
    if dropped:
        with writing(rest), open(rest, "ab") as stream:
            stream.writelines(dropped)
    with replacing(file) as partial:
        partial.write_bytes(b"".join(kept))
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a record: a step and numbers, NaN for each null. Return None for any other line."""
    try:
        record = json.loads(line)
        values = {name: math.nan if value is None else value for name, value in record.items()}
        for value in values.values():
            # raises TypeError unless it is a number, OverflowError if a float cannot hold it
            math.isfinite(value)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return values if type(values.get("step")) is int else None


def _print_write_error(arguments: threading.ExceptHookArgs) -> None:
    """Print one line for a thread, as TensorBoard's, that dies of a failed write."""
    if isinstance(arguments.exc_value, OSError):
        name = arguments.thread.name if arguments.thread else "a thread"
        print_error(f"{name}: {arguments.exc_value}")
    else:
        threading.__excepthook__(arguments)
