"""The application as its users run it: pretrain.py with real processes, stopped, killed and
resumed.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from models.huggingface import config_to_hf, fold_scalings, load_cpm, save_weights
from tests.helpers import ROOT, run_script
from tests.test_data import prepare
from tests.test_documents import WINDOWED
from tests.test_model import SMALL, initialized
from train import export, generate
from train.base.lock import lock
from train.checkpoints import checkpoint
from train.checkpoints.checkpoint import Checkpoint

pytestmark = pytest.mark.slow

STEPS = 12  # of a run, unless said otherwise; an epoch ends in the 11th
LENGTHS = (17, 90, 5, 41, 160, 3, 28)  # of documents
TEXT = "".join(f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in range(59))


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
    defaults = {
        "model": folder / "model.json",
        "data": folder / "data/train",
        "seq_len": 61,
        "batch_size": 4,
        "steps": STEPS,
    }
    defaults |= {"micro_batch_size": 1, "save_every": 0, "lr": 0.003}
    pairs = {**defaults, "output": folder / output, **options}.items()
    flags = [text for name, value in pairs for text in ("--" + name.replace("_", "-"), str(value))]
    return [sys.executable, str(ROOT / "train/pretrain.py"), *flags]


def train(folder: Path, output: str, code: int = 0, **options) -> str:
    """Runs pretrain.py to its end; returns what it said."""
    [_, *line] = command(folder, output, **options)
    ended, said = run_script(options.get("processes"), *line)
    assert ended == code, said
    return said


def curve(folder: Path, output: str, *names: str) -> list[tuple]:
    """(step, values...) of every training step."""
    lines = (folder / output / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], *(r[name] for name in names)) for r in records if "loss" in r]


@pytest.fixture(scope="module")
def whole_run(folder) -> list[tuple]:
    """Losses and gradient norms of one process, with documents and windows: what all other ways
    must reproduce.
    """
    said = train(folder, "whole", val_data=folder / "data/train", eval_every=6, eval_sequences=5)
    assert (
        "documents told apart by documents.bin, each after begin token 256, a window of 6 "
        "tokens in 2 of 3 layers" in said
    )
    return curve(folder, "whole", "loss", "grad_norm")


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {"sp_size": 2, "layout": "contiguous"}),
        (4, {"sp_size": 4, "micro_batch_size": 2}),
        (4, {"sp_size": 4, "inner_size": 2, "micro_batch_size": 4}),
        (4, {"sp_size": 2, "micro_batch_size": 2, "strategy": "all-gather"}),
        (2, {"sp_size": 1}),
        (4, {"sp_size": 4, "ulysses_size": 2, "micro_batch_size": 4}),
    ],
    ids=["sp2-contiguous", "sp4", "double-ring", "dp2xsp2", "dp2", "usp"],
)
def test_losses_and_gradient_norms_do_not_depend_on_the_ranks(
    folder, whole_run, processes, options
):
    """In fp32, which rounds at 6e-8: losses differ by some of that, gradient norms, of many small
    numbers, by more.
    """
    name = f"run-{processes}-{'-'.join(f'{key}-{value}' for key, value in options.items())}"
    train(folder, name, processes=processes, **options)
    for mine, expected in zip(curve(folder, name, "loss", "grad_norm"), whole_run, strict=True):
        assert mine[:2] == pytest.approx(expected[:2], rel=1e-6)
        assert mine[2] == pytest.approx(expected[2], rel=2e-6)


def test_neither_do_those_of_whole_texts(folder, whole_run):
    """Without documents and windows, in zigzag; the losses are others."""
    (folder / "plain.json").write_text(json.dumps(SMALL.to_dict()))
    options = {"documents": "ignore", "model": folder / "plain.json", "steps": 5}
    curves = []
    for name, processes in (("text-1", 1), ("text-2", 2)):
        assert "documents not told apart" in train(
            folder, name, processes=processes, sp_size=processes, schedule="linear", **options
        )
        curves.append(curve(folder, name, "loss", "grad_norm"))
    for mine, expected in zip(*curves, strict=True):
        assert mine == pytest.approx(expected, rel=2e-6)
    assert abs(curves[0][0][1] - whole_run[0][1]) > 1e-4  # far above rounding


def test_the_run_learns_and_leaves_its_records(folder, whole_run):
    assert whole_run[-1][1] < whole_run[0][1] - 0.5
    output = folder / "whole"
    assert {"metrics.jsonl", "tensorboard", "loss.png", "tokenizer", f"step_{STEPS:08d}"} <= {
        p.name for p in output.iterdir()
    }
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "val_loss" in r] == [6, 12]
    names = {
        "lr",
        "tokens_per_s",
        "tflops_per_rank",
        "samples",
        "data_s",
        "forward_s",
        "backward_s",
    }
    assert names <= records[0].keys()
    assert records[0]["documents"] > 4  # more than sequences
    assert records[0]["balance"] == 1.0  # of one rank


def test_resuming_is_as_not_stopping(folder, whole_run):
    """Bit for bit; across the end of an epoch; with an abandoned end of metrics.jsonl."""
    train(folder, "resumed", schedule="linear", warmup_steps=1, save_every=5, keep_last=9)
    expected = curve(folder, "resumed", "loss", "grad_norm", "lr", "samples")
    for step in (10, 12):
        checkpoint._remove(folder / f"resumed/step_{step:08d}")
    options = {"schedule": "linear", "warmup_steps": 1, "save_every": 5, "keep_last": 9}
    said = train(folder, "resumed", resume="auto", **options)
    assert "resumed after step 5" in said
    assert curve(folder, "resumed", "loss", "grad_norm", "lr", "samples") == expected
    dropped = [
        json.loads(line)
        for line in (folder / "resumed/metrics.jsonl.dropped").read_text().splitlines()
    ]
    assert [(r["step"], r["loss"]) for r in dropped if "loss" in r] == [
        row[:2] for row in expected[5:]
    ]
    (folder / "other.txt").write_text(TEXT[1:] + TEXT[:1])
    prepare("--input", folder / "other.txt", "--output", folder / "other")
    said = train(folder, "resumed", code=2, resume="auto", data=folder / "other/train", **options)
    assert "was reading other data: tokens" in said
    assert "has checkpoints: give --resume auto" in train(folder, "resumed", code=2, **options)


def test_resuming_on_other_ranks_keeps_everything(folder, whole_run):
    """From 2 sequence parallel ranks to 2 data parallel ones, to 4 of both, with no sample lost or
    repeated.
    """
    train(folder, "moved", processes=2, sp_size=2, save_every=3, keep_last=9)
    for step in (6, 9, 12):
        checkpoint._remove(folder / f"moved/step_{step:08d}")
    train(folder, "moved", processes=2, sp_size=1, save_every=7, resume="auto", keep_last=9)
    checkpoint._remove(folder / "moved/step_00000012")
    train(folder, "moved", processes=4, sp_size=2, micro_batch_size=2, resume="auto", keep_last=9)
    for mine, expected in zip(curve(folder, "moved", "loss", "grad_norm"), whole_run, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)


def test_an_older_checkpoint_does_not_overwrite_newer_ones(folder, whole_run):
    train(folder, "older", steps=4, save_every=2)
    older = folder / "older/step_00000002"
    options = {"resume": older, "steps": 4}
    assert "checkpoints that" in train(folder, "older", code=2, **options)
    newest = folder / "older/step_00000004/state.json"
    newest.write_text(newest.read_text()[:100])
    assert "step_00000004 is damaged" in train(folder, "older", **options)
    said = train(folder, "branch", lr=0.001, **options)
    assert "changed since the checkpoint: --lr 0.003 -> 0.001" in said
    assert [step for step, _ in curve(folder, "branch", "loss")] == [3, 4]
    assert [path.name for path in checkpoint.listed(folder / "older")] == [
        "step_00000004",
        "step_00000002",
    ]
    assert "there is nothing to do: step 4 of 3 is done" in train(
        folder, "older", resume="auto", steps=3
    )


def test_bf16_follows_fp32(folder, whole_run):
    """To 1e-2: weights and activations have 8 bits."""
    train(folder, "bf16", processes=2, sp_size=2, micro_batch_size=4, dtype="bf16")
    for mine, expected in zip(curve(folder, "bf16", "loss"), whole_run, strict=True):
        assert mine[1] == pytest.approx(expected[1], rel=1e-2)


def test_a_run_that_diverges_stops_before_it_spoils_the_weights(folder):
    """bf16 overflows at once with such a rate; the checkpoint before is whole and finite."""
    said = train(
        folder,
        "diverging",
        code=2,
        steps=20,
        save_every=1,
        lr=1e30,
        schedule="linear",
        warmup_steps=0,
    )
    assert "skipped, the loss is nan; 1 in a row" in said or "skipped, the gradient norm is" in said
    assert (
        "10 steps in a row were skipped: give a smaller --lr than 1e+30, and if the last good "
        "checkpoint explodes all the same, start before it; the last good checkpoint is "
        f"{folder}/diverging/step_00000001; to go on" in said
    )
    assert "NaN" not in (folder / "diverging/metrics.jsonl").read_text()
    assert [p.name for p in (folder / "diverging").glob("step_*")] == ["step_00000001"]


def test_a_run_that_ends_in_skipped_steps_keeps_all_it_has_and_is_no_success(folder):
    options = {"lr": 1e30, "schedule": "linear", "warmup_steps": 0, "save_every": 1, "keep_last": 1}
    said = train(folder, "poisoned", code=2, steps=6, **options)
    saved = (
        f"{folder}/poisoned/step_00000001; to go on from it, give --resume "
        f"{folder}/poisoned/step_00000001"
    )
    assert "5 steps in a row were skipped: " in said
    assert f"; the last good checkpoint is {saved}" in said
    assert [path.name for path in checkpoint.listed(folder / "poisoned")] == [
        "step_00000006",
        "step_00000001",
    ]
    said = train(folder, "poisoned", code=2, steps=20, max_skips=7, resume="auto", **options)
    assert "7 steps in a row were skipped: " in said
    assert f"; the last good checkpoint is {saved}" in said


def test_a_folder_has_one_run_at_a_time(folder):
    first = start(command(folder, "shared", steps=100_000))
    wait_for_steps(folder / "shared", 3, first)
    before = (folder / "shared/metrics.jsonl").read_text()
    said = train(folder, "shared", code=2, processes=2, resume="auto")
    assert f"{folder}/shared is in use by process {first.pid} on " in said
    assert (folder / "shared/metrics.jsonl").read_text().startswith(before)
    first.send_signal(signal.SIGHUP)
    assert "to go on, run the same command with --resume auto" in first.communicate(timeout=600)[0]
    assert first.returncode == 0


@pytest.mark.parametrize(
    ("signum", "processes", "times"),
    [(signal.SIGTERM, 2, 1), (signal.SIGINT, 2, 2), (signal.SIGINT, 1, 2)],
)
def test_a_signal_ends_the_run_in_order(folder, signum, processes, times):
    """Once for all, though a terminal sends it to the launcher and to the ranks, and some launchers
    twice.
    """
    name = f"signal-{signum}-{processes}"
    arguments = command(folder, name, processes=processes, sp_size=processes, steps=100_000)
    run = start(arguments)
    wait_for_steps(folder / name, 3, run)
    for _ in range(times):
        os.killpg(run.pid, signum)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    assert said.count("stopping after this step; Ctrl-C once more ends the run now") == 1
    steps = len(curve(folder, name))
    assert f"stopped after step {steps}; to go on, run the same command with --resume auto" in said
    assert checkpoint.newest(folder / name) == folder / name / f"step_{steps:08d}"


def test_a_signal_before_training_ends_the_run_too(folder):
    arguments = command(folder, "early", processes=2, sp_size=2, steps=100_000)
    run = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(children(run.pid)) < 2:
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    assert "stopped before training began" in said or "to go on" in said


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_interrupt_ends_the_run_now(folder, whole_run, processes):
    """In a step that takes minutes, from which Python's own handlers would not be called."""
    name = f"insisted-{processes}"
    last = folder / name / f"step_{STEPS:08d}"
    shutil.copytree(folder / "whole", folder / name)
    long = {"steps": 30, "batch_size": 100_000, "resume": "auto"}
    run = start(command(folder, name, processes=processes, sp_size=processes, **long))
    said = read_until(run, f"resumed after step {STEPS}")
    time.sleep(3)  # until it is in the step
    os.killpg(run.pid, signal.SIGINT)
    said += read_until(run, "stopping after this step")
    time.sleep(1)
    assert run.poll() is None
    os.killpg(run.pid, signal.SIGINT)
    said += run.communicate(timeout=600)[0]
    assert run.returncode == 130, said
    assert said.count("stopping after this step") == 1
    assert (
        f"the last good checkpoint is {last}; to go on from it, run the same command with "
        "--resume auto" in said
    )
    assert "Traceback" not in said


