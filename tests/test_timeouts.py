"""Timeouts: how long ranks wait for one that makes no call, over groups of any origin."""

import functools
import math
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bmt_burst import burst_attn_func, init_sequence_parallel
from bmt_burst.compat.yunchang.globals import PROCESS_GROUP, set_seq_parallel_pg
from bmt_burst.errors import RankFailed, RankGone, RankLate
from bmt_burst.transport import processes
from bmt_burst.transport.bmtrain import BMTrainTransport
from bmt_burst.transport.torch_dist import torch_transport
from tests.cases import random_qkv
from tests.launcher import run_ranks

OF_WORLD = 1.5  # seconds that init_process_group is called with
ASKED = 1.0  # seconds that init_sequence_parallel is called with
SLACK = 2.0  # seconds that it may take longer


def restart(rank: int, timeout: float | None = None) -> None:
    """Call init_process_group again, as a program does that asks for a timeout."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    size = dist.get_world_size()
    dist.destroy_process_group()
    options = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, **options)


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))


MAKERS = {
    "one ring": lambda timeout: init_sequence_parallel(timeout=timeout).groups,
    "hosts": lambda timeout: init_sequence_parallel(inner_size=2, timeout=timeout).groups,
    "usp": lambda timeout: {
        **init_sequence_parallel(ulysses_size=2, timeout=timeout).groups,
        "strategy": "usp",
    },
    "a mesh": lambda timeout: init_sequence_parallel(mesh=grid(), timeout=timeout).groups,
}


def own_timeouts(groups: dict) -> Iterator[float]:
    for group in (groups["process_group"], *groups["double_group"]):
        if group is not None:
            yield group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def wait_in_vain(rank: int, name: str, groups: dict) -> tuple[str, float]:
    """Make a second call without rank 1, which lives on. Return the error and its seconds."""
    call = functools.partial(burst_attn_func, *random_qkv(1, 4, 4, 2, 8)[:3], causal=True, **groups)
    store = dist.distributed_c10d._get_default_store()
    call()
    if rank == 1:
        store.wait([f"{name} {other}" for other in (0, 2, 3)], timedelta(seconds=60))
        return "", 0.0
    began = time.monotonic()
    with pytest.raises((RankLate, RankFailed, RankGone)) as caught:
        call()
    waited = time.monotonic() - began
    store.set(f"{name} {rank}", "")
    return f"{type(caught.value).__name__}: {caught.value}", waited


WAITED_FOR = [  # what makes the groups, the timeout it is called with
    ("one ring", None),
    ("hosts", ASKED),
    ("a mesh", ASKED),
]


def missing(rank: int) -> dict[str, tuple[float, str, float]]:
    """Return by case the limit, what a rank raises because rank 1 is missing, and its seconds."""
    restart(rank, OF_WORLD)
    for maker in MAKERS.values():
        assert set(own_timeouts(maker(None))) == {OF_WORLD}
    set_seq_parallel_pg(2, 2, rank, 4)
    made = PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG
    compatible = {"process_group": PROCESS_GROUP.SEQUENCE_PG, "double_group": made}
    assert set(own_timeouts(compatible)) == {OF_WORLD}
    found = {}
    for maker, asked in WAITED_FOR:
        groups, limit = MAKERS[maker](asked), asked or OF_WORLD
        assert set(own_timeouts(groups)) == {limit}, maker
        found[maker] = (limit, *wait_in_vain(rank, maker, groups))
    return found


def test_a_missing_rank_is_reported_after_the_timeout_that_was_asked_for():
    everyone = run_ranks(4, missing)
    for name, (limit, error, _) in everyone[0].items():
        late = "RankLate: a call of burst_attn_func: rank 1 of the group did not make this call"
        assert error == f"{late} within {limit:g} s", name
        for rank in (0, 2, 3):
            _, error, seconds = everyone[rank][name]
            # a rank that stopped waiting at the same moment may be noticed first
            assert seconds < limit + SLACK and f"within {limit:g} s" in error, (
                name,
                error,
                seconds,
            )


def settings(rank: int) -> list[str]:
    """Call with timeouts, one after the other, and return the errors of wrong ones."""
    world, pair = torch_transport(dist.group.WORLD), dist.new_group([0, 1], timedelta(seconds=40))
    mesh = DeviceMesh.from_group(pair, "cpu")
    made = functools.partial(init_sequence_parallel, 2)
    assert set(own_timeouts(init_sequence_parallel(mesh=mesh).groups)) == {40.0}  # its user's wish
    assert torch_transport(pair).messenger.timeout == 40.0
    default = world.own_timeout
    for timeout, expected in ((None, default), (np.int64(99), 99.0), (None, 99.0), (8.0, 8.0)):
        sp = made(timeout=timeout)
        groups = sp.groups
        assert sp.sum(torch.ones(1)) == 2  # the group takes numpy's numbers too
        waits = {
            world.messenger.timeout,
            torch_transport(groups["process_group"]).messenger.timeout,
        }
        assert {expected, *own_timeouts(groups)} == waits == {expected}
    with pytest.raises(ValueError, match="inner_size=3 does not divide"):
        made(inner_size=3, timeout=9000.0)
    assert (
        world.messenger.timeout == 8.0 and world.own_timeout == default
    )  # shorter than the world's own
    assert set(own_timeouts(init_sequence_parallel(mesh=mesh, timeout=50.0).groups)) == {50.0}
    flat = init_sequence_parallel(mesh=init_device_mesh("cpu", (2,)), timeout=30.0)
    assert flat.process_group is dist.group.WORLD
    assert set(own_timeouts(flat.groups)) == {default} and world.messenger.timeout == 30.0
    errors = []
    for wrong in (120 + rank, 0, 1e-4, math.inf, "long"):
        with pytest.raises((TypeError, ValueError)) as caught:
            made(timeout=wrong)
        errors.append(str(caught.value))
    return errors


def test_a_timeout_is_of_the_made_groups_and_the_same_on_all_ranks():
    for errors in run_ranks(2, settings):
        assert errors[0].startswith("ranks differ in timeout of init_sequence_parallel: ")
        for message, got in zip(errors[1:4], ("0", "0.0001", "inf"), strict=True):
            assert message.endswith(f"timeout: expected 0.001 to 1e8 seconds, got {got}")
        assert "timeout must be a number" in errors[4]


def test_ranks_wait_as_long_as_was_asked_for_and_else_as_long_as_the_group_does():
    ring = BMTrainTransport.__new__(BMTrainTransport)
    ring.rank, ring.size = 0, 2
    processes.ProcessTransport.__init__(ring, dist.HashStore())
    for seconds, expected in ((5.0, 5.0), (700.0, 700.0), (None, 120.0)):
        ring.set_timeout(seconds)
        assert ring.messenger.timeout == expected
