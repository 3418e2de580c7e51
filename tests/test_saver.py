"""Saves in the background: what they write, when they wait, and how they fail."""

import errno
import mmap
import os
import resource
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.launcher import run_ranks
from tests.runs import records, train
from tests.test_checkpoint import full_disk, shards_of
from train.base import ranks
from train.checkpoints import checkpoint, rank_file, saver
from train.checkpoints.checkpoint import Checkpoint, CheckpointError
from train.checkpoints.rank_file import HostCopy
from train.checkpoints.saver import Saver, make_background
from train.data.tokenizer import ByteTokenizer
from train.loop import trainer
from train.run import ending

CPU = torch.device("cpu")


def make_saver(root, rank: int = 0, size: int = 1, tell=[].append, note=[].append) -> Saver:
    return Saver(root, ByteTokenizer(), tell, note, make_background(shards_of(rank, size, 0), CPU))


def save(to: Saver, step: int, rank: int = 0, size: int = 1, keep_last: int = 2) -> None:
    to.save({"step": step}, shards_of(rank, size, step), keep_last)


def names(root) -> list[str]:
    return [path.name[-1] for path in checkpoint.listed(root)]


@pytest.fixture
def held(monkeypatch):
    """Let writers wait until this event is set."""
    event, plain = threading.Event(), HostCopy.write

    def write(copy, file):
        assert event.wait(60)
        return plain(copy, file)

    monkeypatch.setattr(HostCopy, "write", write)
    yield event
    event.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, alone, held):
    """It has the values that shards had when they were saved."""
    told, noted = [], []
    mine = make_saver(tmp_path, tell=told.append, note=noted.append)
    shards = shards_of(0, 1, 1)
    mine.save({"step": 1}, shards, 2)
    for shard in shards.values():
        shard.flat.fill_(-1)
    mine.poll()
    assert (names(tmp_path), noted, mine.failed) == ([], [], False)
    held.set()
    mine.wait()
    [saved] = noted
    assert (saved.step, saved.path) == (1, tmp_path / "step_00000001")
    assert saved.stopped < saved.seconds
    assert checkpoint.newest(tmp_path) == saved.path
    assert Checkpoint(saved.path).weights()["a"][0, 0] == 1000
    assert told[0] == "there is no good checkpoint"
    assert f"the last good checkpoint is {saved.path};" in told[1]
    mine.close()


def test_the_next_save_waits_and_the_one_before_stays_until_then(tmp_path, alone, held):
    noted = []
    mine = make_saver(tmp_path, note=noted.append)
    threading.Timer(0.2, held.set).start()
    save(mine, 1, keep_last=1)
    assert names(tmp_path) == []
    save(mine, 2, keep_last=1)
    held.clear()
    between = names(tmp_path)
    held.set()
    mine.wait()
    assert "1" in between
    assert names(tmp_path) == ["2"]
    assert [x.step for x in noted] == [1, 2]
    mine.close()


def fail_on_rank_1(rank: int, root) -> tuple[str, int | None, list[str]]:
    mine = make_saver(root / "run", rank, 2)
    save(mine, 1, rank, 2)
    mine.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    save(mine, 2, rank, 2)
    while not any(ranks.gather(mine.failed)):  # as steps do
        time.sleep(0.01)
    with pytest.raises(CheckpointError) as caught:
        mine.raise_failure()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save(mine, 3, rank, 2)
    mine.wait()
    mine.close()
    watchdog = SimpleNamespace(program="", doing="step 2", last_words="")
    return str(caught.value), ending.explain(caught.value, watchdog), names(root / "run")


def test_a_failure_of_one_rank_is_everyones_and_leaves_the_checkpoint_before(tmp_path):
    """A later save succeeds."""
    file = tmp_path / "run/.step_00000002.partial/rank_00001.safetensors"
    reason = f"rank 1: [Errno 27] File too large: '{file}'"
    message = f"could not save {tmp_path}/run/step_00000002: {reason}"
    assert run_ranks(2, fail_on_rank_1, tmp_path) == [(message, 2, ["3", "1"])] * 2
    assert not list((tmp_path / "run").glob(".step_*"))


