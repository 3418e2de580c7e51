"""Records of a run: lines that are broken, disks that are full, and terminals that are gone."""

import io
import json
import os
import sys
import threading
import time

import pytest
from matplotlib.figure import Figure

from train.base.files import printing
from train.base.folders import lock
from train.loop.metrics import Metrics

GOOD = [{"step": step, "loss": 1.0 / step, "samples": step * 4} for step in range(1, 5)]


BROKEN = [
    *(b'{"step": 3, "loss": 0.', b"", b"\xff\xfe\x80 not UTF-8", b"3", b'{"loss": 1.0}'),
    *(b'{"step": true}', b'{"step": 2.5, "loss": 1.0}', b'{"step": 2, "loss": "low"}'),
    *(b'{"step": 2, "loss": ' + b"9" * digits + b"}" for digits in (400, 5000)),
    b"[" * 100_000,
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("place", [0, 4])
def test_a_broken_line_is_dropped_and_reported(tmp_path, capsys, broken, place):
    lines = [json.dumps(record).encode() for record in GOOD]
    lines.insert(place, broken)
    end = b"" if broken and place == 4 else b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + end)
    metrics = Metrics(tmp_path, 4, 10)
    metrics.record(5, loss=0.2)
    metrics.progress(5)
    assert [record["step"] for record in metrics.records] == [1, 2, 3, 4, 5]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [*GOOD, {"step": 5, "loss": 0.2}]
    assert (tmp_path / "metrics.jsonl.dropped").read_bytes() == broken + b"\n"
    dropped = f"metrics.jsonl: line {place + 1} is not a record, and is dropped"
    assert dropped in capsys.readouterr().err


def test_a_value_that_was_not_finite_is_no_obstacle(tmp_path):
    metrics = Metrics(tmp_path, 0, 100)
    for step in range(1, 50):
        metrics.record(step, loss=float("nan") if step % 2 else 1.0, val_loss=float("inf"))
    metrics.close()
    again = Metrics(tmp_path, 49, 100)
    again.record(50, loss=2.0)
    again.progress(50)
    again.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("null") == 25 + 49
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is full")
def test_a_full_disk_is_named(tmp_path):
    metrics = Metrics(tmp_path, 0, 10)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, metrics._file.fileno())
    os.close(full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/metrics.jsonl'"):
        metrics.record(1, loss=1.0)
    (tmp_path / ".lock").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"'{tmp_path}/.lock'"):
        lock(tmp_path)


def test_a_disk_that_is_full_for_tensorboard_is_named_without_a_traceback(tmp_path, capsys):
    metrics = Metrics(tmp_path, 0, 10)
    worker = metrics._board.file_writer.event_writer._async_writer._worker

    def full(_data):
        raise OSError(28, "No space left on device")

    worker._record_writer.write = full
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/tensorboard'"):
        for step in range(1, 100):
            metrics.record(step, loss=1.0)
            worker.join(1.0)
    assert "Traceback" not in capsys.readouterr().err
    threading.excepthook = threading.__excepthook__


def lines_of(metrics: Metrics, steps: range, capsys, monkeypatch) -> list[str]:
    """Return the lines printed for steps of two seconds. The first one takes a minute more."""
    metrics._began = now = 1000.0  # a whole number, so that differences are exact
    for step in steps:
        now += 2 + 60 * (step == steps[0])
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        metrics.record(step, loss=1.0, lr=1e-3, tokens_per_s=1234.5, tokens=100 * step)
        metrics.progress(step)
    return capsys.readouterr().out.splitlines()


def test_a_log_has_a_line_for_some_steps_with_the_time_left_and_the_records_have_all(
    tmp_path, capsys, monkeypatch
):
    lines = lines_of(Metrics(tmp_path, 0, 3613, log_every=6), range(1, 14), capsys, monkeypatch)
    values = "loss 1.0000, lr 1.00e-03, 1,234 tokens/s"
    assert lines == [
        # the first step was slow
        f"step 1/3613: {values}, 100 tokens so far, 01:02 elapsed, ETA 62:12:24",
        f"step 6/3613: {values}, 600 tokens so far, 01:12 elapsed, ETA 2:00:14",
        f"step 12/3613: {values}, 1,200 tokens so far, 01:24 elapsed, ETA 2:00:02",
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 13


def test_the_last_step_and_the_first_after_a_resume_have_lines_too(tmp_path, capsys, monkeypatch):
    lines = lines_of(Metrics(tmp_path, 24, 27), range(25, 28), capsys, monkeypatch)
    assert [line.split(":")[0] for line in lines] == ["step 25/27", "step 27/27"]
    assert lines[-1].endswith("2,700 tokens so far, 01:06 elapsed, ETA 00:00")


def test_a_terminal_has_a_bar_with_every_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    assert lines_of(Metrics(tmp_path, 0, 3), range(1, 4), capsys, monkeypatch) == []
    assert "training: 100%" in sys.stderr.getvalue()
    assert "300 tokens so far" in sys.stderr.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch):
    left = []
    monkeypatch.setattr("train.base.files.leave_terminal", left.append)
    with printing():
        raise OSError(5, "Input/output error")
    assert left == [(1, 2)]
    with pytest.raises(OSError, match="No space left on device: 'stdout'"), printing():
        raise OSError(28, "No space left on device")


def test_a_curve_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, capsys):
    def full(_figure, file, **_options):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    metrics = Metrics(tmp_path, 0, 10)
    metrics.draw()
    before = (tmp_path / "loss.png").read_bytes()
    monkeypatch.setattr(Figure, "savefig", full)
    metrics.draw()  # nothing, since there is no more
    assert not capsys.readouterr().out
    metrics.record(1, loss=1.0)
    metrics.draw()
    assert (tmp_path / "loss.png").read_bytes() == before
    assert not list(tmp_path.glob(".*partial"))
    assert "loss.png was not drawn: OSError: [Errno 28] No space" in capsys.readouterr().out
