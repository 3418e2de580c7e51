"""Checks before the first step: one command, output and text for all ranks, and room on disks."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.launcher import run_ranks, run_script
from train.base import ranks
from train.loop.inputs import check_same_data
from train.run import output_folder
from train.settings.config import TrainConfig
from train.settings.settings import shared_options


def refused(start: str):
    """Return a context in which the error must begin so."""
    return pytest.raises((ranks.RankError, ValueError), match=f"^{re.escape(start)}")


def check_on_a_rank(rank: int, folder: Path) -> None:
    """Check an output that both share, outputs of their own, an output to which rank 1 cannot
    write, and texts that do not differ or do.
    """
    output_folder._PATIENCE = 0.0
    own, host = folder / f"own-{rank}", os.uname().nodename
    own.mkdir()
    output_folder.check_shared(folder / "shared")
    unseen = f"rank 0: {host} does not see in {folder}/own-0 what rank 1 on {host} wrote there"
    with refused(unseen) as raised:
        output_folder.check_shared(own)
    assert "--no-save" in str(raised.value)
    plain = Path.touch

    def touch(path: Path) -> None:
        if path.name.startswith("rank 1 "):
            raise PermissionError(13, "Permission denied")
        plain(path)

    Path.touch = touch
    with refused("rank 1: [Errno 13] Permission denied: "):
        output_folder.check_shared(folder / "shared")
    Path.touch = plain
    dist.barrier()
    check_same_data(opened_with("a"))
    differ = "expected digest of --val-data a on all ranks, as on rank 0, got digest of --val-data"
    with refused(f"{differ} b on rank 1 of {host}: give all hosts the same data"):
        check_same_data(opened_with("ab"[rank]))


def opened_with(digest: str) -> SimpleNamespace:
    """Return the facts of opened folders, with a digest of the validation data."""
    texts = [
        SimpleNamespace(folder=Path(name), identity={"seq_len": 61, "digest": found})
        for name, found in (("x", "c"), ("y", digest))
    ]
    return SimpleNamespace(training=texts[0], validation={"": texts[1]})


def test_hosts_that_do_not_share_output_or_data_are_told_before_the_first_step(tmp_path):
    (tmp_path / "shared").mkdir()
    run_ranks(2, check_on_a_rank, tmp_path)
    assert [*tmp_path.glob("*/.*")] == [], "nothing is left"


# a script, whose options have the number of the rank in place of RANK
SCRIPT = """
import os, sys
from train.{} import main
from train.run import ending
sys.argv = [word.replace("RANK", os.environ["RANK"]) for word in sys.argv]
ending.run_script(main)
"""


@pytest.mark.parametrize(
    ("name", "options", "expected", "got"),
    [
        # ranks of two data parallel groups
        ("pretrain", ["--save", "--chunk", "10RANK"], "--chunk 100", "--chunk 101"),
        (
            "evaluate",
            ["--init-from", "x", "--tasks", "needle", "--lengths", "7,8RANK", "--chunk", "1RANK"],
            "--chunk 10 and --lengths 7,80",
            "--chunk 11 and --lengths 7,81",
        ),
        (
            "generate",
            ["--init-from", "xRANK", "--prompt", "RANK"],
            "--prompt of digest 5feceb66ffc8",
            "--prompt of digest 6b86b273ff34",
        ),
    ],
)
def test_ranks_with_other_options_are_told_at_once(tmp_path, name, options, expected, got):
    (tmp_path / "script.py").write_text(SCRIPT.format(name))
    ended, printed = run_script(2, tmp_path / "script.py", "--device", "cpu", *options)
    assert ended == 2
    told = f"expected {expected} on all ranks, as on rank 0, got {got} on rank 1 of "
    assert f"{name}.py: {told}" in printed
    assert "Traceback" not in printed


def test_options_of_each_rank_are_shown_in_the_first_ranks_that_differ(monkeypatch):
    settings = [{"chunk": chunk, "save": chunk != 3} for chunk in (None, 5, None, 3, 4, 6)]
    shared = [("host", shared_options(x)) for x in settings]
    monkeypatch.setattr(ranks, "gather", lambda _: shared)
    expected = "expected no --chunk and --save on all ranks, as on rank 0"
    got = "--chunk 5 on rank 1 of host, --chunk 3 and no --save on rank 3 of host, --chunk 4"
    with refused(f"{expected}, got {got} on rank 4 of host: give all ranks the same options"):
        ranks.check_same({})


def test_hosts_may_have_paths_and_kernels_of_their_own():
    own = [
        {"data": "a", "output": "b", "model": "c.json", "resume": "d", "flash": "fa3"},
        {"data": {"x": "e:1"}, "output": "f", "model": "g/c.json", "resume": "h", "log_every": 9},
    ]
    first, second = (shared_options(TrainConfig(**x).to_dict()) for x in own)
    assert first == second
    assert first != shared_options(TrainConfig(**own[0] | {"resume": "auto"}).to_dict())
    assert first != shared_options(TrainConfig(**own[0] | {"init_from": "i"}).to_dict())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 10, "save_every": 4}, [3, 2, 2, 1, 1, 0]),
        ({"steps": 10, "save_every": 0}, [1, 1, 1, 1, 1, 0]),
        ({"steps": 10, "save_every": 4, "stop_after": 5}, [2, 1, 0, 0, 0, 0]),
        ({"steps": 10, "save_every": 1, "save": False}, [0] * 6),
    ],
)
def test_saves_are_counted(options, expected):
    config = TrainConfig(warmup_steps=0, **options)
    found = [output_folder.count_saves(config, step) for step in (0, 4, 5, 8, 9, 10)]
    assert found == expected


def test_room_is_for_all_stages(tmp_path, monkeypatch):
    """On the disk of each. Files of a save that was killed count as free."""
    usage = SimpleNamespace(free=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    stages = [TrainConfig(output=str(tmp_path / name), save_every=1) for name in "ab"]
    (tmp_path / "a").mkdir()
    wanted = [(stage, 9) for stage in stages]
    output_folder._check_room(125, wanted)
    needs = "2 of 1 GiB need 2 GiB, and 500 bytes are free"
    with refused(f"{tmp_path}/a has no room for the checkpoints of this run: {needs}"):
        output_folder._check_room(2**30, wanted)
    usage.free = 499
    with pytest.raises((ranks.RankError, ValueError), match="4 of 125 bytes"):
        output_folder._check_room(125, wanted)
    (tmp_path / "a/.step_00000001.partial").mkdir()
    (tmp_path / "a/.step_00000001.partial/file").write_bytes(b"1")
    output_folder._check_room(125, wanted)
