"""The application as its users run it: pretrain.py with real processes, and resumed runs.

test_interrupts.py has runs that are stopped and killed.
"""

import itertools
import json
import sys
from pathlib import Path

import pytest

from tests.launcher import ROOT, run_script
from tests.preparing import prepare
from tests.runs import forget, read_records, records
from tests.test_documents import WINDOWED
from train import export
from train.checkpoints import checkpoint

pytestmark = pytest.mark.slow

STEPS = 6  # of a run, unless stated otherwise; an epoch ends in the 5th
LENGTHS = (17, 90, 5, 41, 160, 3, 28)  # of documents
TEXT = "".join(f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in range(27))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tokens of short and long documents, and a small model, with windows. The last sequence has
    few targets.
    """
    folder = tmp_path_factory.mktemp("train")
    cuts = [sum(LENGTHS[i % len(LENGTHS)] for i in range(n)) for n in range(60)]
    documents = [TEXT[a:b] for a, b in itertools.pairwise(cuts) if a < len(TEXT)]
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents)
    )
    (folder / "model.json").write_text(json.dumps(WINDOWED.to_dict()))
    prepare("--input", folder / "text.jsonl", "--output", folder / "data")
    return folder


def command(folder: Path, output: str, **options) -> list[str]:
    defaults = {"model": folder / "model.json", "data": folder / "data/train", "seq_len": 61}
    defaults |= {"batch_size": 4, "micro_batch_size": 2, "steps": STEPS, "lr": 0.003}
    defaults |= {"save_every": 0}
    given = {**defaults, "output": folder / output, **options}
    pairs = [("--" + k.replace("_", "-"), str(v)) for k, v in given.items() if v is not None]
    flags = [text for pair in pairs for text in pair]
    return [sys.executable, str(ROOT / "train/pretrain.py"), *flags]


def train(folder: Path, output: str, code: int = 0, draws: bool = False, **options) -> str:
    """Run pretrain.py to its end. Return its output."""
    [_, *line] = command(folder, output, **options)
    ended, printed = run_script(options.get("processes"), *line, draws=draws)
    assert ended == code, printed
    return printed


def curve(folder: Path, output: str, *names: str) -> list[tuple]:
    """Return (step, values...) of every training step."""
    steps = [r for r in read_records(folder / output) if "loss" in r]
    return [(r["step"], *(r[name] for name in names)) for r in steps]


@pytest.fixture(scope="module")
def whole_run(folder) -> list[tuple]:
    """Losses and gradient norms of one process, with documents and windows: what all other ways
    must reproduce.
    """
    evaluated = {"val_data": folder / "data/train", "eval_every": 3, "eval_sequences": 5}
    printed = train(folder, "whole", draws=True, micro_batch_size=1, **evaluated)
    shown = (
        "documents kept apart, each after begin token 256, a window of 6 tokens in 2 of 3 layers"
    )
    assert shown in printed
    return curve(folder, "whole", "loss", "grad_norm")


def test_losses_and_gradient_norms_do_not_depend_on_the_ranks(folder, whole_run):
    """In fp32, which rounds at 6e-8: losses differ by some of that, gradient norms, of many small
    numbers, by more.
    """
    options = {"sp_size": 4, "ulysses_size": 2, "micro_batch_size": 4, "stop_after": 3}
    train(folder, "usp", processes=4, **options)
    check_curve(folder, "usp", whole_run[:3])


def test_nor_on_chunks(folder, whole_run):
    """Nor does the loss of the validation data. A run may resume with other chunks."""
    options = {"processes": 4, "sp_size": 2, "micro_batch_size": 1, "eval_every": 3}
    options |= {"val_data": folder / "data/train", "eval_sequences": 5}
    train(folder, "chunks", chunk=31, checkpointing="full", stop_after=1, **options)
    train(folder, "chunks", chunk=21, resume="auto", stop_after=3, **options)
    check_curve(folder, "chunks", whole_run[:3])
    mine, expected = (records(folder / name, "val_loss")[3] for name in ("chunks", "whole"))
    assert mine == pytest.approx(expected, rel=1e-6)


def check_curve(folder: Path, output: str, expected: list[tuple]) -> None:
    for mine, other in zip(curve(folder, output, "loss", "grad_norm"), expected, strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-6)
        assert mine[2] == pytest.approx(other[2], rel=2e-6)


def test_the_run_learns_and_leaves_its_records(folder, whole_run):
    assert whole_run[-1][1] < whole_run[0][1] - 0.2
    output = folder / "whole"
    assert {"metrics.jsonl", "tensorboard", "loss.png", "tokenizer", f"step_{STEPS:08d}"} <= {
        p.name for p in output.iterdir()
    }
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = read_records(output)
    assert [r["step"] for r in rows if "val_loss" in r] == [3, 6]
    names = {"lr", "tokens_per_s", "tflops_per_rank", "samples"}
    names |= {"data_s", "forward_s", "backward_s"}
    assert names <= rows[0].keys()
    assert rows[0]["documents"] > 4  # more than sequences
    assert rows[0]["balance"] == 1.0  # of one rank


def test_resuming_is_as_not_stopping(folder, whole_run):
    """Bit for bit; across the end of an epoch; with an abandoned end of metrics.jsonl; with tiles
    of the feed-forward.
    """
    options = {"schedule": "linear", "warmup_steps": 1, "save_every": 2, "keep_last": 9}
    options |= {"mlp_tile": 50}
    train(folder, "resumed", **options)
    expected = curve(folder, "resumed", "loss", "grad_norm", "lr", "samples")
    forget(folder / "resumed", 4, 6)
    printed = train(folder, "resumed", resume="auto", **options)
    assert "resumed after step 2" in printed
    assert curve(folder, "resumed", "loss", "grad_norm", "lr", "samples") == expected
    lines = (folder / "resumed/metrics.jsonl.dropped").read_text().splitlines()
    dropped = [(r["step"], r["loss"]) for r in map(json.loads, lines) if "loss" in r]
    assert dropped == [row[:2] for row in expected[2:]]
    (folder / "other.txt").write_text(TEXT[1:] + TEXT[:1])
    prepare("--input", folder / "other.txt", "--output", folder / "other")
    printed = train(
        folder, "resumed", code=2, resume="auto", data=folder / "other/train", **options
    )
    assert "was reading other data: tokens" in printed
    assert "has checkpoints: give --resume auto" in train(folder, "resumed", code=2, **options)


def test_resuming_on_other_ranks_keeps_everything(folder, whole_run):
    """Go from 2 sequence parallel ranks to 2 data parallel pairs, then to a double ring of 4.

    No sample is lost or repeated.
    """
    options = {"sp_size": 2, "resume": "auto"}
    train(folder, "moved", processes=2, stop_after=2, **options)
    other = {"strategy": "all-gather", "layout": "contiguous"}
    train(folder, "moved", processes=4, stop_after=4, **options, **other)
    options |= {"sp_size": 4, "inner_size": 2, "micro_batch_size": 4}
    train(folder, "moved", processes=4, **options)
    expected = [pytest.approx(row, rel=1e-5) for row in whole_run]
    assert curve(folder, "moved", "loss", "grad_norm") == expected


def test_bf16_follows_fp32(folder, whole_run):
    """To 1e-2: weights and activations have 8 bits."""
    options = {"sp_size": 2, "micro_batch_size": 4, "dtype": "bf16", "stop_after": 4}
    train(folder, "bf16", processes=2, **options)
    for mine, expected in zip(curve(folder, "bf16", "loss"), whole_run[:4], strict=True):
        assert mine[1] == pytest.approx(expected[1], rel=1e-2)


def test_a_run_that_ends_in_skipped_steps_keeps_all_it_has_and_is_no_success(folder):
    """bf16 overflows at once with such a rate. The checkpoint before is whole and finite."""
    options = {"lr": 1e30, "schedule": "linear", "warmup_steps": 0, "save_every": 1, "keep_last": 1}
    output = folder / "poisoned"
    good = (
        f"; the last good checkpoint is {output}/step_00000001; to resume from it, give --resume "
        f"{output}/step_00000001"
    )
    printed = train(folder, "poisoned", code=2, steps=6, **options)
    assert "5 steps in a row were skipped: give a smaller --lr than 1e+30; " in printed
    assert good in printed
    assert "NaN" not in (output / "metrics.jsonl").read_text()
    names = [path.name for path in checkpoint.listed(output)]
    assert names == ["step_00000006", "step_00000001"]
    printed = train(folder, "poisoned", code=2, steps=20, max_skips=7, resume="auto", **options)
    assert "7 steps in a row were skipped: " in printed
    assert good in printed


def test_weights_go_to_bmtrains_format_and_come_back(folder, whole_run):
    """The first loss of a run from them is the last validation loss of the run that made them."""
    export.main(
        ["--run", str(folder / "whole"), "--output", str(folder / "bmtrain"), "--format", "bmtrain"]
    )
    source, shape = folder / "bmtrain/model.pt", folder / "bmtrain/model.json"
    options = {"val_data": folder / "data/train", "eval_sequences": 5, "steps": 1, "lr": 1e-30}
    train(folder, "from-bmtrain", model=shape, init_from=source, **options)
    runs = (read_records(folder / name) for name in ("whole", "from-bmtrain"))
    last, first = (records[-1]["val_loss"] for records in runs)
    assert first == pytest.approx(last, rel=1e-6)
    printed = train(folder, "from-other", code=2, model="cpm-tiny", init_from=source)
    assert "expected weights of 4 layers (num_layers of --model cpm-tiny)" in printed


def test_wrong_runs_are_refused_in_a_line(folder):
    printed = train(folder, "wrong", code=2, processes=2, device="cuda")
    assert "--device cuda needs a GPU for each of 2 processes" in printed
    assert "Traceback" not in printed
