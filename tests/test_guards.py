"""What a run does when something goes wrong in the middle, such as a NaN on one rank or a rank that
hangs. What it prints, also when nothing goes wrong.
"""

import json
import time

import pytest

from tests.launcher import ROOT, run_script
from tests.runs import records
from tests.test_train import command, curve, folder  # noqa: F401 - a fixture
from train.run import watchdog
from train.run.watchdog import EXIT_CODE

PATCHED = """
import os, sys
sys.path.insert(0, {root!r})
from train.engine.torch import TorchEngine
import train.pretrain as pretrain

plain, steps, watchdogs = TorchEngine.backward, 0, []

class Watchdog(pretrain.Watchdog):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        watchdogs.append(self)

def backward(engine, loss, is_last):
    global steps
    steps += 1
    plain(engine, loss, is_last)
    if steps in {steps}:
        {everywhere}
        if engine.rank == 1:
            {fault}

TorchEngine.backward, pretrain.Watchdog = backward, Watchdog
code = pretrain.main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""
SPOIL = "next(iter(engine.model.parameters())).grad.to_local().view(-1)[0] = float('nan')"
SLEEP = "import time; time.sleep(1000)"
LOSE_PATIENCE = "watchdogs[0].timeout = 4.0"  # only then, as a machine may be slow to start


def faulty(folder, output, fault, when, everywhere="pass", **options):  # noqa: F811
    """A script, and its arguments, that is pretrain.py on two ranks with a fault in rank 1's
    backward of some steps.

    Both ranks run `everywhere` before it.
    """
    script = folder / f"{output}.py"
    script.write_text(
        PATCHED.format(root=str(ROOT), steps=when, fault=fault, everywhere=everywhere)
    )
    [_, _, *flags] = command(folder, output, sp_size=2, batch_size=1, micro_batch_size=1, **options)
    return script, *flags


def test_the_first_rank_prints_what_takes_long_until_it_prints_progress(monkeypatch, capfd):
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    monkeypatch.setattr(watchdog, "_SILENT", 0.05)
    ranks = [watchdog.Watchdog(rank, 60.0) for rank in range(2)]

    def work(doing: str) -> str:
        for rank in ranks:
            rank.alive(doing)
        time.sleep(0.3)
        return capfd.readouterr().err

    assert work("building the model") == "building the model: 0 s so far\n"
    assert work("building the model") == "", "once"
    assert work("step 1") == "step 1: 0 s so far\n"
    ranks[0].quiet()
    assert work("step 2") == ""
    for rank in ranks:
        rank.close()
    armed = []
    monkeypatch.setattr(
        watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: armed.append(1)
    )
    with watchdog.telling("reading weights"):
        assert work("") == "reading weights: 0 s so far\n"
    assert not armed, "a watchdog that was closed would end this process later"


@pytest.mark.slow
def test_a_nan_on_one_rank_skips_the_step_on_all(folder):  # noqa: F811
    code, printed = run_script(2, *faulty(folder, "nan", SPOIL, (3, 5, 6), steps=8))
    assert code == 0, printed
    assert records(folder / "nan", "skipped") == {3: 1, 5: 2, 6: 3}
    assert len(curve(folder, "nan")) == 5
    assert "step 6: skipped, the gradient norm is nan; 2 in a row" in printed
    saved = json.loads((folder / "nan/step_00000008/state.json").read_text())
    assert (saved["step"], saved["optimizer_steps"], saved["skipped"]) == (8, 5, 3)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_everyones_stacks(folder):  # noqa: F811
    reasons = [folder / f"reason-{rank}.json" for rank in range(2)]
    torchruns = [{"TORCHELASTIC_ERROR_FILE": str(file)} for file in reasons]
    script, *flags = faulty(folder, "hang", SLEEP, (2,), LOSE_PATIENCE)
    code, _ = run_script(2, script, *flags, environments=torchruns)
    assert code == EXIT_CODE
    for rank in range(2):
        text = (folder / f"hang/stacks/rank_{rank:05d}.txt").read_text()
        assert f"rank {rank}: no sign of life for" in text
        assert "in step 2" in text
        assert "pretrain.py" in text
        assert f"rank {rank}: no sign of life for" in reasons[rank].read_text()
    assert "in backward" in text  # where rank 1 sleeps


@pytest.mark.slow
def test_torchruns_summary_has_the_sentence_of_the_rank_that_failed(folder):  # noqa: F811
    """It quotes the file that each rank leaves. test_launch.py shows which one it takes."""
    reasons = [folder / f"summary-{rank}.json" for rank in range(2)]
    torchruns = [{"TORCHELASTIC_ERROR_FILE": str(file)} for file in reasons]
    script, *flags = faulty(folder, "raise", "raise RuntimeError('no memory\\nat a.cpp')", (2,))
    code, printed = run_script(2, script, *flags, environments=torchruns)
    assert code != 0
    found = json.loads(reasons[1].read_text())["message"]["message"]
    assert found == "pretrain.py: rank 1: RuntimeError: no memory; there is no good checkpoint"
    assert "in backward" in printed  # its traceback
    for file in reasons:
        file.unlink()
    [_, script, *flags] = command(folder, "refused", sp_size=3)
    code, _ = run_script(2, script, *flags, environments=torchruns)
    assert code == 2
    expected = "pretrain.py: rank 0: --sp-size 3 does not divide the world of 2 ranks"
    for file in reasons:  # all ranks agree on whose words they leave
        assert json.loads(file.read_text())["message"]["message"] == expected
