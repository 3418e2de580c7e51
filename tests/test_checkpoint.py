"""Checkpoints that survive: kills at every file operation, damage, other numbers of ranks."""

import errno
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.launcher import ROOT, run_ranks
from train.checkpoints import checkpoint
from train.checkpoints.checkpoint import Checkpoint, CheckpointError
from train.checkpoints.rank_file import RankFile
from train.data.tokenizer import ByteTokenizer, load_tokenizer
from train.engine import Shard

SHAPES = {"weight/a": (5, 3), "weight/b": (7,), "exp_avg/a": (5, 3)}


def shards_of(rank: int, size: int, step: int) -> dict[str, Shard]:
    """Return ranges that differ in every tensor, some empty. Entry i of a tensor is
    step * 1000 + i.
    """
    shards = {}
    for number, (key, shape) in enumerate(SHAPES.items()):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + step * 1000
        inner = sorted((number * 3 + r * 4) % (len(whole) + 1) for r in range(size - 1))
        cuts = [0, *inner, len(whole)]
        shards[key] = Shard(whole[cuts[rank] : cuts[rank + 1]], cuts[rank], shape)
    return shards


def write(root, state, shards, keep_last=None, tokenizer=None):
    """Save a checkpoint at once."""
    checkpoint.check_finite(root, state, shards)
    return checkpoint.write(root, state, RankFile.of(shards).write, keep_last, tokenizer)


def save(root, rank: int, size: int, step: int, keep_last: int = 2):
    state = {"step": step, "note": "x"}
    return write(root, state, shards_of(rank, size, step), keep_last, ByteTokenizer())


def save_on_ranks(rank: int, root) -> str:
    for step in (1, 2, 3):
        save(root, rank, dist.get_world_size(), step)
    return str(checkpoint.newest(root))


def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path):
    newest = run_ranks(3, save_on_ranks, tmp_path)
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
    with pytest.raises(CheckpointError, match=r"expected weight/b of shape \(8,\), got \(7,\)"):
        saved.read("weight/b", Shard(torch.zeros(8), 0, (8,)))


def full_disk(_self, file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))


