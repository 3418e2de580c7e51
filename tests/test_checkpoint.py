"""Checkpoints that survive: kills at every file operation and at random moments, damage, other numbers of ranks."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from bmt_burst.engine import Shard
from tests.helpers import ROOT, run_ranks
from train import checkpoint, ranks
from train.checkpoint import Checkpoint, CheckpointError

SHAPES = {"weight/a": (5, 3), "weight/b": (7,), "exp_avg/a": (5, 3)}


def shards_of(rank: int, size: int, step: int) -> dict[str, Shard]:
    """Ranges that differ in every tensor, some empty; entry i of a tensor is step * 1000 + i."""
    shards = {}
    for number, (key, shape) in enumerate(SHAPES.items()):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + step * 1000
        cuts = [0, *sorted((number * 3 + r * 4) % (len(whole) + 1) for r in range(size - 1)), len(whole)]
        shards[key] = Shard(whole[cuts[rank] : cuts[rank + 1]], cuts[rank], shape)
    return shards


def save(root, rank: int, size: int, step: int, keep_last: int = 2):
    return checkpoint.save(root, {"step": step, "note": "x"}, shards_of(rank, size, step), keep_last)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save_on_ranks(rank: int, root) -> str:
    for step in (1, 2, 3):
        save(root, rank, dist.get_world_size(), step)
    return str(checkpoint.newest(root))


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path, size):
    newest = run_ranks(size, save_on_ranks, tmp_path)
    assert set(newest) == {str(tmp_path / "step_00000003")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    saved = Checkpoint(checkpoint.newest(tmp_path))
    assert saved.state == {"step": 3, "note": "x"}
    for parts in (1, 2, 4):
        for rank in range(parts):
            for key, shard in shards_of(rank, parts, 3).items():
                assert saved.read(key, shard).equal(shard.flat)
    assert {name: tuple(w.shape) for name, w in saved.weights().items()} == {"a": (5, 3), "b": (7,)}
    assert saved.weights()["b"].tolist() == [3000 + i for i in range(7)]
    with pytest.raises(CheckpointError, match=r"weight/b has shape \(7,\), the model wants \(8,\)"):
        saved.read("weight/b", Shard(torch.zeros(8), 0, (8,)))


def full_disk(*_args, **_options):
    raise SafetensorError("I/O error: No space left on device (os error 28)")  # what safetensors says then


def fail_on_rank_1(rank: int, root) -> str:
    if rank == 1:
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(CheckpointError) as caught:
        save(root, rank, 2, 1)
    return str(caught.value)


def test_one_ranks_failure_is_everyones(tmp_path):
    messages = run_ranks(2, fail_on_rank_1, tmp_path)
    assert len(set(messages)) == 1
    assert messages[0] == (
        f"could not save {tmp_path}/step_00000001: rank 1: I/O error: No space left on device (os error 28)"
    )
    assert not list(tmp_path.glob(".step_*"))
    assert checkpoint.newest(tmp_path) is None


def read_that_fails_on_rank_1(rank: int, root) -> str:
    save(root, rank, 2, 1)
    wanted = Shard(torch.zeros(7 + rank), 0, (7 + rank,))  # rank 1 asks for a shape that was not saved
    with pytest.raises(ranks.RankError) as caught:
        ranks.together(lambda: Checkpoint(root / "step_00000001").read("weight/b", wanted))
    return str(caught.value)


def test_one_ranks_unreadable_shard_is_everyones(tmp_path):
    messages = run_ranks(2, read_that_fails_on_rank_1, tmp_path)
    assert len(set(messages)) == 1
    assert "rank 1: " in messages[0]
    assert "the model wants (8,)" in messages[0]


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "no manifest", "bad manifest"])
def test_a_damaged_newest_is_named_and_the_one_before_used(tmp_path, alone, capsys, damage):
    for step in (1, 2):
        save(tmp_path, 0, 1, step)
    folder = tmp_path / "step_00000002"
    file = folder / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "flip":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        (folder / "state.json").unlink()
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text(json.dumps({"files": 3}))
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        checkpoint.find(folder)
    assert checkpoint.newest(tmp_path) == tmp_path / "step_00000001"
    assert f"checkpoint {folder} is damaged: " in capsys.readouterr().err
    for name in ("step_00000002.damaged", "step_00000002.damaged.2"):
        assert folder.is_dir(), "who only reads leaves it where it is"
        assert checkpoint.newest(tmp_path, set_aside=True) == tmp_path / "step_00000001"
        assert (tmp_path / name).is_dir()
        save(tmp_path, 0, 1, 2)
        assert checkpoint.newest(tmp_path) == folder
        (folder / "manifest.json").unlink()


def test_only_damaged_ones_is_an_error_none_is_not(tmp_path, alone):
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path, 0, 1, 1)
    (tmp_path / "step_00000001/manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
            checkpoint.newest(tmp_path, set_aside=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.find(tmp_path / "other")


# Forks writers and kills them. Torch is imported once and not used before a fork.
KILLER = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from train import checkpoint
from tests.test_checkpoint import save

def in_child(work):
    pid = os.fork()
    if pid == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        work()
        os._exit(0)
    return pid

def check(root, at_least):
    def work():
        path = checkpoint.newest(root)
        saved = checkpoint.Checkpoint(path)
        step = saved.state["step"]
        assert step >= at_least and path.name == f"step_{step:08d}", path
        assert saved.weights()["a"].flatten().tolist() == [step * 1000 + i for i in range(15)]
        assert path == checkpoint.listed(root)[0], "none is damaged"
    assert os.waitpid(in_child(work), 0)[1] == 0

root = Path(sys.argv[1])

# 1. At each file operation of a save in turn.
def killed_at(root, nth):
    left = nth
    def guarded(operation):
        def run(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)
        return run
    os.fsync, checkpoint.save_file = guarded(os.fsync), guarded(checkpoint.save_file)
    shutil.rmtree, Path.rename, Path.mkdir = guarded(shutil.rmtree), guarded(Path.rename), guarded(Path.mkdir)
    Path.write_text = guarded(Path.write_text)
    save(root, 0, 1, 3)

moments = 0
while True:
    moments += 1
    folder = root / f"operation_{moments}"
    def two(folder=folder):
        save(folder, 0, 1, 1), save(folder, 0, 1, 2)
    os.waitpid(in_child(two), 0)
    status = os.waitpid(in_child(lambda: killed_at(folder, moments)), 0)[1]
    check(folder, 2)
    if not os.WIFSIGNALED(status):
        break

# 2. At random times of endless saving.
random.seed(0)
folder, reached = root / "random", 0
for _ in range(25):
    def endless(start=reached):
        for step in range(start + 1, 10**6):
            save(folder, 0, 1, step)
            (root / "reached").write_text(str(step))
    pid = in_child(endless)
    while not (root / "reached").exists() or not (root / "reached").read_text():
        time.sleep(0.01)
    time.sleep(0.05 + random.random() * 0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reached = max(reached, int((root / "reached").read_text() or 0))
    check(folder, reached)
print("operations", moments, "steps", reached)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    operations, steps = map(int, done.stdout.split()[1::2])
    assert operations > 10
    assert steps > 25
