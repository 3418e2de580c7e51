"""The ladder of examples: each step runs, is small, and is wrong if one of its parts is."""

import inspect

import pytest

from examples import dense, overlapped_ring, plain_ring
from tests.launcher import ROOT, run_script

LADDER = {"exchange": 1, "plain_ring": 4, "overlapped_ring": 1}  # and what each one checks


@pytest.mark.parametrize("name", LADDER)
def test_a_step_runs_and_is_small(name):
    code, printed = run_script(None, f"examples/{name}.py")
    assert code == 0, printed
    assert len(printed.splitlines()) == LADDER[name], printed
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < 60


def test_the_algorithm_has_25_lines():
    parts = (plain_ring.scores, plain_ring.forward, plain_ring.backward)
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) <= 25


@pytest.mark.parametrize("module", [plain_ring, overlapped_ring])
def test_any_number_of_ranks_equals_dense_attention(module, monkeypatch):
    for ranks in (2, 4, 6):
        monkeypatch.setattr(dense, "RANKS", ranks)
        dense.compare_with_dense(module.work)


def test_a_wrong_result_is_refused():
    def work(ring, q, k, v, mask, dout):
        out, *grads = plain_ring.work(ring, q, k, v, mask, dout)
        return out, grads[0], grads[1] + 1e-9, grads[2]

    with pytest.raises(AssertionError, match="dk differs from dense attention"):
        dense.compare_with_dense(work)