def rewritten(folder, change) -> None:
    """Change the files that a manifest names."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest["files"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


def moved_out(folder, name) -> None:
    """Move a file out of its folder, and leave a link to it."""
    outside = folder.parent / f"outside_{name.replace('/', '_')}"
    if outside.exists():
        shutil.rmtree(outside) if outside.is_dir() else outside.unlink()
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)


def flip(file, at) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


SHARDS = "rank_00000.safetensors"
DAMAGE = {
    "cut": (lambda f: os.truncate(f / SHARDS, 100), "has 100 bytes, expected"),
    "a bit of a weight": (lambda f: flip(f / SHARDS, -1), f"{SHARDS} does not have the sha256"),
    "no shards": (lambda f: (f / SHARDS).unlink(), "No such file"),
    "no tokenizer": (lambda f: shutil.rmtree(f / "tokenizer"), "No such file"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "No such file"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 40), "JSONDecodeError"),
    "a manifest of few": (lambda f: rewritten(f, lambda files: files.pop(SHARDS)), "names only"),
    "a name that leads out": (
        lambda f: rewritten(f, lambda files: files.update({"rank_/../../x": files[SHARDS]})),
        "rank_: expected the name of a file in this folder, got '..'",
    ),
    "shards elsewhere": (lambda f: moved_out(f, SHARDS), f"{SHARDS} leads out of its folder"),
    "a folder for a file": (
        lambda f: ((f / SHARDS).unlink(), (f / SHARDS).mkdir()),
        f"{SHARDS} is not a file",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_is_named_and_the_one_before_used(tmp_path, alone, capsys, kind):
    for step in (1, 2):
        save(tmp_path, 0, 1, step)
    folder, (break_it, problem) = tmp_path / "step_00000002", DAMAGE[kind]
    break_it(folder)
    with pytest.raises(CheckpointError, match="not a whole checkpoint") as caught:
        checkpoint.find(folder)
    assert problem in str(caught.value)
    if "leads out" in problem:  # also by those who do not search for damage first
        with pytest.raises(CheckpointError, match=problem):
            Checkpoint(folder)
    assert checkpoint.newest(tmp_path) == tmp_path / "step_00000001"
    printed = capsys.readouterr().err
    assert f"checkpoint {folder} is damaged: " in printed
    assert problem in printed
    for name in ("step_00000002.damaged", "step_00000002.damaged.2"):
        assert folder.is_dir(), "readers leave it where it is"
        assert checkpoint.newest(tmp_path, set_aside=True) == tmp_path / "step_00000001"
        assert (tmp_path / name).is_dir()
        save(tmp_path, 0, 1, 2)
        assert checkpoint.newest(tmp_path) == folder
        break_it(folder)


def test_a_link_to_a_checkpoint_is_one(tmp_path, alone):
    saved = save(tmp_path / "run", 0, 1, 1)
    (tmp_path / "best").symlink_to(saved)
    assert checkpoint.find(tmp_path / "best") == saved
    (tmp_path / "other").mkdir()
    (tmp_path / "other/step_00000001").symlink_to(saved)
    assert checkpoint.newest(tmp_path / "other") == tmp_path / "other/step_00000001"
    for step in (2, 3):
        save(tmp_path / "other", 0, 1, step)
    assert [path.name for path in checkpoint.listed(tmp_path / "other")] == [
        "step_00000003",
        "step_00000002",
    ]
    assert checkpoint.newest(tmp_path / "run") == saved


def test_a_copy_of_a_checkpoint_is_self_contained_under_any_name(tmp_path, alone):
    """None of its files is a pickle."""
    copy = shutil.copytree(save(tmp_path, 0, 1, 1), tmp_path / "best")
    assert checkpoint.find(copy) == copy
    assert load_tokenizer(copy / "tokenizer").encode("ab").tolist() == [97, 98]
    names = {path.name for path in copy.rglob("*") if path.suffix != ".json" and path.is_file()}
    assert names == {SHARDS}


def test_modes_follow_the_umask(tmp_path, alone, umask):
    saved = save(tmp_path, 0, 1, 1)
    modes = {path.stat().st_mode & 0o777 for path in saved.rglob("*") if path.is_file()}
    assert (modes, saved.stat().st_mode & 0o777) == ({0o640}, 0o750)


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """Return the folder `run`, on a disk with room for `room` checkpoints."""

    def of(room: float):
        size = checkpoint.count_bytes(save(tmp_path / "measure", 0, 1, 1))

        def usage(folder):
            used = sum(checkpoint.count_bytes(path) for path in checkpoint.listed(tmp_path / "run"))
            return SimpleNamespace(free=room * size - used)

        monkeypatch.setattr(shutil, "disk_usage", usage)
        return tmp_path / "run"

    return of


@pytest.mark.parametrize(
    ("room", "seen"), [(2.5, [[], ["1"], ["2"], ["3"]]), (9, [[], ["1"], ["2", "1"], ["3", "2"]])]
)
def test_old_checkpoints_go_before_the_save_only_where_space_is_short(
    tmp_path, alone, small_disk, monkeypatch, capsys, room, seen
):
    """Which ones are there when shards are written is in `seen`."""
    run, there, plain = small_disk(room), [], RankFile.write

    def watched(*arguments):
        there.append([path.name[-1] for path in checkpoint.listed(run)])
        return plain(*arguments)

    monkeypatch.setattr(RankFile, "write", watched)
    for step in (1, 2, 3, 4):
        save(run, 0, 1, step)
    assert there == seen
    assert [path.name[-1] for path in checkpoint.listed(run)] == ["4", "3"]
    warning = f"{run} has no room for another checkpoint: removing {run}/step_00000001 first"
    assert (warning in capsys.readouterr().err) == (room < 3)


@pytest.mark.parametrize("spoiled", ["nothing", "damaged", "skipped"])
def test_the_last_good_checkpoint_is_kept(tmp_path, alone, small_disk, monkeypatch, spoiled):
    """Neither the only one, nor the one before a newest that is damaged or was saved amid skipped
    steps.
    """
    run = small_disk(0)
    good = save(run, 0, 1, 1, keep_last=9)
    if spoiled != "nothing":
        state = {"step": 2, "skips_in_a_row": int(spoiled == "skipped")}
        newest = write(run, state, shards_of(0, 1, 2), 9, ByteTokenizer())
        if spoiled == "damaged":
            flip(newest / SHARDS, -1)
    monkeypatch.setattr(RankFile, "write", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        save(run, 0, 1, 3, keep_last=1)
    assert checkpoint.newest(run) is not None
    last_good = f"the last good checkpoint is {good};"
    assert checkpoint.outlook(run).startswith(last_good) or spoiled == "damaged"
    assert good.is_dir()


def test_only_damaged_ones_is_an_error_none_is_not(tmp_path, alone):
    assert checkpoint.newest(tmp_path) is None
    save(tmp_path, 0, 1, 1)
    (tmp_path / "step_00000001/manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
            checkpoint.newest(tmp_path, set_aside=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint.find(tmp_path / "other")


# Forks writers and kills each at another file operation of a save. Torch is imported once and not
# used before a fork.
KILLER = """
import gc, os, shutil, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from train.checkpoints import checkpoint
from train.checkpoints.rank_file import RankFile
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
gc.freeze()  # or each fork would visit and copy it all

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
    os.fsync, RankFile.write = guarded(os.fsync), guarded(RankFile.write)
    shutil.rmtree, Path.rename = guarded(shutil.rmtree), guarded(Path.rename)
    Path.mkdir = guarded(Path.mkdir)
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

print(moments)
"""


def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    """test_interrupts.py kills runs at random moments."""
    command = [sys.executable, "-c", KILLER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 10, "operations"