def read_until(run: subprocess.Popen, text: str) -> str:
    """What a run says up to the line with `text`."""
    lines = []
    while not lines or text not in lines[-1]:
        lines.append(run.stdout.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)


def start(arguments: list[str]) -> subprocess.Popen:
    """In a process group of its own, as a shell does."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        arguments, **options, env=os.environ | {"OMP_NUM_THREADS": "1"}, process_group=0
    )


def wait_for_steps(output: Path, steps: int, run: subprocess.Popen) -> None:
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.is_file() and metrics.read_text().count("\n") >= steps):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_run_resumes_where_it_saved(folder):
    """SIGKILL to the launcher takes the ranks with it, and to a rank the others. The curve is the
    same to the bit.
    """
    options = {
        "processes": 2,
        "sp_size": 2,
        "micro_batch_size": 2,
        "save_every": 1,
        "resume": "auto",
        "steps": 12,
    }
    train(folder, "not-killed", **options)
    run = start(command(folder, "killed", **options))
    wait_for_steps(folder / "killed", 2, run)
    ranks = children(run.pid)
    assert len(ranks) == 2
    run.kill()
    run.communicate()
    wait_until_ended(ranks)
    run = start(command(folder, "killed", **options))
    wait_for_steps(folder / "killed", 5, run)
    said = kill_rank(run, 1)
    assert f"the last good checkpoint is {checkpoint.newest(folder / 'killed')}" in said
    train(folder, "killed", **options)
    assert curve(folder, "killed", "loss", "grad_norm") == curve(
        folder, "not-killed", "loss", "grad_norm"
    )


# Forks runs of one rank: one that is spared, then some that are killed within the time that it
# took, then the last. A
# machine may be slower by then: as long as nothing was saved they get more time.
# Torch is imported once and not used before a fork; no curve is drawn, which would be most of the
# time.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from train import pretrain
from train.run import metrics

metrics.plot_losses = lambda records, file: None
kills, spared, killed, *flags = sys.argv[1:]

def forked(output):
    pid = os.fork()
    if pid == 0:
        os._exit(pretrain.main([*flags, "--output", output]))
    return pid

began = time.monotonic()
assert os.waitpid(forked(spared), 0)[1] == 0
whole = time.monotonic() - began
random.seed(0)
for _ in range(int(kills)):
    pid = forked(killed)
    time.sleep(random.random() * 0.8 * whole)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not any(Path(killed).glob("step_*")):
        whole *= 2
sys.exit(os.waitstatus_to_exitcode(os.waitpid(forked(killed), 0)[1]))
"""


