"""What docs/bitwise.md says of CPUs, on simulated ranks, and the table of what GPUs measure."""

import pytest
import torch

from bench import other_tables
from bench.bitwise import cases, facts, parse_args
from bmt_burst import simulate
from bmt_burst.transport import ALONE

ARGS = parse_args(["--output", "-", "--seq-len", "48"])
CASES = {case.name: case for case in cases(ARGS, torch.device("cpu"), torch.float32)}
# of each token or weight alone, so they do not depend on how these are cut
ALONE_IN = {"RMSNorm", "AdamW"}


def run(size, work):
    if size == 1:
        return [work(0, ALONE)]
    return simulate(size, lambda ring: work(ring.rank, ring))


@pytest.mark.parametrize("name", CASES)
def test_runs_are_equal_and_some_results_also_on_other_ranks_layouts_and_rows(name):
    """With and without `deterministic`. Others may be equal by chance."""
    rows = [
        row
        for deterministic in CASES[name].choices
        for row in facts(CASES[name], deterministic, 2, run, repeats=1)
    ]
    digests: dict[str, list] = {}
    for row in rows:
        if "digests" in row:
            digests.setdefault(row["over"], []).append(row["digests"])
            assert row["forward"] and row.get("gradients", True), row
        elif name in ALONE_IN:
            assert row["forward"], row
    assert list(digests) == ["runs", "runs of ranks"]
    assert all(found == found[:1] * len(found) for found in digests.values())
    assert {row["over"] for row in rows} >= {"ranks", "layouts"}


def test_a_table_tells_parts_and_processes_apart():
    """A line for each choice of `deterministic` only where they differ."""
    same = {"kind": "bitwise", "what": "x", "gpus": 2, "forward": True}
    rows = [
        {**same, "deterministic": False, "over": "runs", "gradients": False},
        {**same, "deterministic": True, "over": "runs", "gradients": True},
        {**same, "what": "y", "deterministic": False, "over": "runs", "digests": {"forward": "a"}},
        {**same, "what": "y", "deterministic": False, "over": "runs", "digests": {"forward": "b"}},
        {**same, "what": "z", "deterministic": False, "over": "layouts", "gradients": True},
        {**same, "what": "z", "deterministic": True, "over": "layouts", "gradients": True},
    ]
    assert other_tables.bitwise_table(rows).splitlines()[2:] == [
        "| x | no | forward | - | - | - | - |",
        "| x | yes | yes | - | - | - | - |",
        "| y | - | no | - | - | - | - |",
        "| z | either | - | - | - | - | yes |",
    ]