def test_memory_that_cannot_be_had_is_a_failure(tmp_path, alone, monkeypatch):
    def no_memory(descriptor, size, flags):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(rank_file, "mmap", SimpleNamespace(**vars(mmap) | {"mmap": no_memory}))
    mine = make_saver(tmp_path)
    while not mine.failed:
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match=r"a copy of weights .*: Cannot allocate"):
        mine.raise_failure()


def test_training_waits_where_memory_is_short(tmp_path, alone, monkeypatch, capsys):
    monkeypatch.setattr(saver, "available_memory", lambda: 9000)
    noted = []
    mine = make_saver(tmp_path, note=noted.append)
    warning = "saving stops training until a checkpoint is whole: a copy of weights and optim"
    assert warning in capsys.readouterr().err
    save(mine, 1)
    assert names(tmp_path) == ["1"]
    [saved] = noted
    assert "training stopped" not in str(saved)


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_file, "_CGROUP", tmp_path)
    free = rank_file.available_memory()
    assert free > 1 << 20
    for limit, expected in (("max", None), (str(5000), 5000 - 3000 + 1000)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("3000\n")
        (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 1000\n")
        if expected:
            assert rank_file.available_memory() == expected
        else:
            assert rank_file.available_memory() > 1 << 20
    (tmp_path / "own").write_text("4:memory:/x\n0::/job_1/step_0\n")
    monkeypatch.setattr(rank_file, "_OWN_CGROUP", tmp_path / "own")
    assert rank_file.available_memory() == 3000, "the limit of all jobs"
    (tmp_path / "job_1").mkdir()
    (tmp_path / "job_1/memory.max").write_text("2500\n")
    (tmp_path / "job_1/memory.current").write_text("2000\n")
    (tmp_path / "job_1/memory.stat").write_text("inactive_file 0\n")
    assert rank_file.available_memory() == 500, "the limit of the job around this step"


def test_a_value_that_is_not_finite_is_refused_before_anything_is_written(tmp_path, alone):
    mine = make_saver(tmp_path)
    shards = shards_of(0, 1, 1)
    shards["weight/a"].flat[3] = torch.nan
    with pytest.raises(CheckpointError, match=r"step_00000001: weight/a is not finite"):
        mine.save({"step": 1}, shards, 2)
    mine.close()


# runs of one rank


def test_a_run_ends_at_the_step_after_a_save_that_failed(settings, tmp_path, monkeypatch, alone):
    plain = Saver.failed.fget

    def known(mine) -> bool:
        while mine._writing and not mine._writing.done():
            time.sleep(0.01)
        return plain(mine)

    monkeypatch.setattr(Saver, "failed", property(known))
    monkeypatch.setattr(HostCopy, "write", full_disk)
    with pytest.raises(CheckpointError, match=r"could not save .*_00000002: \[Errno 28\] No sp"):
        train(settings)
    assert list(records(tmp_path / "run")) == [1, 2]


@pytest.mark.parametrize("how", ["a signal", "an error"])
def test_the_end_of_a_run_waits_for_the_save_that_goes_on(
    settings, tmp_path, monkeypatch, held, alone, capsys, how
):
    """Step 2 is still written when the signal comes in step 3, or when an error ends it."""
    stop, plain = SimpleNamespace(received=False), trainer.optimize

    def optimize(engine, progress, *rest):
        if progress.step == 3:
            threading.Timer(0.2, held.set).start()
            stop.received = True
            if how == "an error":
                raise FloatingPointError("too much")
        return plain(engine, progress, *rest)

    monkeypatch.setattr(trainer, "optimize", optimize)
    if how == "an error":
        with pytest.raises(FloatingPointError, match="too much"):
            train(settings, stop, steps=9)
    else:
        assert not train(settings, stop, steps=9)
    assert names(tmp_path / "run") == (["2"] if how == "an error" else ["4", "2"])
    assert f"step 2: saved {tmp_path}/run/step_00000002 in " in capsys.readouterr().out