def test_kills_at_random_moments_leave_no_trace_in_the_curve(folder):
    """While it starts, trains, saves or evaluates."""
    options = {
        "save_every": 1,
        "resume": "auto",
        "steps": 24,
        "eval_every": 3,
        "val_data": folder / "data/train",
    }
    options |= {"eval_sequences": 3, "batch_size": 2}
    [_, _, *flags] = command(folder, "killed-often", **options)
    line = [sys.executable, "-c", KILLER, "6", folder / "spared", folder / "killed-often", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed after step" in done.stdout
    for name in ("loss", "val_loss"):
        both = [values(folder / output, name) for output in ("spared", "killed-often")]
        assert both[0] == both[1]


def values(output: Path, name: str) -> dict[int, float]:
    """Values of `name` by step."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


def test_a_failing_rank_ends_the_run(folder):
    """Ranks that share sequences may wait for it in memory that they share: for those see the
    killed run above.
    """
    run = start(command(folder, "failing", processes=2, sp_size=1, steps=100_000))
    wait_for_steps(folder / "failing", 2, run)
    assert "the last good checkpoint is none" in kill_rank(run, 1)


def kill_rank(run: subprocess.Popen, rank: int) -> str:
    """Kills one of two ranks, which ends the run; returns what it said."""
    os.kill(children(run.pid)[rank], signal.SIGKILL)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 137
    assert f"rank {rank} ended with code 137 (SIGKILL)" in said
    assert f"rank {1 - rank} lost contact with another rank" in said
    assert "Traceback" not in said
    return said


def test_ranks_die_with_torchruns_agent(folder):
    """And let go of the folder."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    arguments = command(folder, "agent", sp_size=2, steps=100_000)
    agent = start([*launcher, *arguments[1:]])
    wait_for_steps(folder / "agent", 2, agent)
    ranks = children(agent.pid)
    assert len(ranks) == 2
    agent.kill()
    agent.communicate()
    wait_until_ended(ranks)
    lock(folder / "agent").close()


def test_a_rank_that_hangs_at_the_start_ends_the_run(folder):
    arguments = command(folder, "hanging", processes=2, sp_size=2, timeout=6)
    run = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (
        started := [pid for pid in children(run.pid) if b"LOCAL_RANK=1" in environment(pid)]
    ):
        time.sleep(0.02)  # until it is more than the launcher's fork, which waits for it to be that
    os.kill(started[0], signal.SIGSTOP)
    said, _ = run.communicate(timeout=600)
    assert run.returncode != 0
    assert "rank 0: no sign of life for" in said
    assert "in waiting for the other ranks to join" in said
    assert "init_process_group" in said  # where it waits


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def wait_until_ended(pids: list[int]) -> None:
    """Within a time that is short beside those for which ranks wait for each other."""
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "nowhere"}, "nowhere has no index.json"),
        ({"init_from": "junk.pt"}, "junk.pt is no file of weights"),
        ({"init_from": "list.pt"}, "list.pt does not hold names and tensors"),
        ({"init_from": "bin"}, "only safetensors are read"),
        ({"init_from": "junk"}, "junk/config.json: it holds a list, not names and values"),
        ({"model": "cut.json"}, "cut.json: Unterminated string"),
        ({"processes": 2, "sp_size": 3}, "--sp-size 3 does not divide the world of 2 ranks"),
        ({"seq_len": 10_000}, "% of the positions of"),
        (
            {"batch_size": 3, "micro_batch_size": 2},
            "--batch-size 3 is not a multiple of --micro-batch-size 2",
        ),
        ({"model": "cpm-huge"}, "neither a preset"),
        ({"processes": 2, "sp_size": 2, "seq_len": 1}, "too short for 2 ranks; the smallest is 2"),
        ({"resume": "nowhere"}, "there is no checkpoint in nowhere"),
        ({"flash": "cuda"}, "--flash cuda: no kernel for"),
        ({"device": "cuda", "processes": 2}, "--device cuda needs a GPU for each of 2 processes"),
        (
            {"device": "cpu", "engine": "bmtrain"},
            "--engine bmtrain needs GPUs and the package bmtrain",
        ),
        ({"device": "cpu", "dtype": "fp16"}, "need --engine bmtrain"),
    ],
)
def test_wrong_runs_are_refused(folder, options, message):
    texts = {"junk.pt": "junk", "junk/config.json": "[]", "cut.json": '{"hid'}
    texts |= {"bin/config.json": json.dumps(config_to_hf(SMALL)), "bin/pytorch_model.bin": ""}
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    torch.save([1, 2], folder / "list.pt")
    options = {
        k: folder / v if isinstance(v, str) and (folder / v).exists() else v
        for k, v in options.items()
    }
    said = train(folder, "wrong", code=2, **options)
    assert message in said
    assert "Traceback" not in said


