"""The launcher: who can reach it, and which rank's failure it reports."""

import os
from pathlib import Path

import pytest

from train import launch, ranks
from train.watchdog import EXIT_CODE


def listeners() -> list[str]:
    """The addresses and ports, in hexadecimal, on which this process listens."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells who listens")
def test_nobody_outside_of_the_machine_reaches_the_store():
    before = set(listeners())
    store = launch._local_store()
    assert set(listeners()) - before == {f"0100007F:{store.port:04X}"}  # 127.0.0.1
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("failed", "cause"),
    [
        ({1: -9, 0: ranks.LOST_CONTACT}, 1),
        ({0: ranks.LOST_CONTACT, 1: -9}, 1),
        ({0: ranks.LOST_CONTACT, 2: 1, 1: ranks.LOST_CONTACT}, 2),
        ({0: 1, 1: 2}, 1),
        ({3: -9, 0: 2}, 3),
        ({0: EXIT_CODE, 1: EXIT_CODE}, 0),
        ({1: ranks.LOST_CONTACT, 0: ranks.LOST_CONTACT}, 1),
    ],
)
def test_the_cause_is_the_rank_that_failed_by_itself(failed, cause):
    assert launch._cause(failed) == cause


def test_codes_are_those_of_a_shell_with_the_signals_name():
    assert launch._named(-9) == "code 137 (SIGKILL)"
    assert launch._named(2) == "code 2"
    assert launch._exit_code(-15) == 143
