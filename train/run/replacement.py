"""The replacement of each rank's process at the end of a stage, so that nothing stays in memory.

The new process has the same id, so the launcher keeps watching it. The ranks meet in another store,
which rank 0 keeps, because the launcher's has the keys of the stage before.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from train.base import ranks
from train.base.signals import StopSignal

_LISTENER = "BMT_BURST_LISTENER"  # environment variable of rank 0: its socket for the next store
# the cores of this process, before BMTrain binds it to some of them
_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def agree_on_store() -> dict[str, str]:
    """Open a socket for the next store on rank 0. Return the variables that name it."""
    if "RANK" not in os.environ:
        return {}
    listener, place = None, ("", 0)
    if ranks.rank() == 0:
        here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        # other machines cannot reach it unless they have ranks
        listener = socket.create_server(("127.0.0.1" if here else "", 0))
        place = ("127.0.0.1" if here else socket.getfqdn(), listener.getsockname()[1])
    host, port = ranks.gather(place)[0]
    variables = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # rank 0 joins the store like the others
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return variables | ({_LISTENER: str(listener.detach())} if listener else {})


@functools.cache
def open_store() -> dist.TCPStore | None:
    """Open the store on the inherited socket, if there is one, until the process ends."""
    listener = os.environ.pop(_LISTENER, None)
    if listener is None:
        return None
    os.set_inheritable(int(listener), False)
    return make_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(listener))


def make_store(host: str, port: int, listener: int) -> dist.TCPStore:
    """Make a store on a socket that listens, without waiting for ranks."""
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener
    )


def replace_process(
    argv: Sequence[str], variables: Mapping[str, str], stop: StopSignal
) -> NoReturn:
    """Replace this process by `python argv...`, or end it after a signal to stop."""
    if stop.close():
        signal.raise_signal(signal.SIGTERM)
    inherited = variables.get(_LISTENER)
    for descriptor in os.listdir("/dev/fd"):
        if int(descriptor) > 2:
            with suppress(OSError):  # the descriptor of the listing itself
                os.set_inheritable(int(descriptor), descriptor == inherited)
    if _CORES:
        os.sched_setaffinity(0, _CORES)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *argv], {**os.environ, **variables})