def test_export_and_generate_from_a_run(folder, whole_run, capsys):
    run = ["--run", str(folder / "whole")]
    generate.main([*run, "--prompt", "def ", "--tokens", "20"])
    assert capsys.readouterr().out.startswith("def ")
    export.main([*run, "--output", str(folder / "exported")])
    _, weights = fold_scalings(SMALL, Checkpoint(checkpoint.find(folder / "whole")).weights())
    exported = load_cpm(folder / "exported").state_dict()
    assert exported.keys() == weights.keys()
    assert all(exported[name].equal(weight) for name, weight in weights.items())


def test_weights_go_to_bmtrains_format_and_come_back(folder, whole_run):
    """The first loss of a run from them is the last validation loss of the run that made them."""
    export.main(
        ["--run", str(folder / "whole"), "--output", str(folder / "bmtrain"), "--format", "bmtrain"]
    )
    source, shape = folder / "bmtrain/model.pt", folder / "bmtrain/model.json"
    options = {"val_data": folder / "data/train", "eval_sequences": 5, "steps": 1, "lr": 1e-30}
    train(folder, "from-bmtrain", model=shape, init_from=source, **options)
    last = [json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()][
        -1
    ]
    first = [
        json.loads(line)
        for line in (folder / "from-bmtrain/metrics.jsonl").read_text().splitlines()
    ][-1]
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    said = train(folder, "from-other", code=2, model="cpm-tiny", init_from=source)
    assert "does not hold the weights of --model cpm-tiny" in said


def test_training_goes_on_from_hugging_face_weights(folder):
    """The first loss is that of the weights, on two ranks too."""
    model = initialized(SMALL)
    with torch.no_grad():
        model.norm.weight.mul_(0)  # a model without any opinion
    save_weights(folder / "hf", SMALL, model.state_dict())
    options = {
        "val_data": folder / "data/train",
        "init_from": folder / "hf",
        "steps": 1,
        "lr": 1e-30,
    }
    train(folder, "from-hf", processes=2, sp_size=2, **options)
    records = [
        json.loads(line) for line in (folder / "from-hf/metrics.jsonl").read_text().splitlines()
    ]
    expected = torch.tensor(float(SMALL.vocab_size)).log().item()
    assert [r.get("loss", r.get("val_loss")) for r in records] == pytest.approx(
        [expected] * 2, rel=1e-6
    )
