"""All-gather: the ring in one stage, against dense attention in fp64 through the simulator."""

import pytest

from bmt_burst import Layout, Mask
from bmt_burst.strategies import load
from bmt_burst.strategies import ring as ring_strategy
from tests.rings import problem


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize(("size", "inner"), [(2, 2), (8, 8), (8, 4)])
def test_all_comes_in_one_stage_of_one_pass(size, inner, backward, monkeypatch):
    """Of each host; the ring has several of both with as few bytes."""
    monkeypatch.setattr(ring_strategy, "_ENOUGH_ROWS", 1)
    sizes = {"heads": 4, "kv_heads": 4, "head_size": 128, "backward": backward, "group_bytes": 0}
    call = problem(Mask.causal(64 * size), Layout.zigzag(64 * size, size), inner, **sizes)
    for rank in range(size):
        gathered, ring = (load(name).plan(call, rank) for name in ("all-gather", "ring"))
        for program in (gathered.forward_program, gathered.backward_program):
            assert len(program.passes) == 1
            assert [len(round_.stages) for round_ in program.rounds] == [1] * (size // inner)
            assert [event.do for event in program.events].count("fetch") == size // inner
        for program in (ring.forward_program, ring.backward_program):
            assert len(program.passes) == 4
            assert max(len(round_.stages) for round_ in program.rounds) == inner - 1
    assert str(gathered).startswith(f"rank {size - 1}, forward: KeysValues in 1 pass")
